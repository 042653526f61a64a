"""The parts of the search, one idea each, from the costs of layers up.

ranges      every range of layers at once: seconds and bytes
ladder      any range of layers with more and more of them recomputing
recompute   which layers must recompute for a range to fit
seats       which devices the ranks are, with replicas
outline     what an order means for its stages
tables      the same for each stage of a pipeline: devices, links, memory, pins
cases       the best split for one depth, micro-batch size and schedule
bounds      what no split can beat
family      the same for pipelines of all depths at once, with memory in it
moves       splits near a split
space       all cases, best bound first
outcome     one split in full, simulated
whynot      what the alternatives would give
limits      what limits a plan, and what to try when none fits
request     what a caller may ask for
"""
