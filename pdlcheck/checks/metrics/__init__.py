"""Checks of metrics that ranks compute together."""
