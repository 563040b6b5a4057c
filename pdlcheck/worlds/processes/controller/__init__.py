"""The controller's side: it starts ranks and calls functions on them."""
