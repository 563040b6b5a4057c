"""Which simulated rank runs."""
