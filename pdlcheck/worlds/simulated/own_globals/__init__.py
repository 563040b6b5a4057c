"""Module globals of its own for each simulated rank."""
