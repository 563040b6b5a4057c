"""How pytest items run on ranks: one folder for each kind of world."""
