"""Do two ranks that meet in one operation mean the same thing?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdlcheck.errors import CollectiveMismatch
from pdlcheck.worlds.watch.signature import Signature, told_apart

__all__ = ["mismatch", "p2p_mismatch"]

_MUST_AGREE = (
    ("op", "the operation"),
    ("members", "the ranks of the group"),
    ("root", "the root"),
    ("reduce_op", "the reduce-op"),
    ("dtypes", "the dtype"),
    ("shapes", "the shape"),
    ("orders", "the order of elements in memory"),
)

# all of these, and what says that two operations meet, lie side by side: one comparison does where nothing differs
_AT_ONCE = slice(Signature._fields.index("op"), Signature._fields.index("peer"))


def mismatch(there: Signature, arriving: Signature, all_there: Iterable[Signature]) -> CollectiveMismatch | None:
    """Compare two members of one collective; ``all_there`` are the ones that the report lists.

    The lower rank is named first, whichever came first: the words do not depend on the schedule.
    """
    if there[_AT_ONCE] == arriving[_AT_ONCE] and arriving.op != "all_to_all":
        return None
    one, other = sorted((there, arriving))  # by rank
    if one.op != other.op and one.is_new_group and other.is_new_group:
        return _error(
            f"ranks {one.rank} and {other.rank} make different groups: {one.op} and {other.op}; all ranks, "
            "also those that are not in a group, must make the same groups in the same order",
            "the ranks of the group",
            [*all_there, arriving],
        )
    for name, words in _MUST_AGREE:
        mine, others = getattr(one, name), getattr(other, name)
        if name == "shapes" and _lie_alike(mine, others):
            continue
        if mine != others:
            if name == "dtypes" and len(mine) != len(others):  # coalesced calls, lists of parts
                mine, others, words = len(mine), len(others), "the number of tensors"
            if name == "orders":
                return _mixed(one, other, [*all_there, arriving])
            return _error(
                f"ranks {one.rank} and {other.rank} met in collective {one.seq} of the {one.group_text} "
                f"and differ in {words}: {_text(mine)} and {_text(others)}",
                words,
                [*all_there, arriving],
            )
    if one.op == "all_to_all":
        return _split_mismatch(one, other)
    return None


def _lie_alike(some: Sequence[tuple[int, ...]], others: Sequence[tuple[int, ...]]) -> bool:
    """Shapes that differ in dimensions of one element, such as ``()`` and ``(1,)``: backends count elements alone."""
    without_ones = [[[size for size in shape if size != 1] for shape in shapes] for shapes in (some, others)]
    return without_ones[0] == without_ones[1]


def _mixed(one: Signature, other: Signature, all_there: Sequence[Signature]) -> CollectiveMismatch:
    at = next(at for at in range(len(one.shapes)) if _order(one, at) != _order(other, at))
    return _error(
        f"ranks {one.rank} and {other.rank} met in collective {one.seq} of the {one.group_text} and differ in the "
        f"order of elements in memory, by which backends go: {_order(one, at)} and {_order(other, at)}, of shape "
        f"{one.shapes[at]}; call .contiguous() on both, or give all ranks one memory_format",
        "the order of elements in memory",
        all_there,
    )


def _order(signature: Signature, at: int) -> str:
    order = signature.orders[at] if signature.orders else ()
    return f"dimensions {order}" if order else "contiguous"


def _split_mismatch(one: Signature, other: Signature) -> CollectiveMismatch | None:
    if any(len(splits) != len(signature.members) for signature in (one, other) for splits in signature.splits):
        return None  # torch refuses it on the rank itself
    for sender, receiver in ((one, other), (other, one)):
        sent = sender.splits[0][sender.members.index(receiver.rank)]
        taken = receiver.splits[1][receiver.members.index(sender.rank)]
        if sent != taken:
            return _error(
                f"rank {sender.rank} sends {sent} elements to rank {receiver.rank} in all_to_all, "
                f"rank {receiver.rank} has room for {taken}",
                "the split",
                [one, other],
            )
    return None


def p2p_mismatch(send: Signature, recv: Signature) -> CollectiveMismatch | None:
    """A message fits its buffer when dtype and number of elements agree; the shape may differ."""
    for words, sent, taken in (
        ("the dtype", send.dtypes[0], recv.dtypes[0]),
        ("the number of elements", send.numel, recv.numel),
    ):
        if sent != taken:
            return _error(
                f"the message from rank {send.rank} to rank {recv.rank} differs in {words}: "
                f"{sent} sent, {taken} expected",
                words,
                [send, recv],
            )
    return None


def _error(head: str, what: str, signatures: Sequence[Signature]) -> CollectiveMismatch:
    lines = [f"rank {rank}: {words}" for rank, words in sorted(told_apart(signatures).items())]
    return CollectiveMismatch("\n".join([head, *(f"  {line}" for line in lines)]), what=what, ranks=lines)


def _text(value: object) -> str:
    if isinstance(value, tuple) and len(value) == 1:
        value = value[0]
    return str(value) if value not in ("", -1) else "none"
