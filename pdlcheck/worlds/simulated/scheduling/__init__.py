"""The turns of simulated ranks."""
