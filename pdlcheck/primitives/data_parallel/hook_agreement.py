"""Comparison of communication hooks between ranks: the operations of the hooks must match."""

from __future__ import annotations

from functools import partial
from typing import Any

from pdlcheck.primitives.agreement import exchange
from pdlcheck.primitives.arguments import Members
from pdlcheck.primitives.data_parallel.hook_answers import Hook, name_of

__all__ = ["Registered", "require_same_hook", "same_hook"]

Registered = tuple[Any, Hook] | None  # state and hook
Settings = dict[str, str]
Told = tuple[str | None, Settings]  # the name of a hook, and its settings that must be the same on every rank

# Attributes of torch's states that must be the same. Other states list theirs in same_on_every_rank.
TORCHS = {
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.PowerSGDState": (
        "matrix_approximation_rank",
        "start_powerSGD_iter",
        "min_compression_rate",
        "use_error_feedback",
        "warm_start",
        "batch_tensors_with_same_shape",
        "iter",
    ),
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook.PostLocalSGDState": (
        "start_localSGD_iter",
        "post_local_gradient_allreduce",
        "iter",
    ),
}


def same_hook(registered: Registered, who: Members) -> bool:
    """Return whether all ranks of ``who`` have the same hook with the same settings. Every rank must call it."""
    told = exchange(_told(registered), None, who.group).values
    return all(one == told[0] for one in told)


def require_same_hook(caller: str, registered: Registered, who: Members) -> None:
    """Raise the same ValueError on every rank if :func:`same_hook` is False."""
    told = exchange(_told(registered), None, who.group).values
    ranks: dict[str, list[int]] = {}
    for place, one in enumerate(told):
        ranks.setdefault(_words(one, told), []).append(who.at(place))
    if len(ranks) > 1:
        listed = " and ".join(
            f"{words} on rank{'s' if len(where) > 1 else ''} {', '.join(map(str, where))}"
            for words, where in ranks.items()
        )
        raise ValueError(
            f"{caller} needs the same communication hook on every rank, got {listed}; register the same one, with the "
            "same settings, on every rank"
        )


def _told(registered: Registered) -> Told:
    if registered is None:
        return None, {}
    state, hook = registered
    while isinstance(hook, partial):
        hook = hook.func
    module = getattr(hook, "__module__", None)
    # A spawned process names its main program "__mp_main__".
    settings = {"module": "__main__" if module == "__mp_main__" else str(module)}
    kind, names = _known(state)
    if names:
        settings |= {"state": kind, **{name: repr(getattr(state, name, None)) for name in names}}
    return name_of(hook), settings


def _known(state: object) -> tuple[str, tuple[str, ...]]:
    for cls in type(state).__mro__:
        names = TORCHS.get(f"{cls.__module__}.{cls.__qualname__}", ())
        if names:
            return cls.__name__, names
    return type(state).__name__, tuple(getattr(state, "same_on_every_rank", ()))


def _words(one: Told, everyone: list[Told]) -> str:
    """Return the name of a hook, with the settings in which another rank's hook of the same name differs."""
    name, settings = one
    if name is None:
        return "none"
    others = [theirs for other, theirs in everyone if other == name]
    names = dict.fromkeys(key for theirs in others for key in theirs)
    differ = [key for key in names if len({theirs.get(key) for theirs in others}) > 1]
    listed = ", ".join(f"{key}={settings[key]}" for key in differ if key in settings)
    return f"{name} with {listed}" if listed else name
