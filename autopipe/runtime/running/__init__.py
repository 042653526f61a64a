"""A plan in a training loop: its batches, its ranks' steps, its optimizers."""
