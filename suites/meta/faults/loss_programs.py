"""Programs that lose a rank: ``do(operation, ...)`` carries out one operation and records its result.

They also run on real processes (``gloo_losses.py``), of which one is killed, or sleeps, at an operation.
"""

from __future__ import annotations

from datetime import timedelta

from torch import ones
from torch.distributed import (
    ReduceOp,
    all_reduce,
    all_to_all_single,
    barrier,
    broadcast,
    init_process_group,
    new_group,
    recv,
    reduce,
    send,
)

SHORT = timedelta(seconds=1.5)


def reduce_again(do, rank):
    for _ in range(3):
        do(all_reduce, ones(1))


def meet_twice(do, rank):
    do(barrier)
    do(barrier)


def exchange(do, rank):
    for _ in range(2):
        do(all_to_all_single, ones(3), ones(3))


def broadcast_from_the_lost(do, rank):
    for _ in range(2):
        do(broadcast, ones(1), 1)


def broadcast_to_the_lost(do, rank):
    do(broadcast, ones(1), 0)


def reduce_to_rank_0(do, rank):
    for _ in range(2):
        do(reduce, ones(1), 0)


def receive_from_the_lost(do, rank):
    do(barrier)
    if rank < 2:
        do(recv, ones(1), 1) if rank == 0 else do(send, ones(1), 0)


def send_to_the_lost(do, rank):
    do(barrier)
    if rank < 2:
        do(send, ones(1), 1) if rank == 0 else do(recv, ones(1), 0)


def survivors_talk_on(do, rank):
    do(barrier)
    if rank == 1:
        do(barrier)
    else:
        do(send, ones(1), 2) if rank == 0 else do(recv, ones(1), 0)


def wait_for_futures(do, rank):
    for _ in range(2):
        do(lambda: all_reduce(ones(1), async_op=True).get_future().wait())


def reduce_in_a_group_that_was_there(do, rank):
    pair = do(new_group, [0, 2])
    do(all_reduce, ones(1))
    if rank != 1:
        do(all_reduce, ones(1), ReduceOp.SUM, pair)


def regroup(do, rank):
    do(barrier)
    pair = do(new_group, [0, 2])
    if rank != 1:
        do(all_reduce, ones(1), ReduceOp.SUM, pair)


def group_with_the_lost(do, rank):
    do(barrier)
    do(new_group, [0, 1], SHORT)


def monitor(do, rank):
    from torch.distributed import monitored_barrier  # imported here, because simulated ranks have their own

    do(barrier)
    do(monitored_barrier, None, SHORT)


def monitor_all(do, rank):
    from torch.distributed import monitored_barrier

    do(barrier)
    do(monitored_barrier, None, SHORT, True)


def rendezvous(do, rank):
    do(init_process_group, "gloo", None, SHORT)
