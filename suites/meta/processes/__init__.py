"""The worlds whose ranks are processes of this machine."""
