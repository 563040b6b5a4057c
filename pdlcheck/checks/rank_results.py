"""Calls of a subject on every rank of a world, and the comparison of the results of all ranks."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdlcheck.checks.diagnosis import explain, predictions
from pdlcheck.checks.message import Place, case, differs, failure, first_index, name_of, show
from pdlcheck.checks.rounding import Rounding
from pdlcheck.checks.tolerances import EXACT, Tolerance

__all__ = ["Calls", "Table", "bits", "group_of", "listed", "possible_order"]

# Older releases of torch always sort the ranks of a group.
KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters

Table = Iterable[tuple[str, Tensor]]  # likely causes, each with the tensor that it predicts


@dataclass(frozen=True)
class Held:
    """The argument of one rank after the call, and the value that the call returned."""

    given: Tensor
    got: Any


class _Refused:
    """The result of a call that raised an error."""


@dataclass(frozen=True)
class _Refusing:
    """A subject that returns :class:`_Refused` where it raises an error."""

    subject: Callable[..., Any]

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        try:
            return self.subject(*args, **keywords)
        except Exception:
            return _Refused()


@dataclass(frozen=True)
class Calls:
    """One call of ``subject`` on every rank.

    Args:
        subject: the function under test.
        inputs: one tensor for each rank; the rank's argument keeps its strides.
        world: where the ranks run.
        ranks: the global ranks of a group, in the order of the group; ``None`` is the default group.
        uneven: whether the shapes of the inputs may differ.
    """

    subject: Callable[..., Any]
    inputs: Sequence[Tensor]
    world: Any
    ranks: Sequence[int] | None
    uneven: bool = False

    def __post_init__(self) -> None:
        """Validate the inputs."""
        who = f"the check of {name_of(self.subject)}"
        if not len(self.inputs):
            raise ValueError(f"{who} needs an input for each rank, got none")
        if self.ranks is not None and len(self.ranks) != len(self.inputs):
            raise ValueError(f"{who} needs an input for each of the ranks {list(self.ranks)}, got {len(self.inputs)}")
        given: Sequence[object] = self.inputs
        for rank, one in enumerate(given):
            if not isinstance(one, Tensor):
                has = f"rank {rank} has a {type(one).__name__}"
                raise TypeError(f"{who} needs a tensor for each rank, {has}; call torch.tensor on it")
        kinds = [str(one.dtype) if self.uneven else f"{tuple(one.shape)} {one.dtype}" for one in self.inputs]
        alike = "one dtype" if self.uneven else "one shape and dtype"
        for rank, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise ValueError(f"{who} needs inputs of {alike}, rank {rank} has {kind}, 0 has {kinds[0]}")

    @property
    def facts(self) -> str:
        """Return the case, for the last line of a message."""
        first = self.inputs[0]
        strides = None if all(one.is_contiguous() for one in self.inputs) else [one.stride() for one in self.inputs]
        group = None if self.ranks is None else list(self.ranks)
        shapes = [tuple(one.shape) for one in self.inputs]
        shape = {"shapes": shapes} if len(set(shapes)) > 1 else {"shape": shapes[0]}
        return case(self.world, len(self.inputs), **shape, dtype=first.dtype, strides=strides, group=group)

    def overwritten(self, **keywords: Any) -> list[Tensor]:
        """Return the argument of every rank after the call.

        Args:
            **keywords: passed on to the subject.

        Raises:
            AssertionError: the subject returned a tensor that differs from its argument.
        """
        __tracebackhide__ = True
        everyone = self._run(keywords)
        for rank, held in enumerate(everyone):
            if isinstance(held.got, Tensor) and not _equal(held.got, held.given):
                raise failure(
                    f"{name_of(self.subject)}: rank {rank} returned something else than its argument holds",
                    likely_cause="it works on a copy; write the result into the argument",
                    case=self.facts,
                )
        return [held.given for held in everyone]

    def returned(self, *, unchanged: bool = True, **keywords: Any) -> list[Tensor]:
        """Return the tensor that every rank got back.

        Args:
            unchanged: whether the subject must leave its argument as it was.
            **keywords: passed on to the subject.

        Raises:
            AssertionError: the subject changed its argument, or returned no tensor.
        """
        __tracebackhide__ = True
        accepted = "pass in_place=None if callers use the returned tensor alone"
        everyone = self._got(keywords, unchanged=unchanged, do=accepted)
        return [self._tensor(rank, got) for rank, got in enumerate(everyone)]

    def gathered(self, **keywords: Any) -> list[Tensor | list[Tensor]]:
        """Return the tensor, or the list of tensors, that every rank got back.

        Args:
            **keywords: passed on to the subject.

        Raises:
            AssertionError: the subject changed its argument, or returned something else.
        """
        __tracebackhide__ = True
        return [
            list(got) if _is_list_of_tensors(got) else self._tensor(rank, got)
            for rank, got in enumerate(self._got(keywords))
        ]

    def _got(self, keywords: dict[str, Any], *, unchanged: bool = True, do: str | None = None) -> list[Any]:
        __tracebackhide__ = True
        everyone = self._run(keywords)
        for rank, (held, given) in enumerate(zip(everyone, self.inputs, strict=True)):
            if unchanged and not _equal(held.given, given):
                at = first_index(differs(held.given, given))
                raise failure(
                    f"{name_of(self.subject)}: rank {rank} holds {show(held.given[at])} at {at} "
                    f"of its argument, {show(given[at])} was there before the call",
                    Place(rank, "argument", at, held.given[at], given[at]),
                    likely_cause="it adds into its argument; clone the argument first",
                    do=do,
                    case=self.facts,
                )
        return [held.got for held in everyone]

    def _tensor(self, rank: int, got: Any) -> Tensor:
        __tracebackhide__ = True
        if not isinstance(got, Tensor):
            raise failure(
                f"{name_of(self.subject)}: rank {rank} returned {type(got).__name__}, expected a tensor",
                case=self.facts,
            )
        return got

    def with_strides(self) -> Calls | None:
        """Return the calls with the same values in another order in memory; None if there is no other for them."""
        inputs = [one.mT.contiguous().mT if one.dim() > 1 else one for one in self.inputs]
        return None if any(one.is_contiguous() for one in inputs) else replace(self, inputs=inputs)

    def results(self) -> list[Tensor] | None:
        """Return the tensor that every rank got back, or else its argument; None if a rank refuses the argument."""
        everyone = self._run({}, _Refusing(self.subject))
        if any(isinstance(held.got, _Refused) for held in everyone):
            return None
        return [held.got if isinstance(held.got, Tensor) else held.given for held in everyone]

    def require(
        self,
        rank: int,
        found: Tensor,
        expected: Tensor,
        what: str,
        causes: Sequence[Table],
        contributions: Sequence[Tensor] | None = None,
        *,
        rounding: Rounding | None = None,
        of: str = "",
        forms: Sequence[tuple[str, torch.Size]] = (),
    ) -> None:
        """Check that ``found`` on ``rank`` equals ``expected``, element by element.

        Args:
            rank: the rank that holds ``found``.
            found: the tensor under test.
            expected: the right tensor.
            what: a phrase that names ``expected`` in the message.
            causes: the tables of likely causes, as :func:`pdlcheck.checks.diagnosis.explain` takes them.
            contributions: the tensor of each rank, to be listed in the message.
            rounding: the error that each element may have; None compares exactly.
            of: which of several tensors ``found`` is, such as "of rank 1's tensor".
            forms: pairs of a likely cause and the wrong shape that it explains.

        Raises:
            AssertionError: names the rank, the index, the two values and the likely cause.
        """
        __tracebackhide__ = True
        who = f"{name_of(self.subject)}: rank {rank}"
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            raise failure(
                f"{who} holds shape {tuple(found.shape)} and {found.dtype}{of}, "
                f"expected shape {tuple(expected.shape)} and {expected.dtype}",
                likely_cause=next((text for text, shape in forms if shape == found.shape), None),
                case=self.facts,
            )
        wrong = differs(found, expected) if rounding is None else rounding.excludes(found)
        if not wrong.any():
            return
        at = first_index(wrong)
        raise failure(
            f"{who} holds {show(found[at])} at {at}{of}, {what} {show(expected[at])}",
            Place(rank, of.strip() or None, at, found[at], expected[at]),
            contributions=None if contributions is None else listed(contributions, at),
            allowed=None if rounding is None else rounding.told(at),
            wrong_elements=f"{int(wrong.sum())} of {found.numel()} on rank {rank}",
            likely_cause=explain(
                found,
                *map(predictions, causes),
                tolerance=EXACT if rounding is None else Tolerance(absolute=2 * rounding.slack),
                expected=expected,
                wrong=wrong,
            ),
            case=self.facts,
        )

    def _run(self, keywords: dict[str, Any], subject: Callable[..., Any] | None = None) -> list[Held]:
        subject = subject or self.subject
        if self.ranks is None:
            seen = self.world.run(_call, subject, self.inputs, None, keywords, world_size=len(self.inputs))
            return list(seen)
        # The world has one rank more than the group needs, so that the group is not the whole world.
        everyone = self.world.run(_call, subject, self.inputs, self.ranks, keywords, world_size=max(self.ranks) + 2)
        return [everyone[rank] for rank in self.ranks]


def _equal(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and not differs(one, other).any()


def _is_list_of_tensors(got: Any) -> bool:
    return isinstance(got, list | tuple) and bool(got) and all(isinstance(part, Tensor) for part in got)


def listed(values: Sequence[Tensor], at: tuple[int, ...]) -> str:
    """Return the value of every rank at one index, as text: ``rank 0: 1, rank 1: 2``."""
    return ", ".join(f"rank {rank}: {show(value[at])}" for rank, value in enumerate(values))


def bits(tensor: Tensor) -> Tensor:
    """Return the same memory as integers, so that NaN equals itself and 0.0 differs from -0.0."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous().view(integers[tensor.dtype.itemsize])


