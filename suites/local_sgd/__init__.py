"""LocalSGD and DiLoCo: ranks that step alone and average."""
