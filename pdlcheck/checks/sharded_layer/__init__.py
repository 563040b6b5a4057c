"""The check of layers that are divided over ranks."""
