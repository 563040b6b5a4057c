"""The lanes of messages: between two ranks, NCCL carries out messages in the order posted, whatever their tags.

Each rank has one lane to each peer of a group. The operations of a lane are carried out one after the other, so two
ranks that both post a send and then a receive wait for ever. The operations of one ``batch_isend_irecv`` go together.
If a batch sends to a peer and receives from it, the peer must have both in one batch, too: NCCL does not define what
happens otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator

from pdlcheck.errors import Unsupported
from pdlcheck.worlds.observe import Match, Signature
from pdlcheck.worlds.observe.mismatch import divided_batch, p2p_mismatch

__all__ = ["OrderedP2PMatcher"]


class _Batch:
    """Operations that go together; ``of`` identifies their batch."""

    def __init__(self, of: object) -> None:
        self.of = of
        self.operations: list[tuple[Signature, Hashable]] = []
        self.met: list[tuple[Signature, Signature, _Batch]] = []  # own operation, the peer's, and the peer's batch

    def meet(self, own: Signature, theirs: Signature, batch: _Batch) -> None:
        """Record a match of an operation of this batch.

        Raises:
            CollectiveMismatch: the peer has divided into two what this batch sends to it and receives from it.
        """
        self.met.append((own, theirs, batch))
        divided = [one for one in self.met if one[2] is not batch and one[0].op != own.op]
        if self.of is not None and divided:
            raise divided_batch([(divided[0][0], divided[0][1]), (own, theirs)])

    def first(self, op: str) -> int | None:
        return next((i for i, (signature, _) in enumerate(self.operations) if signature.op == op), None)


class OrderedP2PMatcher:
    """The lanes of all ranks, in which sends are paired with receives."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[str, int, int], list[_Batch]] = defaultdict(list)  # (group, rank, peer)

    def post(self, signature: Signature, key: Hashable, batch: object | None) -> Iterator[Match]:
        """Add an operation, and yield the matches that it completes.

        Raises:
            CollectiveMismatch: a message does not fit its buffer.
            Unsupported: the operation is a receive from any rank.
        """
        if signature.peer < 0:
            raise Unsupported("nccl has no receive from any rank, nor have messages in order: name the source")
        mine = self._lanes[signature.group, signature.rank, signature.peer]
        if batch is None or not mine or mine[-1].of is not batch:
            if mine and not mine[0].operations:  # all of its operations have met, and no more will come
                mine.pop(0)
            mine.append(_Batch(batch))
        mine[-1].operations.append((signature, key))
        theirs = self._lanes[signature.group, signature.peer, signature.rank]
        while mine and theirs:
            match = _pair(mine[0], theirs[0]) or _pair(theirs[0], mine[0])
            if match is None:
                return
            for lane in (mine, theirs):
                if lane and not lane[0].operations and (lane[0].of is None or len(lane) > 1):
                    lane.pop(0)  # the last batch may have more operations, which are about to be posted
            yield match

    def finish(self, signature: Signature, batch: object | None) -> None:
        """Forget a batch whose rank has the results of one of its operations: it has posted all of them.

        The batch is a frame of the program, which keeps the caller's tensors alive.
        """
        lane = self._lanes[signature.group, signature.rank, signature.peer]
        if batch is not None and lane and lane[0].of is batch and not lane[0].operations:
            lane.pop(0).of = None  # the peer's batch still refers to this one


def _pair(sender: _Batch, receiver: _Batch) -> Match | None:
    send, recv = sender.first("send"), receiver.first("recv")
    if send is None or recv is None:
        return None
    (sent, key), (taken, other) = sender.operations[send], receiver.operations[recv]
    sender.operations.remove((sent, key))  # by value, because a message to oneself has both ends in one batch
    receiver.operations.remove((taken, other))
    if error := p2p_mismatch(sent, taken):
        raise error
    sender.meet(sent, taken, receiver)
    receiver.meet(taken, sent, sender)
    return Match((sent, taken), (key, other))