def group_of(ranks: Sequence[int] | None) -> dist.ProcessGroup | None:
    """Return a group of these global ranks, in this order. Every rank must call this function.

    ``None`` stays ``None``.

    Raises:
        ValueError: this release of torch cannot keep the order.
    """
    if ranks is None:
        return None
    if list(ranks) != possible_order(ranks):
        raise ValueError(
            f"torch {torch.__version__} sorts the ranks of a group, got ranks={list(ranks)}; give them in that order"
        )
    keywords: dict[str, Any] = {"sort_ranks": False} if KEEPS_ORDER else {}
    group: dist.ProcessGroup = dist.new_group(list(ranks), **keywords)
    return group


def possible_order(ranks: Sequence[int]) -> list[int]:
    """Return these ranks in an order that this release of torch supports for a group."""
    return list(ranks) if KEEPS_ORDER else sorted(ranks)


def _call(
    subject: Callable[..., Any],
    inputs: Sequence[Tensor],
    ranks: Sequence[int] | None,
    keywords: dict[str, Any],
) -> Held | None:
    rank = dist.get_rank()
    if ranks is None:
        given = copy.deepcopy(inputs[rank].detach())  # clone() fills the gaps of a strided view
        return Held(given, subject(given, **keywords))
    group = group_of(ranks)
    if rank not in ranks:
        return None
    given = copy.deepcopy(inputs[dist.get_rank(group)].detach())
    held = Held(given, subject(given, group=group, **keywords))
    dist.destroy_process_group(group)
    return held
