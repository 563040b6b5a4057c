"""The private names of pytest, by subject."""
