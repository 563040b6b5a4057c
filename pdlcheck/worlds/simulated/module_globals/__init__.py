"""Module globals that each simulated rank has for itself."""
