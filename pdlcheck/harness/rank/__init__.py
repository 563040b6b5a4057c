"""The pytest session of a rank process."""
