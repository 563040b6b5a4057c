"""The dependency of accesses: which two accesses of different ranks cannot be swapped without a visible difference."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdlcheck.worlds.observe import Signature
from pdlcheck.worlds.simulated.schedules.access import Access, Post, Question, StoreAccess

__all__ = ["Dependency"]

_Link = tuple[str, int, int, int]  # group, source (-1: any), destination, tag


@dataclass
class Dependency:
    """The relation between accesses, with the facts that runs have shown about the program.

    Two accesses depend on each other if they touch the same place and one of them changes what the other finds there:

    - accesses to a key of the store, if one of them writes it;
    - sends of two ranks to one destination with one tag, if that destination somewhere receives from any source: it
      takes the first send;
    - the ends of one message, or the members of one collective, if user code runs between a post and its wait, or
      polls. That code could see, or disturb, what the other rank has done so far.

    Members of a collective do not depend on each other if all of them block in the call: the order of arrival decides
    nothing. The same holds for the ends of a message. Operations of different groups, peers, tags or numbers do not
    depend on each other either.

    Args:
        any_source: (group, destination, tag) with a receive from any source.
        open_links: messages that are posted and waited for in two calls.
        open_collectives: collectives that are posted and waited for in two calls.
    """

    any_source: set[tuple[str, int, int]] = field(default_factory=set)
    open_links: set[_Link] = field(default_factory=set)
    open_collectives: set[tuple[str, int]] = field(default_factory=set)

    def __call__(self, one: Access | None, other: Access | None) -> bool:
        """Return whether the two accesses depend on each other."""
        if one is None or other is None:
            return False
        if isinstance(one, StoreAccess) or isinstance(other, StoreAccess):
            return isinstance(one, StoreAccess) and isinstance(other, StoreAccess) and _share_a_key(one, other)
        if isinstance(one, Question) and isinstance(other, Question):
            return False
        if _kills(one) or _kills(other):
            return _shows(one, other) or _shows(other, one)
        a, b = one.signature, other.signature
        if a.group != b.group or a.is_p2p != b.is_p2p:
            return False
        if not a.is_p2p:
            return a.seq == b.seq and (a.group, a.seq) in self.open_collectives
        if _place(a) != _place(b):
            return False
        if a.op == b.op:
            return a.op == "send" and _place(a) in self.any_source
        send, recv = (a, b) if a.op == "send" else (b, a)
        return recv.peer in (-1, send.rank) and not self.open_links.isdisjoint((_link(send), _link(recv)))

    def learn(self, access: Access | None) -> bool:
        """Record what an access of a run has shown; return whether accesses may now depend that did not before."""
        if access is None or isinstance(access, StoreAccess):
            return False
        signature = access.signature
        size = len(self.any_source) + len(self.open_links) + len(self.open_collectives)
        if signature.op == "recv" and signature.peer < 0:
            self.any_source.add(_place(signature))
        if isinstance(access, Question) or not access.blocks_in_call:
            if signature.is_p2p:
                self.open_links.add(_link(signature))
            else:
                self.open_collectives.add((signature.group, signature.seq))
        return len(self.any_source) + len(self.open_links) + len(self.open_collectives) > size


def can_complete(one: Access | None, other: Access | None) -> bool:
    """Return whether these two posts are the ends of one message."""
    if not (isinstance(one, Post) and isinstance(other, Post)):
        return False
    a, b = one.signature, other.signature
    if not (a.is_p2p and b.is_p2p) or a.op == b.op or a.group != b.group or _place(a) != _place(b):
        return False
    send, recv = (a, b) if a.op == "send" else (b, a)
    return recv.peer in (-1, send.rank)


def _kills(access: Post | Question) -> bool:
    return isinstance(access, Post) and access.kills


def _shows(death: Post | Question, access: Post | Question) -> bool:
    """Return whether ``death`` kills its rank, and the other access can observe it."""
    if not _kills(death):
        return False
    signature, rank = access.signature, death.signature.rank
    return _kills(access) or rank == signature.peer or (not signature.is_p2p and rank in signature.members)


def _share_a_key(one: StoreAccess, other: StoreAccess) -> bool:
    if not (one.writes or other.writes):
        return False
    return not one.keys or not other.keys or not set(one.keys).isdisjoint(other.keys)


def _place(signature: Signature) -> tuple[str, int, int]:
    destination = signature.peer if signature.op == "send" else signature.rank
    return signature.group, destination, signature.tag


def _link(signature: Signature) -> _Link:
    source = signature.rank if signature.op == "send" else signature.peer
    group, destination, tag = _place(signature)
    return group, source, destination, tag
