"""The phases of an item on ranks."""
