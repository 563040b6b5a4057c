"""The observers of simulated operations: each follows the events of a run, and none knows another."""
