"""A sampler for ``torch.utils.data.DataLoader`` that knows how far training has come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from pdlcheck.primitives.arguments import members, require_at_least
from pdlcheck.primitives.data import shard_indices

__all__ = ["ShardSampler"]

VERSION = 1
SAME = ("version", "num_samples", "seed", "shuffle")  # what decides the order, beside the epoch


class ShardSampler(Sampler[int]):
    """The samples of a rank, for a DataLoader: disjoint over the ranks, covering the data, resumable anywhere.

    A drop-in for ``torch.utils.data.DistributedSampler``, with three things more: ``tail`` says what becomes of the
    samples that do not divide evenly; a position that counts what training has used, not what a loader has fetched
    ahead; and a state that resumes on any number of ranks. Samples are those of :func:`shard_indices`: rank r has
    every ``num_replicas``-th one of the epoch's order. So when each rank has used k samples, the first ``k *
    num_replicas`` of the order are used, whoever shares out the rest. No communication.

    Call ``set_epoch(epoch)`` before each epoch and ``commit(len(batch))`` after each step::

        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)                    # the epoch that it is in already: keeps its position
            for batch in loader:
                train(batch)
                sampler.commit(len(batch))              # state_dict() now says: go on with the next batch

    Where training draws random numbers, as for dropout, make it ``DataLoader(..., generator=torch.Generator())``: a
    loader draws one whenever a pass begins, and a run that goes on begins one more.

    Without ``commit`` every pass is a whole epoch, and so is one after a pass that was used up here. One that was not,
    as under a loader with ``drop_last=True``, goes on with what is left until ``set_epoch`` names another. A state that
    was saved when the epoch was used up leaves nothing of it: the loop above goes on to the next.

    Args:
        dataset: anything with a length.
        num_replicas: number of shards; the default is the size of the default group.
        rank: whose shard; the default is this rank.
        shuffle: another order in every epoch; False is 0, 1, 2, ...
        seed: same on every rank.
        drop_last: as in torch: True is ``tail="drop"``.
        tail: ``"pad"``, the default, repeats the first samples of the order so that shards are equally long;
            ``"uneven"`` has every sample once, for metrics, and some ranks one less; ``"drop"`` leaves the last out.

    Raises:
        TypeError: ``dataset`` has no length; ``seed`` is no int.
        ValueError: ``rank`` is outside of the replicas; unknown ``tail``, or one that contradicts ``drop_last``; no
            process group where one is to be asked.

    Example:
        >>> first = ShardSampler(range(10), num_replicas=2, rank=0, shuffle=False)
        >>> list(first)
        [0, 2, 4, 6, 8]
        >>> first.commit(2)                             # 0 and 2 here, 1 and 3 on rank 1
        >>> state = first.state_dict()
        >>> for rank in range(3):                       # the rest on three ranks
        ...     again = ShardSampler(range(10), num_replicas=3, rank=rank, shuffle=False)
        ...     again.load_state_dict(state)
        ...     print(list(again))
        [4, 7]
        [5, 8]
        [6, 9]

    Source: the sampler of "How to scale training on multiple GPUs" (2019).
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        tail: Literal["pad", "uneven", "drop"] | None = None,
    ) -> None:
        if not isinstance(dataset, Sized):
            raise TypeError(
                f"ShardSampler needs a data set with a length, got {type(dataset).__name__}; "
                "one that is iterable only must share itself out"
            )
        if tail is not None and drop_last and tail != "drop":
            raise ValueError(f"ShardSampler got drop_last=True beside tail={tail!r}; leave drop_last out")
        if num_replicas is None or rank is None:
            who = members("ShardSampler", dist.group.WORLD)
            num_replicas = who.world_size if num_replicas is None else num_replicas
            rank = who.rank if rank is None else rank
        self.dataset = dataset
        self.num_replicas, self.rank = num_replicas, rank
        self.shuffle, self.seed = bool(shuffle), seed
        self.tail = tail or ("drop" if drop_last else "pad")
        self.drop_last = self.tail == "drop"
        self.epoch = 0
        self._total = len(dataset)
        self._begun = False  # the pass that begins at _start has been asked for
        self._start = 0  # where in the epoch's order this pass begins; the same on every rank
        self._used = 0  # samples of this pass that this rank has used
        self._passes = 0  # how many were begun
        self._ended = False  # the samples of this pass were asked for to the last one
        shard_indices(self._total, rank=rank, world_size=num_replicas, seed=seed, tail=self.tail)  # refuses

    def __iter__(self) -> Iterator[int]:
        """The samples that are left of the epoch, from where training has come to."""
        used_up = self._begun and self._used >= len(self)
        self._begin(0 if used_up else self._position(), begun=True)
        return self._given(self._left().tolist(), self._passes)

    def __len__(self) -> int:
        """The samples of the pass that is under way, or that will begin; it does not shrink while samples are used."""
        return self._share(self._total - self._start)

    @property
    def num_samples(self) -> int:
        """The samples of this rank in a whole epoch, as in torch."""
        return self._share(self._total)

    @property
    def total_size(self) -> int:
        """The samples of all ranks in a whole epoch, as in torch."""
        return self._total if self.tail == "uneven" else self.num_samples * self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch. The number of the epoch that it is in leaves the position as it is."""
        require_at_least("ShardSampler.set_epoch", "epoch", epoch, 0)
        if epoch != self.epoch:
            self.epoch = epoch
            self._begin(0)

    def commit(self, num_samples: int) -> None:
        """Say that training has used the next ``num_samples`` of this rank. Call it on every rank after every step.

        Raises:
            ValueError: more than the pass has: a batch was committed twice, or that of another loader.
        """
        require_at_least("ShardSampler.commit", "num_samples", num_samples, 0)
        if self._used + num_samples > self._rounds():
            raise ValueError(
                f"ShardSampler.commit got {num_samples} samples, but {self._rounds() - self._used} of the pass are "
                "left; commit each batch once"
            )
        self._used += num_samples

    def state_dict(self) -> dict[str, int]:
        """Epoch and position, whole numbers only: the same on every rank that has used as many samples.

        So it is where all have used up what they have of the epoch and the loops over it have ended, whatever ``tail``.
        In its last step, where with ``tail="uneven"`` some ranks have none, or under a loader with ``drop_last=True``
        they may differ by the last sample: a rank whose loader has fetched ahead cannot tell whether others have one
        more step to go. On as many ranks each goes on from its own. That of rank 0 holds for all, and
        ``load_checkpoint`` takes it on another number of ranks with
        ``reshard={"sampler": lambda states, rank, world_size: states[0]}``.
        """
        own = {"num_samples": self._total, "seed": self.seed, "shuffle": int(self.shuffle)}
        return {"version": VERSION, "epoch": self.epoch, "position": self._position(), **own}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where ``state`` was saved, on this or another number of ranks. Load the same state on every rank.

        What is left of the epoch is shared out anew: each sample once, but for what ``tail`` repeats or drops.

        Raises:
            ValueError: a value is missing or out of range, or the order would be another one: other data, seed or
                shuffling, or a state of another version. Nothing is changed.
        """
        own = self.state_dict()
        for name in own:
            if name not in state:
                raise ValueError(f"ShardSampler got a state without {name!r}; pass what state_dict() gave")
            if not isinstance(state[name], int):
                raise ValueError(f"ShardSampler got a state whose {name!r} is {state[name]!r}, expected a whole number")
            if name in SAME and state[name] != own[name]:
                raise ValueError(
                    f"ShardSampler has {name}={own[name]}, the state was saved with {name}={state[name]}: "
                    "the order would be another one; make the sampler as it was made then"
                )
        if state["epoch"] < 0 or not 0 <= state["position"] <= self._total:
            raise ValueError(
                f"ShardSampler got a state with epoch {state['epoch']} and position {state['position']}, "
                f"expected an epoch from 0 and a position in 0 to {self._total}"
            )
        self.epoch = state["epoch"]
        self._begin(state["position"])

    def _begin(self, start: int, *, begun: bool = False) -> None:
        """A pass from ``start`` on; an iterator of an earlier one says nothing about it."""
        self._start, self._used, self._begun, self._ended = start, 0, begun, False
        self._passes += 1

    def _given(self, samples: list[int], number: int) -> Iterator[int]:
        """The samples of a pass, which has ended when one more is asked for."""
        yield from samples
        if number == self._passes:
            self._ended = True

    def _over(self) -> bool:
        """Whether no rank has anything left of the pass, as far as this one can tell.

        A rank that has one sample less than others uses its last one while they have another step to go; then its loop
        ends. Without a loop it is believed to be no step behind.
        """
        if self._used < len(self):
            return False
        return self._ended or (self._used > 0 and not (self._begun and self.tail == "uneven"))

    def _position(self) -> int:
        """How many samples of the epoch's order all ranks have used; all of them where only a dropped tail is left."""
        if self._over():
            return self._total
        return min(self._start + self._used * self.num_replicas, self._total)

    def _rounds(self) -> int:
        """The samples of this pass on the rank that has most of them."""
        left = self._total - self._start
        return left // self.num_replicas if self.tail == "drop" else -(-left // self.num_replicas)

    def _share(self, left: int) -> int:
        """How many of ``left`` samples are this rank's, with what ``tail`` repeats or drops."""
        if self.tail == "drop":
            return left // self.num_replicas
        return len(range(0 if self.tail == "pad" else self.rank, left, self.num_replicas))

    def _left(self) -> Tensor:
        """This rank's samples of the pass."""
        order = shard_indices(self._total, rank=0, world_size=1, epoch=self.epoch, shuffle=self.shuffle, seed=self.seed)
        left = order[self._start :]
        whole = self._rounds() * self.num_replicas
        if self.tail == "drop":
            left = left[:whole]
        elif self.tail == "pad" and len(left):
            missing = whole - len(left)
            left = torch.cat([left, order.repeat(-(-missing // len(order)))[:missing]])
        return left[self.rank :: self.num_replicas]
