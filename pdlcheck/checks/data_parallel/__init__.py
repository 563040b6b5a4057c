"""Wrappers for data parallel training, and their communication hooks."""
