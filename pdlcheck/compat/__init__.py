"""The ground that is not ours: names that torch, pytest and Python keep private, and what we exchange in them."""
