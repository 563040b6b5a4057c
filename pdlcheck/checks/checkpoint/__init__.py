"""Training that is resumed; checkpoints that are damaged."""
