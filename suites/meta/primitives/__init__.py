"""Tests of primitives in processes without a world: how they end, fail and restart."""
