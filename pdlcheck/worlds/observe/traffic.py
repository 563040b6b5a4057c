"""The bytes and messages of a run, by rank, peer and operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from pdlcheck.clock.rounds import ALGORITHMS, Payload, rounds
from pdlcheck.operations.operation import Operation
from pdlcheck.operations.rounds import nbytes_of

__all__ = ["Count", "Traffic", "payload_of"]


class Count(NamedTuple):
    """The counts of one kind of operation.

    ``calls``: sends, or collectives, each counted once for all members; ``messages`` and ``nbytes``: what they moved.
    """

    calls: int
    messages: int
    nbytes: int


class Traffic:
    """The messages and bytes sent in one run.

    A message counts once its send has met its receive. A collective has no messages of its own in the API, so it counts
    as the messages of a stated algorithm (:mod:`pdlcheck.clock.rounds`; all_reduce: a ring). ``op="send"`` gives the
    exact messages of the program; ``op="all_reduce"`` gives those of the model.

    Example:
        >>> from pdlcheck.primitives import ring_all_reduce
        >>> _ = world.run(lambda: ring_all_reduce(torch.ones(8)), world_size=4)
        >>> world.traffic.sent_bytes(rank=0), world.traffic.messages(rank=0, peer=1)  # 2 * 3/4 of 32 bytes
        (48, 6)
        >>> world.traffic.by_operation
        {'send': Count(calls=24, messages=24, nbytes=192)}
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._sends: Counter[tuple[int, int, int]] = Counter()  # (src, dst, bytes)
        self._collectives: Counter[tuple[str, tuple[int, ...], int, Payload]] = Counter()

    def count(self, operations: Sequence[Operation]) -> None:
        """Count matched operations: a send and its receive, or a collective in group order."""
        signature = operations[0].signature
        if signature.op == "send":
            sent = operations[0].parts[0].inputs[0]
            self._sends[signature.rank, operations[1].signature.rank, nbytes_of(sent)] += 1
        else:
            self._collectives[signature.op, signature.members, signature.root, payload_of(operations)] += 1

    def sent_bytes(self, rank: int | None = None, *, peer: int | None = None, op: str | None = None) -> int:
        """Return the bytes that ``rank`` sent to ``peer`` by operations ``op``; an argument left out stands for any.

        Raises:
            ValueError: there is no such rank, or no such operation (a message is a ``send``).
        """
        return sum(nbytes for _, nbytes in self._chosen(rank, peer, op))

    def received_bytes(self, rank: int | None = None, *, peer: int | None = None, op: str | None = None) -> int:
        """Return the bytes that ``rank`` received from ``peer``; the arguments are as in :meth:`sent_bytes`."""
        return sum(nbytes for _, nbytes in self._chosen(peer, rank, op))

    def messages(self, rank: int | None = None, *, peer: int | None = None, op: str | None = None) -> int:
        """Return the number of messages that ``rank`` sent to ``peer``; the arguments are as in :meth:`sent_bytes`."""
        return sum(messages for messages, _ in self._chosen(rank, peer, op))

    @cached_property
    def by_operation(self) -> dict[str, Count]:
        """Return the counts of each kind of operation that took place, by name."""
        calls = Counter({"send": self._sends.total()})
        for (op, *_), times in self._collectives.items():
            calls[op] += times
        counts = {}
        for op in sorted(op for op, number in calls.items() if number and _is_known(op)):
            moved = [flow for (_, _, name), flow in self.flows.items() if name == op]
            counts[op] = Count(calls[op], sum(m for m, _ in moved), sum(b for _, b in moved))
        return counts

    @cached_property
    def flows(self) -> dict[tuple[int, int, str], tuple[int, int]]:
        """Return ``(src, dst, op) -> (messages, bytes)``."""
        flows: dict[tuple[int, int, str], tuple[int, int]] = {}

        def add(src: int, dst: int, op: str, messages: int, nbytes: int) -> None:
            known = flows.get((src, dst, op), (0, 0))
            flows[src, dst, op] = (known[0] + messages, known[1] + nbytes)

        for (src, dst, nbytes), times in self._sends.items():
            add(src, dst, "send", times, times * nbytes)
        for (op, members, root, payload), times in self._collectives.items():
            place = members.index(root) if root >= 0 else 0
            for messages in rounds(op, len(members), place, payload):
                for source, destination, nbytes in messages:
                    add(members[source], members[destination], op, times, times * nbytes)
        return dict(sorted(flows.items()))

    def _chosen(self, src: int | None, dst: int | None, op: str | None) -> Iterable[tuple[int, int]]:
        for rank in (src, dst):
            if rank is not None and not 0 <= rank < self.world_size:
                raise ValueError(f"a rank must be one of 0 to {self.world_size - 1}, got {rank!r}")
        if op is not None and not _is_known(op):
            raise ValueError(f"op must be send or one of {', '.join(sorted(ALGORITHMS))}; got {op!r}")
        for (source, destination, name), flow in self.flows.items():
            if src in (None, source) and dst in (None, destination) and op in (None, name):
                yield flow

    def __repr__(self) -> str:
        return f"<Traffic of {self.world_size} ranks: {self.messages()} messages, {self.sent_bytes()} bytes>"

    def __str__(self) -> str:
        """Return two tables: by operation, and by rank."""
        lines = [f"{'operation':<18}{'calls':>8}{'messages':>10}{'bytes':>14}"]
        for op, (calls, messages, nbytes) in self.by_operation.items():
            name = f"{op} ({ALGORITHMS[op]})" if op in ALGORITHMS else op
            lines.append(f"{name:<18}{calls:>8}{messages:>10}{nbytes:>14}")
        lines.append(f"{'rank':<26}{'messages':>10}{'bytes sent':>14}{'received':>10}")
        for rank in range(self.world_size):
            lines.append(
                f"{rank:<26}{self.messages(rank):>10}{self.sent_bytes(rank):>14}{self.received_bytes(rank):>10}"
            )
        return "\n".join(lines)


def payload_of(operations: Sequence[Operation]) -> Payload:
    """Return the bytes of a collective, as its operation counts them."""
    first = operations[0]
    return first.method.kind.payload(operations) if first.parts else ()


def _is_known(op: str) -> bool:
    return op == "send" or op in ALGORITHMS
