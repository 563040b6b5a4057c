"""The watcher of a training: its hooks on the optimizer, and the comparison of the ranks at every k-th step."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from pdlcheck.errors import RanksDiffer, RanksDifferWarning
from pdlcheck.uncompiled import uncompiled
from pdlcheck.watching.arguments import (
    device_of,
    own_optimizers,
    require_same_arguments,
    validated_ranks,
    validated_sets,
    validated_streams,
)
from pdlcheck.watching.causes import Evidence
from pdlcheck.watching.comparison import Comparison, Snapshot
from pdlcheck.watching.digests import signed, weight_of, word_of
from pdlcheck.watching.entries import Entry, Source, stream_digest
from pdlcheck.watching.replica_sets import ReplicaSets
from pdlcheck.watching.report import apart_error, difference_error

__all__ = ["Watcher", "watch"]

OnViolation = str | Callable[[RanksDiffer], object]
IDS = "data ids"


def watch(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    every: int | None = 100,
    scaler: Any = None,
    group: dist.ProcessGroup | None = None,
    on_violation: OnViolation = "raise",
    gradients: bool = True,
    buffers: bool | None = None,
    optimizer_state: bool = True,
    ignore: Sequence[str] = (),
    streams: Mapping[str, str] | None = None,
    same_samples: Sequence[Sequence[int]] = (),
    timeout_s: float = 600,
) -> Watcher:
    """Compare the ranks before the first step of ``optimizer`` and after every k-th step, bit for bit.

    Parameters, gradients, buffers, the optimizer's state and settings, and the scaler's state must be equal on all
    ranks that hold copies of them. A plain tensor has a copy on every rank. A DTensor has copies along the dimensions
    of its mesh over which it is replicated. The ranks exchange digests only, in one all_reduce of a few hundred bytes,
    on a group of its own. Every rank of the group must call this function with the same arguments.

    Args:
        model: the model as it is trained, plain or wrapped.
        optimizer: the optimizer, or several; the steps of the first are counted.
        every: the number of steps between comparisons; None compares only when ``compare()`` is called.
        scaler: a ``GradScaler``, or another object with ``state_dict()`` whose state must be equal.
        group: the ranks to compare; None is the default group.
        on_violation: "raise", "warn", or a function that takes the error. Every rank does it. Only the first violation
            is reported, and nothing is compared after it.
        gradients: compare gradients; False if they stay local by intention, as under ZeRO.
        buffers: compare buffers; None leaves out the running statistics of batch norm, which each rank takes from its
            own samples.
        optimizer_state: compare the state of the optimizer; False if ranks hold parts of it, as under ZeRO.
        ignore: patterns of names of parameters and buffers that ranks do not share, such as ``"*.experts.*"``.
        streams: for "python", "numpy", "torch" or "cuda": "equal" if all ranks must draw the same random numbers,
            "different" if no two may. Other streams are not compared.
        same_samples: sets of ranks that work on the same samples, as under tensor parallelism.
        timeout_s: how long a rank waits for the others in a comparison.

    Returns:
        The watcher. ``close()`` removes it; it is a context manager too.

    Raises:
        RanksDiffer: ``optimizer.step()`` raises it on every rank if the ranks differ.
        ValueError: an argument is wrong, or differs between ranks.

    Example:
        >>> import pdlcheck
        >>> from pdlcheck.worlds import get_world
        >>> def train():
        ...     torch.manual_seed(dist.get_rank())
        ...     model = nn.Linear(2, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     with pdlcheck.watch(model, optimizer, on_violation="warn") as watcher:
        ...         with warnings.catch_warnings(action="ignore"):
        ...             optimizer.step()
        ...     return watcher.violation.tensor, watcher.violation.cause[:40]
        >>> get_world("sim").run(train, world_size=2)[0]
        ("parameter 'weight'", 'the first weights were not broadcast, or')
    """
    return Watcher(
        model,
        own_optimizers(optimizer),
        every=every,
        scaler=scaler,
        group=group,
        on_violation=on_violation,
        gradients=gradients,
        buffers=buffers,
        optimizer_state=optimizer_state,
        ignore=ignore,
        streams=streams or {},
        same_samples=same_samples,
        timeout_s=timeout_s,
    )


@uncompiled
class Watcher:
    """A watched training; :func:`watch` makes it and has its arguments.

    Attributes:
        steps: the number of steps that the optimizer has taken.
        violation: the error that was reported; None if there is none.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        every: int | None,
        scaler: Any,
        group: dist.ProcessGroup | None,
        on_violation: OnViolation,
        gradients: bool,
        buffers: bool | None,
        optimizer_state: bool,
        ignore: Sequence[str],
        streams: Mapping[str, str],
        same_samples: Sequence[Sequence[int]],
        timeout_s: float,
    ) -> None:
        ranks = validated_ranks(model, every, scaler, group, on_violation, timeout_s)
        self.steps = 0
        self.violation: RanksDiffer | None = None
        self._every = every
        self._on_violation = on_violation
        self._with_gradients = gradients
        self._streams = validated_streams(streams)
        self._same_samples = validated_sets(same_samples, ranks)
        self._timeout_s = timeout_s
        self._right: int | None = None
        self._given: Snapshot | None = None
        self._seen: Any = 0
        self._batches = 0
        self._caller: FrameType | None = None  # of the hooks, during a step
        sets = ReplicaSets(ranks, dist.get_rank())
        self._source = Source(model, optimizers, scaler, sets, buffers, optimizer_state, tuple(ignore))
        self._sets = sets
        self._group = dist.new_group(
            list(ranks), timeout=timedelta(seconds=timeout_s), use_local_synchronization=group is not None
        )
        apart = [IDS, *(name for name, how in self._streams.items() if how == "different")]
        self._comparison = Comparison(self._group, device_of(model, self._group), sets, apart)
        arguments = {
            "every": every,
            "scaler": scaler is not None,
            "on_violation": on_violation if isinstance(on_violation, str) else "a function",
            "gradients": gradients,
            "buffers": buffers,
            "optimizer_state": optimizer_state,
            "ignore": tuple(ignore),
            "streams": self._streams,
            "same_samples": self._same_samples,
        }
        require_same_arguments(arguments, self._group, ranks)
        first = optimizers[0]
        self._hooks = [first.register_step_pre_hook(self._before), first.register_step_post_hook(self._after)]

    def __enter__(self) -> Watcher:
        """Return the watcher."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the watcher."""
        self.close()

    def close(self) -> None:
        """Remove the hooks and the process group. A second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with suppress(ValueError):  # the default group was made again, so this one is gone
                dist.destroy_process_group(group)

    def saw(self, ids: Any) -> None:
        """Record the ids of the samples of one batch, in their order.

        The ids are a tensor, an array, or a list of numbers or texts. A comparison reports two ranks that saw the same
        batches since the one before, and ranks of one set of ``same_samples`` that saw different ones.
        """
        self._batches += 1
        batch = weight_of(f"batch {self._batches}")
        if isinstance(ids, list | tuple | range) and not all(isinstance(one, int) for one in ids):
            seen = self._seen + signed(word_of(repr(list(ids))) * batch)
            self._seen = signed(seen) if isinstance(seen, int) else seen
        else:
            numbers = torch.as_tensor(ids)
            self._seen = self._seen + (self._comparison.word(numbers) + 1 + numbers.numel()) * signed(batch)

    def compare(self) -> None:
        """Compare the ranks now, without gradients. Every rank must call this function at the same place.

        Use it before a checkpoint is written, or with ``every=None`` where ranks agree only at times, as in local SGD.
        """
        self._compare(None)

    def _before(self, optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if self._caller is not None and _is_running(self._caller):
            return  # a step that calls the step of its parent class
        self._caller = sys._getframe(1)
        if self._every is None or self.violation is not None:
            return
        if self.steps == 0:
            self._compare(None)
        if self._due(self.steps + 1) and not _has_closure(arguments, keywords):
            self._given = self._gradients()

    def _after(self, optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if self._caller is not sys._getframe(1):
            return
        self._caller = None
        self.steps += 1
        if self._every is not None and self.violation is None and self.steps % self._every == 0:
            given, self._given = self._given, None
            self._compare(self._gradients() if given is None and self._with_gradients else given)

    def _due(self, step: int) -> bool:
        return self._with_gradients and self._every is not None and step % self._every == 0

    @torch.no_grad()
    def _gradients(self) -> Snapshot:
        return self._comparison.digest(self._source.gradients())

    @torch.no_grad()
    def _compare(self, gradients: Snapshot | None) -> None:
        if self._group is None:
            raise ValueError("the watcher is closed; call watch() again")
        if len(self._sets.whole) < 2:
            return
        entries = [Entry("steps", "number of steps", str(self.steps), self._sets.whole), *self._source.state()]
        equal = [name for name, how in self._streams.items() if how == "equal"]
        entries += [
            Entry("random streams", f"stream {name!r}", stream_digest(name), self._sets.whole) for name in equal
        ]
        snapshot = self._comparison.digest(entries)
        if gradients is not None:
            snapshot += gradients
        apart = {name: word_of(stream_digest(name)) for name, how in self._streams.items() if how == "different"}
        apart[IDS], self._seen = int(self._seen), 0
        kinds, values = self._answers(lambda: self._comparison.agree(snapshot, apart))
        count = sum(entry.kind == "parameters" for entry in entries)
        size = len(self._sets.whole)
        seen = Evidence(self.steps, self._right, kinds, [], gradients is not None, count, size)
        error = None
        if kinds:
            found = self._answers(lambda: self._comparison.differences(snapshot, kinds))
            error = difference_error(seen._replace(differences=found))
        for name, of_ranks in values.items():
            error = error or apart_error(name, of_ranks, self._sets.whole, self._same_samples, seen)
        if error is None:
            self._right = self.steps
        else:
            self._report(error)

    def _answers(self, exchange: Callable[[], Any]) -> Any:
        """Return the result of an exchange; the error of one that is not complete says why the rank waited."""
        try:
            return exchange()
        except RuntimeError as error:
            error.add_note(
                f"pdlcheck.watch compared the ranks at step {self.steps}. It waits {self._timeout_s:g} s for all ranks "
                "of its group. Likely cause: a rank has failed, has no watcher, or has taken another number of steps."
            )
            raise

    def _report(self, error: RanksDiffer) -> None:
        self.violation = error
        if self._on_violation == "raise":
            raise error
        if callable(self._on_violation):
            self._on_violation(error)
        else:
            warnings.warn(RanksDifferWarning(str(error)), stacklevel=2)


def _is_running(frame: FrameType) -> bool:
    """Return whether the caller runs inside of ``frame``; a step that failed has left its frame."""
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is frame


def _has_closure(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
    """Return whether ``optimizer.step`` got a closure, which computes the gradients within the step."""
    return keywords.get("closure") is not None or any(callable(one) for one in arguments[1:])
