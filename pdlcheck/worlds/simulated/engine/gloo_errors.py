"""The errors of survivors when a rank is lost: those of torch and gloo, with ``[sim]`` where gloo names a file."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from pdlcheck.operations.table import OPERATIONS
from pdlcheck.worlds.exceptions import text_of
from pdlcheck.worlds.observe import Signature

__all__ = [
    "TIMEOUT_MS",
    "barrier_timeout",
    "connection_closed",
    "failed_to_pass",
    "is_consequence",
    "is_time_limit",
    "never_joined",
    "operation_timeout",
    "pair_closure",
    "rendezvous_timeout",
    "timed_out",
]

TIMEOUT_MS = 1_800_000  # the default of torch's groups
_REACHED = "successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0."
_CONSEQUENCE = re.compile(
    r"\[sim\] (Connection closed by peer|Timed out waiting|Application timeout caused pair closure)"
    rf"|\[Rank 0\]: Ranks? [\d, ]+ failed to pass monitoredBarrier|Rank \d+ {re.escape(_REACHED)}"
    r"|Timed out after \d+ seconds waiting for clients|wait timeout after \d+ms, keys: |The client socket has timed out"
)


def is_consequence(error: BaseException) -> bool:
    """Return whether the error only reports that another rank is gone."""
    return isinstance(error, RuntimeError) and _CONSEQUENCE.match(text_of(error)) is not None


def is_time_limit(error: BaseException) -> bool:
    """Return whether the error reports that a time limit has elapsed in an operation."""
    return text_of(error).startswith("[sim] Timed out waiting")


def connection_closed(rank: int) -> RuntimeError:
    """Return the error for an operation that needs this rank, whose process has ended."""
    return RuntimeError(
        f"[sim] Connection closed by peer [rank {rank}]. This is typically caused by a remote worker crashing."
    )


def pair_closure() -> RuntimeError:
    """Return the error for an operation of a rank after one of its time limits has elapsed."""
    return RuntimeError("[sim] Application timeout caused pair closure")


def operation_timeout(signature: Signature, timeout_ms: int = TIMEOUT_MS) -> RuntimeError:
    """Return the error for a time limit that elapses in an operation that needs another rank."""
    kind = OPERATIONS.get(signature.op)
    return timed_out("send" if kind is not None and kind.only_sends(signature) else "recv", timeout_ms)


def timed_out(direction: str, timeout_ms: int = TIMEOUT_MS) -> RuntimeError:
    """Return the error for a time limit that elapses in a ``send`` or ``recv``."""
    return RuntimeError(f"[sim] Timed out waiting {timeout_ms}ms for {direction} operation to complete")


def rendezvous_timeout(rank: int, world_size: int, absent: Sequence[int], timeout: timedelta | None) -> RuntimeError:
    """Return the error of ``init_process_group`` on a rank that came.

    The error is that of a store that rank 0 keeps (``env://``, ``tcp://``).
    """
    timeout_ms = TIMEOUT_MS if timeout is None else round(timeout.total_seconds() * 1000)
    if 0 in absent:
        address = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "29500")
        return dist.DistNetworkError(
            f"The client socket has timed out after {timeout_ms}ms while trying to connect to ({', '.join(address)})."
        )
    if rank:
        return dist.DistStoreError(f"wait timeout after {timeout_ms}ms, keys: /default_pg/0//cpu//0/0")
    seconds = timeout_ms // 1000 + 1  # rank 0 checks once a second
    came = f"{world_size - len(absent)}/{world_size}"
    return dist.DistStoreError(f"Timed out after {seconds} seconds waiting for clients. {came} clients joined.")


def never_joined(name: str, place: int, timeout: timedelta | None) -> RuntimeError:
    """Return the error of ``new_group`` on a member of a group whose member ``place`` is lost."""
    timeout_ms = TIMEOUT_MS if timeout is None else round(timeout.total_seconds() * 1000)
    return dist.DistStoreError(f"wait timeout after {timeout_ms}ms, keys: /default_pg/0//{name}//cpu//0/{place}")


def barrier_timeout(every: bool) -> RuntimeError:
    """Return the error of ``monitored_barrier(timeout=0)`` on rank 0, whether or not its peers are waiting."""
    told = "Rank 0 timed out in monitoredBarrier after 0 ms.\nNo ranks successfully processed in monitoredBarrier."
    return failed_to_pass(0, [1], 0, told, every)


def failed_to_pass(rank: int, lost: Sequence[int], timeout_ms: int, original: object, every: bool) -> RuntimeError:
    """Return the error of ``monitored_barrier`` on a rank that waits in it.

    Args:
        rank: the rank's place in the group.
        lost: the places of the lost ranks in the group.
        timeout_ms: the time limit in milliseconds.
        original: the error of gloo beneath.
        every: name all lost ranks, as with ``wait_all_ranks``.
    """
    if rank:
        told = f"Rank {rank} {_REACHED} Please check rank 0 logs for faulty rank."
    elif every:
        return RuntimeError(
            f"[Rank 0]: Ranks {', '.join(map(str, lost))} failed to pass monitoredBarrier in {timeout_ms} ms"
        )
    else:
        told = f"[Rank 0]: Rank {lost[0]} failed to pass monitoredBarrier in {timeout_ms} ms"
    return RuntimeError(f"{told}\n Original exception: \n{original}")
