"""Communication hooks: compression of gradients, in our DistributedDataParallel and in torch's."""
