"""Our own small runtime: it executes the action tables that torch's cannot, two-way and asynchronous ones.

messages     point-to-point messages of a table, receives posted first
weights      versions of a stage's weights, given to it functionally
executor     one rank's row of a table, action by action
runtime      a two-way table step by step, with the interface of torch's runtime
pipemare     PipeMare's learning rates and discrepancy correction
norms        the gradient norms that clipping without a flush can know
training     updates without a flush: batches in, losses out
recurrence   the same updates in one process, for comparison
checkpoint   what a resumed run needs of all ranks, as one
"""
