"""Projects that do not use pdlcheck run as if it were not installed."""
