"""Projects that have never heard of pdlcheck run as if it were not installed."""
