"""The reports of items that have run on ranks."""
