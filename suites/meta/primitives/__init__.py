"""Primitives in processes without a world: how they end, fail and restart."""
