"""Checks of the random numbers that ranks draw."""
