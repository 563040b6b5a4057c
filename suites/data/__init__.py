"""Tests of shards, samplers and data sets: the data that each rank loads."""
