"""Tests of communication hooks: gradient compression, in our DistributedDataParallel and in torch's."""
