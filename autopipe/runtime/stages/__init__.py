"""What a rank computes: ranges of layers as modules, the code that they run, and where their weights come from.

modules        a stage as a module that holds the model's own parameters
stage_graph    what one stage computes, as a function
graph_writer   operations of the model's program written into such a function
recomputation  layers that keep only their inputs
deferred       weight gradients that wait
chain          stages one after another in one process
shared         which ranks hold a parameter
initial        models without memory for their weights
filling        the values of a stage's weights: from a checkpoint, or as the model would make them
shards         a checkpoint, read one tensor at a time
"""
