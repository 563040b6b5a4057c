"""The private names of torch's rendezvous."""

from __future__ import annotations

from typing import Final

from pdlcheck.compat.private import name

__all__ = ["CREATE_STORE", "HANDLERS"]

CREATE_STORE: Final = name(
    "torch.distributed.rendezvous._create_c10d_store",
    "the store at the address of a rendezvous: that of the pool, or one that meets no other process",
    lost="init_process_group in ranks of processes, and the check of its arguments",
)
HANDLERS: Final = name(
    "torch.distributed.rendezvous._rendezvous_handlers",
    "a rendezvous of env:// that takes rank and world size from MPI",
    lost="init_process_group under mpiexec without a launcher's variables",
)
