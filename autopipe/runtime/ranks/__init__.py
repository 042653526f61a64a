"""The processes of a run: how they start and end, what they run on, and how they sum what they share.

launch       one function on several local ranks, all of which end whatever happens
watching     what every rank is doing, and the end of all when none does anything any more
failures     how a rank that failed is told
preload      what ranks import, in the process that they are forked from
host         settings of a CPU rank's process that make its steps faster and more even
devices      what differs between a CPU process and a CUDA device
memory       bytes of tensors that are alive
gradients    sums of gradients over the processes that hold a parameter
"""
