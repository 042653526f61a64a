"""A plan in a training loop: its batches, its ranks' steps, its optimizers.

pipeline         what a user's own training loop is given
runner           one rank's share of a plan
batches          a global batch as the micro-batches of one replica
shares           what each micro-batch's loss counts for
forms            whether ranks are given batches that are alike
joining          the outputs of micro-batches as their batch's
replicas         where a process stands among the replicas of a pipeline
in_turn          models whose forward leaves something for the next one
piecewise        an optimizer that updates pieces of parameters
optimizer_state  its state under the names of the model's parameters
"""
