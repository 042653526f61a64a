"""Action tables on torch's pipeline runtime, and when each action ran.

torch_ir     a table in, torch's runtime out
torch_stage  torch's stage, which keeps what crosses its boundaries only as long as it is needed
torch_facts  whether the installed torch does what those two rely on
sent         what a rank has sent, until it is known to have been taken
recorder     when each action of a step really ran
emulated     stages that only take time, for what the runtime and its messages cost
"""
