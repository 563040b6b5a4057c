"""The semantics of the simulated network that have a column in the matrix."""

from __future__ import annotations

from pdlcheck.worlds.semantics import PROFILES, Semantics

__all__ = ["DEFAULT", "EAGER_BYTES", "SEMANTICS"]

DEFAULT = "rendezvous"
EAGER_BYTES = 64  # the smallest messages of the programs are below it, the largest above

SEMANTICS = {
    DEFAULT: PROFILES[DEFAULT],
    "eager": Semantics(send="eager", eager_bytes=EAGER_BYTES),
    "buffered": Semantics(send="buffered"),
    "data at wait": Semantics(data="at_wait"),
    "data random": Semantics(data="random"),
    "completion random": Semantics(completion="random"),
    "reduce reversed": Semantics(reduce="reversed"),
    "reduce random": Semantics(reduce="random"),
    "poison off": Semantics(poison=False),
    "nccl": PROFILES["nccl"],
    "gloo": PROFILES["gloo"],
}
