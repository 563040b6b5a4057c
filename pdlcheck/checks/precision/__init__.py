"""Loss scalers, sums of half precision, clipping."""
