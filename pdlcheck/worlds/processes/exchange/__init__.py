"""The data that the controller and the ranks exchange."""
