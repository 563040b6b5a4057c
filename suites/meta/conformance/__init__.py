"""Tests of torch's distributed backends, taken from torch, on the ranks of every world."""
