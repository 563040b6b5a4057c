"""What a simulated network does where the rules of ``torch.distributed`` leave it a choice. Does not import torch."""

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
_CHECKS = ("poison", "hazards", "leaks")


@dataclass(frozen=True, kw_only=True)
class Semantics:
    """How operations complete on simulated ranks; each value is one that some real backend may show.

    Args:
        send: ``rendezvous``, a send ends when its receive has been posted; ``buffered``, it ends at once; ``eager``, at
            once up to ``eager_bytes``, else by rendezvous.
        eager_bytes: largest message that ``eager`` buffers, in bytes.
        data: when the buffers of an asynchronous operation are read: ``at_once``, as soon as all partners are there;
            ``at_wait``, when the first of them waits; ``random``, at any moment between.
        completion: ``in_order``, an operation is seen to be complete as soon as it is; ``random``, polls and
            callbacks of futures learn of it late and in any order.
        reduce: the order in which the ranks' values are added: by rank, ``reversed``, or ``random``, which is one
            order for each group and run. All ranks get the same bits.
        messages: ``by_tag``, a receive takes the first message of its tag; ``in_order``, tags are ignored, and the
            operations between two ranks are carried out one after the other, as posted, except those of one batch.
        polls: ``answered``, a message that has arrived is complete for a rank that asks; ``after_wait``, it is so only
            once it has been waited for, as on gloo, lost or not; so is a ``reduce_scatter``.
        second_wait: a message that has been waited for and is waited for again ``blocks`` for ever, as on gloo, or
            ``returns``, as on nccl.
        waits: who has waited for a collective has waited for its ``own`` operation alone, as on gloo, or for the
            ``earlier`` collectives on its group, too, as on nccl: a stream carries out one after the other.
        poison: outputs of a pending operation hold NaN, or the smallest integer, until it is waited for; so does for
            good the tensor of a ``reduce`` on ranks that are not its ``dst``, in which gloo leaves partial sums, but
            NCCL, whose messages are ``in_order``, what was there.
        hazards: a rank that touches a buffer of a pending operation raises ``BufferHazard``.
        leaks: a run that ends with work that nobody waited for, or a message nobody received, raises ``LeakedWork``.

    Raises:
        ValueError: a value is none of those named here.
        TypeError: a check is neither True nor False, or ``eager_bytes`` is no int.

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
        """With what differs from the default alone."""
        values = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return f"Semantics({', '.join(f'{name}={value!r}' for name, value, default in values if value != default)})"

    @property
    def name(self) -> str | None:
        """Of the profile that it is, if it is one."""
        return next((name for name, profile in PROFILES.items() if profile == self), None)

    def buffers(self, nbytes: int) -> bool:
        """Does a send of ``nbytes`` end without its receive?"""
        return self.send == "buffered" or (self.send == "eager" and nbytes <= self.eager_bytes)


PROFILES = {
    "buffered": Semantics(send="buffered"),
    "gloo": Semantics(data="random", completion="random", reduce="random", polls="after_wait"),
    "nccl": Semantics(data="random", reduce="random", messages="in_order", second_wait="returns", waits="earlier"),
    "rendezvous": Semantics(),
}


def make_semantics(profile: Semantics | str = "rendezvous", /, **changes: Any) -> Semantics:
    """Return a profile, by name or as it is, with some values changed.

    Raises:
        ValueError: there is no profile of that name, or a value is unknown.
        TypeError: ``changes`` names something that Semantics does not have.

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
