"""What a rank computes: ranges of layers as modules, the code that they run, and where their weights come from."""
