"""Checks of resumed training and of damaged checkpoints."""
