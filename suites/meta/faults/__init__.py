"""Ranks that are killed, stalled or fed damaged data, on the simulated cluster and on gloo."""
