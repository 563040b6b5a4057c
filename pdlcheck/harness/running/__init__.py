"""How the phases of an item run on ranks."""
