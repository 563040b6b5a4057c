"""Checks of the distribution of samples over ranks."""
