"""The pytest session inside of a rank process."""
