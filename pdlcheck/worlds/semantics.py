"""The choices that the rules of ``torch.distributed`` leave open for the completion of operations.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

__all__ = ["PROFILES", "Semantics", "make_semantics"]

_CHOICES = {
    "send": ("rendezvous", "eager", "buffered"),
    "data": ("at_once", "at_wait", "random"),
    "completion": ("in_order", "random"),
    "reduce": ("rank_order", "reversed", "random"),
    "messages": ("by_tag", "in_order"),
    "polls": ("answered", "after_wait"),
    "second_wait": ("blocks", "returns"),
    "waits": ("own", "earlier"),
}
_CHECKS = ("poison", "hazards", "leaks", "unwaited", "unreceived")


@dataclass(frozen=True, kw_only=True)
class Semantics:
    """The rules by which operations complete on simulated ranks; some real backend may show each value.

    Args:
        send: when a send returns: ``rendezvous``, when its receive has been posted; ``buffered``, at once; ``eager``,
            at once up to ``eager_bytes``, else by rendezvous.
        eager_bytes: largest message that ``eager`` buffers, in bytes.
        data: when the buffers of an asynchronous operation are read: ``at_once``, as soon as all partners are there;
            ``at_wait``, when the first of them waits; ``random``, at any moment between.
        completion: when ranks see a completed operation: ``in_order``, as soon as it is complete; ``random``, polls and
            callbacks of futures see it late and in any order.
        reduce: the order in which the ranks' values are added: ``rank_order``, ``reversed``, or ``random``, which is
            one order for each group and run. All ranks get the same bits.
        messages: ``by_tag``, a receive takes the first message with its tag; ``in_order``, tags are ignored, and the
            operations between two ranks run one after the other, as posted, except those of one batch.
        polls: ``answered``, a poll reports a message that has arrived as complete; ``after_wait``, only after a wait
            for it, as on gloo, whether or not the message is lost. The same holds for a ``reduce_scatter``.
        second_wait: a second wait for the same message ``blocks`` for ever, as on gloo, or ``returns``, as on nccl.
        waits: what a wait for a collective covers: its ``own`` operation, as on gloo, or also the ``earlier``
            collectives of its group, as on nccl, where a stream runs one after the other.
        poison: outputs of a pending operation hold NaN, or the smallest integer, until the rank waits for it. After
            ``reduce``, ranks other than ``dst`` keep the poison, because gloo leaves partial sums there. They do not
            with ``messages='in_order'``, because NCCL leaves the tensor unchanged.
        hazards: a rank that accesses a buffer of a pending operation raises ``BufferHazard``.
        leaks: a run that leaves work behind raises ``LeakedWork``. If False, neither ``unwaited`` nor ``unreceived``
            does.
        unwaited: a run that ends with an operation that no rank waited for raises ``LeakedWork``.
        unreceived: a run that ends with a message that no rank received raises ``LeakedWork``.

    Raises:
        ValueError: a value is not one of those named here.
        TypeError: a check is neither True nor False, or ``eager_bytes`` is not an int.

    Example:
        >>> Semantics(send="eager", eager_bytes=4096)
        Semantics(send='eager', eager_bytes=4096)
    """

    send: str = "rendezvous"
    eager_bytes: int = 0
    data: str = "at_once"
    completion: str = "in_order"
    reduce: str = "rank_order"
    messages: str = "by_tag"
    polls: str = "answered"
    second_wait: str = "blocks"
    waits: str = "own"
    poison: bool = True
    hazards: bool = True
    leaks: bool = True
    unwaited: bool = True
    unreceived: bool = True

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}")
        for name in _CHECKS:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if isinstance(self.eager_bytes, bool) or not isinstance(self.eager_bytes, int):
            raise TypeError(f"eager_bytes must be an int, got {self.eager_bytes!r}; pass a number of bytes")
        if (self.send == "eager") != (self.eager_bytes > 0) or self.eager_bytes < 0:
            raise ValueError(
                f"eager_bytes must be at least 1 with send='eager', and 0 otherwise; got {self.eager_bytes} with "
                f"send={self.send!r}"
            )

    def __repr__(self) -> str:
        """Return the call with only the values that differ from the defaults."""
        values = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return f"Semantics({', '.join(f'{name}={value!r}' for name, value, default in values if value != default)})"

    @property
    def name(self) -> str | None:
        """Return the name of the profile that equals this object; None if there is none."""
        return next((name for name, profile in PROFILES.items() if profile == self), None)

    def buffers(self, nbytes: int) -> bool:
        """Return whether a send of ``nbytes`` returns before its receive is posted."""
        return self.send == "buffered" or (self.send == "eager" and nbytes <= self.eager_bytes)


PROFILES = {
    "buffered": Semantics(send="buffered"),
    "gloo": Semantics(data="random", completion="random", reduce="random", polls="after_wait"),
    "nccl": Semantics(data="random", reduce="random", messages="in_order", second_wait="returns", waits="earlier"),
    "rendezvous": Semantics(),
}


def make_semantics(profile: Semantics | str = "rendezvous", /, **changes: Any) -> Semantics:
    """Return a profile, given by name or as an object, with some values changed.

    Args:
        profile: the name of a profile, or a ``Semantics``.
        changes: new values, by the argument names of ``Semantics``.

    Raises:
        ValueError: there is no profile of that name, or a value is unknown.
        TypeError: ``changes`` has a name that ``Semantics`` does not have, or ``profile`` has another type.

    Example:
        >>> make_semantics("nccl", leaks=False).messages
        'in_order'
    """
    if isinstance(profile, str):
        if profile not in PROFILES:
            raise ValueError(f"semantics must be one of {', '.join(sorted(PROFILES))}; got {profile!r}")
        profile = PROFILES[profile]
    if not isinstance(profile, Semantics):
        raise TypeError(f"semantics must be a Semantics or the name of a profile, got {profile!r}")
    unknown = sorted(set(changes) - set(Semantics.__dataclass_fields__))
    if unknown:
        raise TypeError(f"semantics has no {unknown[0]!r}; it has {', '.join(Semantics.__dataclass_fields__)}")
    return replace(profile, **changes)
