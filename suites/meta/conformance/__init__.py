"""torch's own tests of its distributed backends, on the ranks of every world."""
