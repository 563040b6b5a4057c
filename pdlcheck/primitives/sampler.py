"""A sampler for ``torch.utils.data.DataLoader`` that keeps the position of training in the data."""

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
SAME = ("version", "num_samples", "seed", "shuffle")  # the settings that decide the order, together with the epoch


class ShardSampler(Sampler[int]):
    """A sampler of one rank's samples for a DataLoader: disjoint shards that cover the data, resumable at any step.

    It can replace ``torch.utils.data.DistributedSampler`` and adds three things. ``tail`` chooses the policy for
    samples that do not divide evenly. The position counts the samples that training has used, not those that a loader
    has fetched ahead. The state resumes on any number of ranks.

    The samples are those of :func:`shard_indices`: rank r has every ``num_replicas``-th one of the epoch's order. So
    when each rank has used k samples, the first ``k * num_replicas`` of the order are used, and any number of ranks can
    share the rest. No communication.

    Call ``set_epoch(epoch)`` before each epoch and ``commit(len(batch))`` after each step::

        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)                    # the current epoch keeps its position
            for batch in loader:
                train(batch)
                sampler.commit(len(batch))              # state_dict() now continues with the next batch

    If training draws random numbers, as for dropout, use ``DataLoader(..., generator=torch.Generator())``. A loader
    draws one number whenever a pass begins, and a resumed run begins one more pass.

    Without ``commit`` every pass is a whole epoch. The pass after a used-up pass is a whole epoch too. After a pass
    that was not used up, as under a loader with ``drop_last=True``, the next pass contains the rest, until
    ``set_epoch`` selects another epoch. A state that was saved when the epoch was used up leaves no samples of it; the
    loop above continues with the next epoch.

    Args:
        dataset: anything with a length.
        num_replicas: number of shards; the default is the size of the default group.
        rank: the rank whose shard is sampled; the default is this rank.
        shuffle: True draws another order in every epoch; False is 0, 1, 2, ...
        seed: same on every rank.
        drop_last: as in torch; True means ``tail="drop"``.
        tail: ``"pad"``, the default, repeats the first samples of the order so that shards are equally long.
            ``"uneven"`` has every sample once, for metrics; some ranks have one sample less. ``"drop"`` leaves the last
            samples out.

    Raises:
        TypeError: ``dataset`` has no length; ``seed`` is not an int.
        ValueError: ``rank`` is outside of the replicas; ``tail`` is unknown or contradicts ``drop_last``;
            ``num_replicas`` or ``rank`` is missing and there is no process group.

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
        self._begun = False  # whether an iterator of the pass that begins at _start was requested
        self._start = 0  # place in the epoch's order at which this pass begins; the same on every rank
        self._used = 0  # samples of this pass that this rank has used
        self._passes = 0  # number of passes begun
        self._ended = False  # whether the iterator of this pass is exhausted
        shard_indices(self._total, rank=rank, world_size=num_replicas, seed=seed, tail=self.tail)  # raises

    def __iter__(self) -> Iterator[int]:
        """Return an iterator over the remaining samples of the epoch, from the current position of training."""
        used_up = self._begun and self._used >= len(self)
        self._begin(0 if used_up else self._position(), begun=True)
        return self._given(self._left().tolist(), self._passes)

    def __len__(self) -> int:
        """Return the number of samples in the current or next pass. Using samples does not reduce it."""
        return self._share(self._total - self._start)

    @property
    def num_samples(self) -> int:
        """Return the number of samples of this rank in a whole epoch, as in torch."""
        return self._share(self._total)

    @property
    def total_size(self) -> int:
        """Return the number of samples of all ranks in a whole epoch, as in torch."""
        return self._total if self.tail == "uneven" else self.num_samples * self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch. If ``epoch`` is the current epoch, the position does not change."""
        require_at_least("ShardSampler.set_epoch", "epoch", epoch, 0)
        if epoch != self.epoch:
            self.epoch = epoch
            self._begin(0)

    def commit(self, num_samples: int) -> None:
        """Record that training has used the next ``num_samples`` of this rank. Call it on every rank after every step.

        Raises:
            ValueError: the pass has fewer samples left: a batch was committed twice, or comes from another loader.
        """
        require_at_least("ShardSampler.commit", "num_samples", num_samples, 0)
        if self._used + num_samples > self._rounds():
            raise ValueError(
                f"ShardSampler.commit got {num_samples} samples, but {self._rounds() - self._used} of the pass are "
                "left; commit each batch once"
            )
        self._used += num_samples

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, the position and the settings, all ints.

        Ranks that have used equally many samples return the same. So, for any ``tail``, the state is equal on every
        rank when all ranks have used up their samples of the epoch and the loops over it have ended. In the last step
        of an epoch, ranks may differ by the last sample: some ranks may have no sample there with ``tail="uneven"``, or
        under a loader with ``drop_last=True``. A rank whose loader has fetched ahead cannot detect whether others have
        one more step.

        On the same number of ranks, each rank resumes from its own state. The state of rank 0 is valid for all ranks.
        On another number of ranks, ``load_checkpoint`` takes it with
        ``reshard={"sampler": lambda states, rank, world_size: states[0]}``.
        """
        own = {"num_samples": self._total, "seed": self.seed, "shuffle": int(self.shuffle)}
        return {"version": VERSION, "epoch": self.epoch, "position": self._position(), **own}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from ``state``, on the same or another number of ranks. Load the same state on every rank.

        The rest of the epoch is shared out again: each sample once, except for those that ``tail`` repeats or drops.

        Raises:
            ValueError: a value is missing or out of range; or the order would differ, because the data, the seed, the
                shuffling or the version of the state differ. Nothing is changed.
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
        """Begin a pass at ``start``. Iterators of earlier passes no longer change the state."""
        self._start, self._used, self._begun, self._ended = start, 0, begun, False
        self._passes += 1

    def _given(self, samples: list[int], number: int) -> Iterator[int]:
        """Yield the samples of a pass; when one more is requested, mark the pass as ended."""
        yield from samples
        if number == self._passes:
            self._ended = True

    def _over(self) -> bool:
        """Return whether no rank has samples left in the pass, as far as this rank can detect.

        A rank with one sample less than others uses its last one while the others have one more step. Its loop ends
        after that. Without a loop, this rank is assumed not to be behind.
        """
        if self._used < len(self):
            return False
        return self._ended or (self._used > 0 and not (self._begun and self.tail == "uneven"))

    def _position(self) -> int:
        """Return how many samples of the epoch's order all ranks have used; all if only a dropped tail is left."""
        if self._over():
            return self._total
        return min(self._start + self._used * self.num_replicas, self._total)

    def _rounds(self) -> int:
        """Return the number of samples in this pass on the rank that has the most."""
        left = self._total - self._start
        return left // self.num_replicas if self.tail == "drop" else -(-left // self.num_replicas)

    def _share(self, left: int) -> int:
        """Return how many of ``left`` samples belong to this rank, including those that ``tail`` repeats or drops."""
        if self.tail == "drop":
            return left // self.num_replicas
        return len(range(0 if self.tail == "pad" else self.rank, left, self.num_replicas))

    def _left(self) -> Tensor:
        """Return this rank's samples of the pass."""
        order = shard_indices(self._total, rank=0, world_size=1, epoch=self.epoch, shuffle=self.shuffle, seed=self.seed)
        left = order[self._start :]
        whole = self._rounds() * self.num_replicas
        if self.tail == "drop":
            left = left[:whole]
        elif self.tail == "pad" and len(left):
            missing = whole - len(left)
            left = torch.cat([left, order.repeat(-(-missing // len(order)))[:missing]])
        return left[self.rank :: self.num_replicas]
