"""The store and barriers: they compute nothing, so each program asserts the required behaviour."""

from __future__ import annotations

import torch.distributed as dist

from ..parity import groups
from .columns import SEMANTICS
from .entry import WORLD_SIZE, Feature, everywhere

RANKS = range(WORLD_SIZE)


def _rounds(barrier, group=None, members=RANKS):
    """Check three times that no rank leaves a barrier before all have entered it."""
    store = groups._store("of the barrier")
    for turn in range(1, 4):
        store.add("entered", 1)
        barrier(group)
        entered = store.add("entered", 0)
        assert entered >= turn * len(members), f"{entered} of {turn * len(members)} had entered"
        barrier(group)
    return "held"


def barrier():
    return _rounds(dist.barrier)


def asynchronous_barrier():
    return _rounds(lambda group: dist.barrier(group, async_op=True).wait())


def monitored_barrier():
    return _rounds(dist.monitored_barrier)


def barrier_of_a_group():
    members = [1, 2, 3]
    group = dist.new_group(members)
    return _rounds(dist.barrier, group, members) if dist.get_rank() in members else "held"


def monitored_barrier_of_a_group():
    members = [1, 2, 3]
    group = dist.new_group(members)
    return _rounds(dist.monitored_barrier, group, members) if dist.get_rank() in members else "held"


def store_with_a_queue():
    store = groups._store("queue")
    if dist.get_rank() == 0:
        store.queue_push("work", b"first")
        store.queue_push("work", b"second")
    dist.barrier()
    return [store.queue_pop("work"), store.queue_pop("work"), store.queue_len("work")] if dist.get_rank() == 3 else None


def _on(rank, value, elsewhere=None):
    return [value if each == rank else elsewhere for each in RANKS]


def _plain(name, program, alone):
    return Feature(name, program, alone, numerics=False)


def _held():
    return everywhere("held")


NO_QUEUES = {
    "errors": dict.fromkeys(SEMANTICS, NotImplementedError),
    "why": "torch does not let a store that is written in Python have queues",
}

FEATURES = [
    _plain("barrier", barrier, _held),
    _plain("barrier, async_op", asynchronous_barrier, _held),
    _plain("barrier of a sub-group", barrier_of_a_group, _held),
    _plain("monitored_barrier", monitored_barrier, _held),
    _plain("monitored_barrier of a sub-group", monitored_barrier_of_a_group, _held),
    _plain("store set, wait, get", groups.store_of_values, lambda: everywhere([b"0", b"1", b"4", b"9"])),
    _plain("store add", groups.store_that_counts, lambda: everywhere((10, b"10"))),
    _plain("store compare_set", groups.store_of_the_first, lambda: _on(0, (b"a", b"a", b"d", b"d"))),
    _plain("store check, delete_key", groups.store_that_forgets, lambda: _on(1, (True, True, False, False))),
    _plain("store multi_set, multi_get", groups.store_of_many, lambda: _on(3, [b"2", b"1"], b"1")),
    _plain("store append", groups.store_that_appends, lambda: _on(0, b"abcd")),
    _plain("store wait with a timeout", groups.store_with_a_wait_that_ends, lambda: everywhere(b"\x00\xff")),
    Feature(
        "store queue_push, queue_pop",
        store_with_a_queue,
        lambda: _on(3, [b"first", b"second", 0]),
        numerics=False,
        **NO_QUEUES,
    ),
]
