"""Tests of DistributedDataParallel: gradients, buckets, hooks, and refused uses."""
