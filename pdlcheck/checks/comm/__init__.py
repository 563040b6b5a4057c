"""Collectives of one's own."""
