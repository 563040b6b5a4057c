"""The engine of the simulated world: it posts, matches and delivers the operations of the ranks."""
