"""Messages: blocking and not, by tag, from any source, in batches."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from pdlcheck.errors import Deadlock, Unsupported

from ..parity import messages
from ..simulated import network_programs as network
from .columns import SEMANTICS
from .entry import WORLD_SIZE, Feature, given, mine

RANKS = range(WORLD_SIZE)
LEFT = [(rank - 1) % WORLD_SIZE for rank in RANKS]
RIGHT = [(rank + 1) % WORLD_SIZE for rank in RANKS]
NO_ANY_SOURCE = {"errors": {"nccl": Unsupported}}
NO_TAGS = "nccl has no tags: messages are received in the order sent"
BUFFERING = ("eager", "buffered")
RING_DTYPES = (torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.int16)


def send_and_recv(numel):
    """Send along a ring; even ranks send first."""
    rank, x, y = dist.get_rank(), mine(numel), torch.zeros(numel)
    if rank % 2 == 0:
        dist.send(x, RIGHT[rank])
    dist.recv(y, LEFT[rank])
    if rank % 2 == 1:
        dist.send(x, RIGHT[rank])
    return y


def isend_and_irecv(numel):
    rank, x, y = dist.get_rank(), mine(numel), torch.zeros(numel)
    works = [dist.isend(x, RIGHT[rank]), dist.irecv(y, LEFT[rank])]
    for work in reversed(works):
        work.wait()
    return y


def from_the_left(numel):
    return [given(left, numel) for left in LEFT]


def message_of_a_row():
    rank, x = dist.get_rank(), mine(3, 4)
    y = torch.zeros(2, 4)
    sending = dist.isend(x[1], RIGHT[rank])
    dist.recv(y[0], LEFT[rank])
    sending.wait()
    return y


def message_of_a_row_alone():
    return [torch.stack([given(left, 3, 4)[1], torch.zeros(4)]) for left in LEFT]


def _on(**values):
    return [values.get(f"rank_{rank}") for rank in RANKS]


def _in_a_chain():
    values = [1.0]
    for source in range(WORLD_SIZE - 1):
        values.append(2 * values[-1] + source)
    return values


def _by_tag():
    return [[left + 0.5 * tag for tag in (0, 1)] for left in LEFT]


def _by_order():
    """Return the messages by order; the receives are posted for tag 1 first."""
    return [[left + 0.5, float(left)] for left in LEFT]


FEATURES = [
    Feature("send, recv", partial(send_and_recv, 2), partial(from_the_left, 2)),
    Feature("send, recv, above the eager limit", partial(send_and_recv, 500), partial(from_the_left, 500)),
    Feature("isend, irecv", partial(isend_and_irecv, 2), partial(from_the_left, 2)),
    Feature("isend, irecv, above the eager limit", partial(isend_and_irecv, 500), partial(from_the_left, 500)),
    Feature("chain of blocking calls", messages.chain_of_blocking_calls, _in_a_chain),
    Feature(
        "head-to-head send",
        partial(network.head_to_head, 2),
        lambda: [1.0, 0.0],
        world_size=2,
        errors={column: Deadlock for column in SEMANTICS if column not in BUFFERING},
        why="two sends meet that nobody buffers",
    ),
    Feature(
        "messages of 7 dtypes",
        messages.ring_of_every_dtype,
        lambda: [[(str(dtype), torch.tensor([left, 1]).to(dtype).tolist()) for dtype in RING_DTYPES] for left in LEFT],
    ),
    Feature("message of a row", message_of_a_row, message_of_a_row_alone),
    Feature("empty message", messages.empty_message, lambda: _on(rank_1=(0, []))),
    Feature("tags", partial(network.tags, (1, 2)), lambda: [None, {1: 1.0, 2: 2.0}], world_size=2),
    Feature(
        "tags in another order",
        partial(network.tags, (2, 1)),
        lambda: [None, {2: 2.0, 1: 1.0}],
        world_size=2,
        alone_under={"nccl": lambda: [None, {2: 1.0, 1: 2.0}]},
        why=NO_TAGS,
    ),
    Feature(
        "equal tags keep their order",
        messages.equal_tags_keep_their_order,
        lambda: [[], [0.0, 1.0, 2.0, 3.0, 4.0], [], []],
    ),
    Feature(
        "any-source receive",
        messages.rank_0_as_a_server,
        lambda: [None, 10.0, 20.0, 30.0],
        **NO_ANY_SOURCE,
    ),
    Feature(
        "any-source receive with a tag",
        messages.any_source_with_a_tag,
        lambda: _on(rank_3=[(0, 0.0), (1, 1.0), (2, 2.0)]),
        **NO_ANY_SOURCE,
    ),
    Feature(
        "any-source receive in a sub-group",
        messages.any_source_in_a_group,
        lambda: _on(rank_2=[(1, 1.0), (3, 3.0)]),
        **NO_ANY_SOURCE,
    ),
    Feature(
        "batch_isend_irecv",
        messages.both_ways_in_a_batch,
        lambda: [(float(left), float(right)) for left, right in zip(LEFT, RIGHT, strict=True)],
    ),
    Feature(
        "batch_isend_irecv with tags",
        messages.batch_with_tags,
        _by_tag,
        alone_under={"nccl": _by_order},
        why=NO_TAGS,
    ),
    Feature(
        "messages around collectives",
        messages.messages_around_collectives,
        lambda: [(6.0, float(left)) for left in LEFT],
    ),
    Feature("messages of 1 MiB", messages.large_messages_both_ways, lambda: [float(left << 18) for left in LEFT]),
]
