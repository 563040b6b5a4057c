"""Tests of ranks that are killed, stalled or given damaged data, on the simulated cluster and on gloo."""
