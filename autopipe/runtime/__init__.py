"""Everything that touches torch. From the top down, each of which sees only what is below it:

measuring    what layers, devices and links cost: timed, counted or computed
checking     a plan held against one process, and its prediction against what running it showed
running      a plan in a training loop: its batches, its ranks' steps, its optimizers
own          our own small runtime, for action tables that torch's cannot run
tables       action tables on torch's pipeline runtime, and when each action ran
stages       what a rank computes: ranges of layers as modules, and where their weights come from
capture      an unmodified module becomes layers and edges
ranks        the processes of a run: how they start and end, what they run on
workload     a model file: where the model, its batches and its loss come from
"""
