"""What each simulated rank has for itself of what Python and torch keep for a process."""
