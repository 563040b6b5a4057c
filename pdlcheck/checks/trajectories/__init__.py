"""Checks of the weights at the end of training."""
