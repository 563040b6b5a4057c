"""Checks of PageRank."""
