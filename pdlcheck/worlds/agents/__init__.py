"""Ranks that agents fork: the processes that a launcher or a function has started, on this machine or others."""
