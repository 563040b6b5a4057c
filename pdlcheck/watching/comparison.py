"""One comparison of the ranks: a sum over them that is zero if they agree, and the search for what differs.

Each rank multiplies the digests of all its entries with its factor of their replica set (``replica_sets.py``), adds
them up for each kind, and one all_reduce adds these few words over the ranks. So the message has the same size on every
rank, whatever the ranks hold. Values that must differ are in places of their own, one for each rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pdlcheck.watching.digests import Digester, signed, weight_of, word_of
from pdlcheck.watching.entries import Entry
from pdlcheck.watching.replica_sets import ReplicaSets

__all__ = ["KINDS", "Comparison", "Difference", "Snapshot"]

KINDS = ("steps", "parameters", "gradients", "buffers", "optimizer state", "settings", "scaler", "random streams")
BUCKETS = 4096  # words of the search
LISTED = 64  # buckets whose entries are sent


class Snapshot(NamedTuple):
    """The entries of this rank at one step, and their digests; nothing of the tensors is kept.

    Args:
        entries: the entries, without their tensors.
        words: the digest of the elements of each entry, 0 if it has none.
    """

    entries: list[Entry]
    words: Tensor

    def __add__(self, other: Any) -> Snapshot:
        """Return both."""
        return Snapshot([*self.entries, *other.entries], torch.cat([self.words, other.words]))


class Difference(NamedTuple):
    """An entry that differs between ranks that must hold the same.

    Args:
        kind: as in ``Entry``.
        name: as in ``Entry``.
        odd: the ranks that differ from the most.
        others: the ranks that agree with one another.
        texts: what each rank compares besides the elements; None if it has no such entry.
    """

    kind: str
    name: str
    odd: tuple[int, ...]
    others: tuple[int, ...]
    texts: Mapping[int, str | None]

    @property
    def same_text(self) -> bool:
        """Return whether only elements differ."""
        return len(set(self.texts.values())) == 1


class Comparison:
    """The comparison of snapshots over a group.

    Args:
        group: the process group that it alone uses.
        device: where the group communicates.
        sets: the ranks that hold copies.
        apart: the names of values that every rank has for itself, such as the digest of its data ids.
    """

    def __init__(self, group: Any, device: torch.device, sets: ReplicaSets, apart: Sequence[str]) -> None:
        self._group = group
        self._device = device
        self._sets = sets
        self._apart = apart
        self._digester = Digester(device)

    def digest(self, entries: Sequence[Entry]) -> Snapshot:
        """Return the digests of entries."""
        held = [(place, entry.tensor) for place, entry in enumerate(entries) if entry.tensor is not None]
        words = self._digester.words([tensor for _, tensor in held])
        bare = [entry._replace(tensor=None) for entry in entries]
        if len(held) == len(bare):
            return Snapshot(bare, words)
        everything = torch.zeros(len(bare), dtype=torch.int64, device=self._device)
        everything[torch.tensor([place for place, _ in held], dtype=torch.int64, device=self._device)] = words
        return Snapshot(bare, everything)

    def word(self, tensor: Tensor) -> Tensor:
        """Return the digest of one tensor."""
        return self._digester.words([tensor])[0]

    def agree(self, snapshot: Snapshot, apart: Mapping[str, int]) -> tuple[list[str], dict[str, list[int]]]:
        """Return the kinds that differ between ranks, and the values of each rank that are apart.

        Every rank of the group must call this function.
        """
        size = len(self._sets.whole)
        message = torch.zeros(len(KINDS) + size * len(self._apart), dtype=torch.int64, device=self._device)
        kinds = torch.tensor([KINDS.index(entry.kind) for entry in snapshot.entries], device=self._device)
        message.index_add_(0, kinds, self._factored(snapshot))
        if self._apart:
            own = len(KINDS) + self._sets.whole.index(self._sets.rank)
            message[own::size] = torch.tensor([signed(apart[name]) for name in self._apart], device=self._device)
        dist.all_reduce(message, group=self._group)
        sums = message.tolist()
        values = [sums[start : start + size] for start in range(len(KINDS), len(sums), size)]
        return [kind for kind, word in zip(KINDS, sums, strict=False) if word], dict(
            zip(self._apart, values, strict=True)
        )

    def differences(self, snapshot: Snapshot, kinds: Sequence[str]) -> list[Difference]:
        """Return what differs, as far as 64 entries of a hash table show it. Every rank must call this function."""
        chosen = [place for place, entry in enumerate(snapshot.entries) if entry.kind in kinds]
        places = torch.tensor(chosen, dtype=torch.int64, device=self._device)
        entries = [snapshot.entries[place] for place in chosen]
        part = Snapshot(entries, snapshot.words[places])
        buckets = [word_of(entry.name) % BUCKETS for entry in entries]
        table = torch.zeros(BUCKETS, dtype=torch.int64, device=self._device)
        table.index_add_(0, torch.tensor(buckets, dtype=torch.int64, device=self._device), self._factored(part))
        dist.all_reduce(table, group=self._group)
        wrong = set(table.nonzero().flatten().tolist()[:LISTED])
        own = [
            (*entry, word)
            for entry, bucket, word in zip(entries, buckets, part.words.tolist(), strict=True)
            if bucket in wrong
        ]
        everyone: list[Any] = [None] * len(self._sets.whole)
        dist.all_gather_object(everyone, own, group=self._group)
        return _differences(dict(zip(self._sets.whole, everyone, strict=True)))

    def _factored(self, snapshot: Snapshot) -> Tensor:
        """Return what each entry adds to the sum over the ranks."""
        factors = [
            signed(self._sets.factor(entry.ranks) * weight_of(f"{entry.kind} {entry.name}"))
            for entry in snapshot.entries
        ]
        texts = [signed(word_of(entry.text)) for entry in snapshot.entries]
        both = torch.tensor([factors, texts], dtype=torch.int64, device=self._device)
        return both[0] * (snapshot.words + both[1])


def _differences(everyone: Mapping[int, Sequence[tuple[Any, ...]]]) -> list[Difference]:
    """Compare the entries of all ranks within their replica sets, in the order of the kinds and of the model."""
    held: dict[tuple[str, str], dict[int, tuple[Any, ...]]] = {}
    for rank, rows in everyone.items():
        for kind, name, *rest in rows:
            held.setdefault((kind, name), {})[rank] = tuple(rest)
    found = []
    for (kind, name), values in held.items():
        for ranks in sorted({ranks for _, ranks, _, _ in values.values()}):
            shown = {rank: values.get(rank) for rank in ranks}
            most = _most(list(shown.values()))
            odd = tuple(rank for rank, value in shown.items() if value != most)
            if odd:
                texts = {rank: None if value is None else value[0] for rank, value in shown.items()}
                others = tuple(rank for rank, value in shown.items() if value == most)
                found.append(Difference(kind, name, odd, others, texts))
    return sorted(found, key=lambda one: KINDS.index(one.kind))


def _most(values: Sequence[Any]) -> Any:
    """Return the value that most ranks have; of several such, that of the lowest rank."""
    return Counter(values).most_common(1)[0][0]
