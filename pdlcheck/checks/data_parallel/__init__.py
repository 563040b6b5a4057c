"""Checks of wrappers for data parallel training, and of their communication hooks."""
