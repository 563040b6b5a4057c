"""Per-rank state: the state of Python and torch that each simulated rank has for itself."""
