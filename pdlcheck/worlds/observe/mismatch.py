"""The comparison of the signatures of ranks that meet in one operation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, starmap
from typing import Any

from pdlcheck.errors import CollectiveMismatch
from pdlcheck.operations.signature import Signature
from pdlcheck.operations.table import OPERATIONS
from pdlcheck.operations.words import in_common, listed, who
from pdlcheck.worlds.observe.differences import Callers, describe_differences

__all__ = ["PAIRWISE", "divided_batch", "fits", "mismatch", "p2p_mismatch"]

# operations of which two ranks may disagree although their signatures are equal
PAIRWISE = frozenset(name for name, kind in OPERATIONS.items() if kind.compares_pairs)
_MUST_AGREE = (
    ("op", "the operation"),
    ("members", "the ranks of the group"),
    ("root", "the root"),
    ("reduce_op", "the reduce-op"),
    ("dtypes", "the dtype"),
    ("shapes", "the shape"),
    ("orders", "the order of elements in memory"),
)

# these fields are adjacent, with those by which operations meet: one comparison suffices if nothing differs
_AT_ONCE = slice(Signature._fields.index("op"), Signature._fields.index("peer"))


def fits(there: Signature, arriving: Signature) -> bool:
    """Return whether the signatures of two members of one collective agree."""
    if there[_AT_ONCE] != arriving[_AT_ONCE]:
        return mismatch([there, arriving]) is None
    return arriving.op not in PAIRWISE or _pair_mismatch(there, arriving) is None


def mismatch(there: Sequence[Signature]) -> CollectiveMismatch | None:
    """Compare the members of one collective that are there; return None if they agree.

    The value that the fewest ranks have comes first; of equal numbers, the value of the lowest rank. So the message
    does not depend on the order of arrival. If one rank differs from all others, the message names it first.
    """
    there = sorted(there)  # by rank
    for name, words in _MUST_AGREE:
        sides = _sides(name, there)
        if len(sides) > 1:
            return _differ(name, words, sides)
    if there[0].op in PAIRWISE:
        return next(filter(None, starmap(_pair_mismatch, combinations(there, 2))), None)
    return None


def _sides(name: str, there: Sequence[Signature]) -> list[list[Signature]]:
    """Return the members grouped by their value, the smallest group first."""
    sides: dict[Any, list[Signature]] = {}
    if name == "op" and all(one.makes_group_of_itself for one in there):
        return [[*there]]  # such groups never communicate, so every backend accepts them
    for one in there:
        value = getattr(one, name)
        sides.setdefault(_without_ones(value) if name == "shapes" else value, []).append(one)
    return sorted(sides.values(), key=len)  # stable: among equal sizes the lowest rank's group stays first


def _differ(name: str, words: str, sides: Sequence[Sequence[Signature]]) -> CollectiveMismatch:
    firsts = [side[0] for side in sides]
    one, ranks = firsts[0], who([[one.rank for one in side] for side in sides])
    values = [getattr(first, name) for first in firsts]
    if name == "op" and all(first.is_new_group for first in firsts):
        head = (
            f"{ranks} make different groups: {listed(values)}; all ranks, also those that are not in a group, must "
            "make the same groups in the same order"
        )
        return _error(head, "the ranks of the group", sides)
    head = f"{ranks} met in collective {one.seq} of the {one.group_text} and differ in "
    if name == "orders":
        at = next(at for at in range(len(one.shapes)) if len({_order(first, at) for first in firsts}) > 1)
        orders = listed([_order(first, at) for first in firsts])
        head += (
            f"the order of elements in memory, by which backends go: {orders}, of shape {one.shapes[at]}; call "
            ".contiguous() on every rank, or give all ranks one memory_format"
        )
        return _error(head, words, sides)
    if name == "dtypes" and len({len(value) for value in values}) > 1:  # coalesced calls, lists of parts
        values, words = [len(value) for value in values], "the number of tensors"
    return _error(f"{head}{words}: {listed([_text(value) for value in values])}", words, sides)


def _without_ones(shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes without dimensions of size 1, because backends only count elements: ``()`` equals ``(1,)``."""
    return tuple(tuple(size for size in shape if size != 1) for shape in shapes)


def _order(signature: Signature, at: int) -> str:
    order = signature.orders[at] if signature.orders else ()
    return f"dimensions {order}" if order else "contiguous"


def _pair_mismatch(one: Signature, other: Signature) -> CollectiveMismatch | None:
    found = OPERATIONS[one.op].disagreement(one, other)
    return _error(*found, [[one], [other]]) if found else None


def p2p_mismatch(send: Signature, recv: Signature) -> CollectiveMismatch | None:
    """Compare a message and its buffer: dtype and number of elements must agree, the shape may differ."""
    for words, sent, taken in (
        ("the dtype", send.dtypes[0], recv.dtypes[0]),
        ("the number of elements", send.numel, recv.numel),
    ):
        if sent != taken:
            return _error(
                f"the message from rank {send.rank} to rank {recv.rank} differs in {words}: "
                f"{sent} sent, {taken} expected",
                words,
                [[send], [recv]],
            )
    return None


def divided_batch(pairs: Sequence[tuple[Signature, Signature]]) -> CollectiveMismatch:
    """Return the error for a batch of messages that the peer posts in more than one call.

    Args:
        pairs: an operation of the batch and the peer's operation that it meets, for a send and a receive.
    """
    own, theirs = pairs[0]
    callers = Callers()
    for one in (one for pair in pairs for one in pair):
        callers.note(one)
    return CollectiveMismatch(
        "\n  ".join(
            [
                f"rank {own.rank} sends to rank {theirs.rank} and receives from it in one batch, "
                f"rank {theirs.rank} in two calls: nccl does not define what happens",
                *(lines := [f"rank {own.rank}: one batch of {' and '.join(callers.told(one) for one, _ in pairs)}"]),
                *(others := [f"rank {theirs.rank}: {' and '.join(callers.told(one) for _, one in pairs)}"]),
                f"post both with one batch_isend_irecv on rank {theirs.rank}",
            ]
        ),
        what="the batch",
        ranks=[*lines, *others],
        odd=[],
    )


def _error(head: str, what: str, sides: Sequence[Sequence[Signature]]) -> CollectiveMismatch:
    told = describe_differences(one for side in sides for one in side)
    lines = [f"rank {rank}: {words}" for rank, words in sorted(told.items())]
    shown = [line for side in sides for line in in_common({one.rank: told[one.rank] for one in side})]
    fewest, next_to_it = (len(side) for side in sides[:2])
    odd = [one.rank for one in sides[0]] if fewest < next_to_it else []
    return CollectiveMismatch("\n".join([head, *(f"  {line}" for line in shown)]), what=what, ranks=lines, odd=odd)


def _text(value: object) -> str:
    if isinstance(value, tuple) and len(value) == 1:
        value = value[0]
    return str(value) if value not in ("", -1) else "none"
