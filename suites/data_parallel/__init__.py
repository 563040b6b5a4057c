"""DistributedDataParallel: gradients, buckets, hooks, and what is refused."""
