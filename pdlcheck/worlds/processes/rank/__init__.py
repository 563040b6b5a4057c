"""The side of a rank, and of the server that forks ranks."""
