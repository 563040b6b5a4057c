"""The private names of torch, by subject."""
