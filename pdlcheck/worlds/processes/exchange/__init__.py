"""What goes between controller and ranks."""
