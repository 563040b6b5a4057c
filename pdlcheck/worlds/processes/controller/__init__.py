"""The side of the process that starts ranks and calls functions on them."""
