"""What is told of an item that has run on ranks."""
