"""Checks of loss scalers, of sums in half precision, and of gradient clipping."""
