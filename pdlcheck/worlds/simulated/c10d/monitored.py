"""The ``monitored_barrier`` of simulated ranks, which names lost ranks and ranks that exceed a time limit."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from pdlcheck.compat.torch.c10d import get_default_group
from pdlcheck.operations.monitored_barrier import post_monitored_barrier
from pdlcheck.worlds.exceptions import text_of
from pdlcheck.worlds.simulated.engine.engine import SimulatedEngine
from pdlcheck.worlds.simulated.engine.gloo_errors import (
    TIMEOUT_MS,
    barrier_timeout,
    connection_closed,
    failed_to_pass,
    is_consequence,
    is_time_limit,
    timed_out,
)
from pdlcheck.worlds.simulated.engine.work import SimulatedWork
from pdlcheck.worlds.simulated.observers.fault_injection import faults_of
from pdlcheck.worlds.simulated.schedules.access import Question
from pdlcheck.worlds.simulated.scheduling.scheduler import RankThread, current_rank

__all__ = ["monitored_barrier"]


def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """Wait until all ranks of ``group`` are in the barrier. All other ranks answer to rank 0.

    Without a ``timeout``, healthy ranks that do not come are a deadlock, not a wait of half an hour.

    Raises:
        RuntimeError: a rank is lost or late. On rank 0 the error names the rank; on other ranks it refers to rank 0.
            If a rank finds its connection closed when it comes, the error has no more detail, as on gloo.
    """
    if group == c10d.GroupMember.NON_GROUP_MEMBER:
        dist.barrier(group)  # reports that the rank is not a member
        return
    group = group or get_default_group()
    limit = None if timeout is None or dist.get_rank(group) else timedelta(milliseconds=_milliseconds(timeout))
    if limit == timedelta(0) and dist.get_world_size(group) > 1:
        raise barrier_timeout(wait_all_ranks)
    work: SimulatedWork | None = None
    try:
        work = cast(SimulatedWork, post_monitored_barrier(group))
        work.wait(limit)
    except RuntimeError as error:
        me = current_rank()
        assert me is not None
        if limit is not None and work is not None and not work.is_lost:
            raise _too_late(work, me.engine, _milliseconds(limit), wait_all_ranks) from None
        me.engine.scheduler.switch(Question(me.engine.last[me.rank]))  # the set of lost ranks changes with time
        members, gone = dist.get_process_group_ranks(group), faults_of(me.engine).gone
        lost = [place for place, rank in enumerate(members) if rank in gone]
        place, came_too_late = members.index(me.rank), work is None
        if place and not lost and work is not None and text_of(error) == text_of(connection_closed(members[0])):
            raise failed_to_pass(place, lost, 0, error, wait_all_ranks) from None  # rank 0 reached its time limit
        if not is_consequence(error) or not lost or (came_too_late and (place == 0 or 0 in lost)):
            raise
        limit_ms = _milliseconds(timeout)
        if place and is_time_limit(error) and 0 in lost:
            original = timed_out("send")
        elif place:  # rank 0 has failed: it ends, or it has closed its connections, or it goes on with other work
            left = is_time_limit(error) or _leaves(me, me.engine.scheduler.ranks[members[0]])
            original = connection_closed(members[0]) if left else timed_out("recv")
        else:
            original = timed_out("recv", limit_ms) if is_time_limit(error) else connection_closed(members[lost[0]])
        raise failed_to_pass(place, lost, limit_ms, original, wait_all_ranks) from None


def _too_late(work: SimulatedWork, engine: SimulatedEngine, limit_ms: int, every: bool) -> RuntimeError:
    """Return the error for ranks that have not come to rank 0 in time, and close rank 0's connections in the group."""
    signature = work.operation.signature
    late = [signature.members.index(rank) for rank in engine.missing(signature)]
    engine.close(work)
    return failed_to_pass(0, late, limit_ms, timed_out("recv", limit_ms), every)


def _leaves(me: RankThread, leader: RankThread) -> bool:
    """Wait until ``leader`` ends; return False if it has not ended when no other rank can go on."""
    patient = faults_of(me.engine).patient
    patient.add(me.rank)
    me.engine.scheduler.wait_until(
        lambda: leader.outcome is not None or me.rank not in patient, f"monitored_barrier, for rank {leader.rank}"
    )
    return leader.outcome is not None


def _milliseconds(timeout: Any) -> int:
    if timeout is None:
        return TIMEOUT_MS
    return round(1000 * (timeout.total_seconds() if isinstance(timeout, timedelta) else timeout))
