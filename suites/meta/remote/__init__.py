"""Tests of worlds whose ranks run in processes that a function starts."""
