"""Who draws which random numbers."""
