"""The private names of Python's standard library, by subject. Nothing here imports torch or pytest."""
