"""The names that people choose from, on the command line, in markers and as arguments; not what they mean."""

__all__ = ["DEVICES", "ISOLATIONS", "SEMANTICS"]

DEVICES = ("cpu", "cuda")
ISOLATIONS = ("pool", "reinit", "fresh")
SEMANTICS = ("buffered", "gloo", "nccl", "rendezvous")
