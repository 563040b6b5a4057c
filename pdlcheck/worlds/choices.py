"""The names that people choose from, on the command line, in markers and as arguments; not what they mean."""

__all__ = ["DEVICES", "ISOLATIONS", "MOST_RANKS", "SEMANTICS"]

DEVICES = ("cpu", "cuda")
ISOLATIONS = ("pool", "reinit", "fresh")
MOST_RANKS = 10_000  # of one world: more than a machine starts, far fewer than a number that slipped in would ask for
SEMANTICS = ("buffered", "gloo", "nccl", "rendezvous")
