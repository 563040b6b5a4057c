"""Checks of collectives that users write."""
