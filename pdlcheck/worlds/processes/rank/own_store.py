"""The store of the pool, which a user's ``init_process_group`` finds at MASTER_ADDR and MASTER_PORT in a rank.

torch would open a second server there, and groups that are made one after the other would read each other's addresses.
"""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from pdlcheck.compat.torch.rendezvous import CREATE_STORE
from pdlcheck.compat.torch.stores import TCPStore

__all__ = ["meet_at"]


def meet_at(host: str, port: int) -> None:
    """Make each rendezvous at this address use the store that listens there, each time under names of its own."""
    torchs = CREATE_STORE.value
    times = itertools.count()

    def create(
        hostname: str, its_port: int, rank: int, world_size: int, timeout: timedelta, *more: Any, **options: Any
    ) -> Store:
        if (hostname, its_port) != (host, port):
            store: Store = torchs(hostname, its_port, rank, world_size, timeout, *more, **options)
            return store
        own = TCPStore(host, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False)
        return PrefixStore(f"meeting {next(times)}", own)

    setattr(CREATE_STORE.owner, CREATE_STORE.attribute, create)
