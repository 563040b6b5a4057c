"""Shards, samplers and data sets: what each rank loads."""
