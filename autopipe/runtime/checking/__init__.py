"""A plan held against one process, and its prediction against what running it showed."""
