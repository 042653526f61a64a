"""A plan held against one process, and its prediction against what running it showed.

plans        run a plan on local processes, and compare
rehearsal    a plan at its full number of ranks, which wait instead of computing
parity       losses and gradients against one process
updates      the same for a plan that never flushes
reduction    how the gradients of micro-batches add up to their batch's
draws        equal random numbers in one process and in a pipeline
"""
