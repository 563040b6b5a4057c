"""The names that users choose from on the command line, in markers and as arguments; other modules define them."""

__all__ = ["DEVICES", "ISOLATIONS", "MOST_RANKS", "SEMANTICS"]

DEVICES = ("cpu", "cuda")
ISOLATIONS = ("pool", "reinit", "fresh")
MOST_RANKS = 10_000  # in one world: more than one machine can start, and small enough to catch a mistyped number
SEMANTICS = ("buffered", "gloo", "nccl", "rendezvous")
