"""Checks that a checkpoint fits the objects to load into, before any object is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pdlcheck.primitives.checkpoint.tree import Node, Tensors
from pdlcheck.primitives.optimizer_state import lost_options

__all__ = ["describe", "require_fit", "require_stateful", "state_of"]

TAKEN = ("path", "ignore", "reshard")  # an object with one of these names could be saved but never loaded


def require_stateful(caller: str, objects: Mapping[str, object]) -> None:
    """Raise unless every object can return its state and load one, under a name that is free."""
    if not objects:
        raise ValueError(f"{caller} was given nothing to save or load; pass model=..., optimizer=..., ... by name")
    for name, held in objects.items():
        if name == "rng":
            raise ValueError(
                f"{caller}: 'rng' names the random streams, which are in every checkpoint; call it otherwise"
            )
        if name in TAKEN:
            raise ValueError(f"{caller}: {name!r} is an argument of load_checkpoint; call the object otherwise")
        if isinstance(held, torch.Generator):
            continue
        if not callable(getattr(held, "state_dict", None)) or not callable(getattr(held, "load_state_dict", None)):
            raise TypeError(
                f"{caller}: {name} is of type {type(held).__name__}, without state_dict and load_state_dict"
            )


def state_of(held: Any) -> Any:
    """Return the state dict of ``held``; for a ``torch.Generator``, its stream."""
    return {"stream": held.get_state()} if isinstance(held, torch.Generator) else held.state_dict()


def describe(objects: Mapping[str, object]) -> dict[str, Any]:
    """Return facts that a state dict lacks: the class, and an optimizer's parameters by their names in the models."""
    names = {
        id(parameter): name
        for held in objects.values()
        if isinstance(held, nn.Module)
        for name, parameter in held.named_parameters()
    }
    return {name: [_class(held), _groups(held, names)] for name, held in objects.items()}


def require_fit(name: str, held: Any, about: list[Any], saved_about: list[Any], node: Node, tensors: Tensors) -> None:
    """Raise ValueError, naming the tensor or the group, if the saved state does not fit ``held``."""
    if isinstance(held, nn.Module):
        _require_model(name, held, dict(node[1]), tensors)
    elif about[0] != saved_about[0]:
        raise ValueError(f"{name} is a {about[0]}, the checkpoint holds the state of a {saved_about[0]}")
    if about[1] is not None and saved_about[1] is not None:
        _require_optimizer(name, held, about[1], saved_about[1], dict(node[1]))


def _class(held: object) -> str:
    return type(held).__qualname__


def _groups(held: object, names: dict[int, str]) -> list[Any] | None:
    """Return, for each group of an optimizer, the name (or ""), shape and dtype of its parameters."""
    if not isinstance(held, Optimizer):
        return None
    return [
        [[names.get(id(p), ""), list(p.shape), str(p.dtype)] for p in group["params"]] for group in held.param_groups
    ]


def _require_model(name: str, model: nn.Module, saved: dict[str, Node], tensors: Tensors) -> None:
    own = model.state_dict()
    missing, unexpected = [key for key in own if key not in saved], [key for key in saved if key not in own]
    if missing or unexpected:
        raise ValueError(
            f"the checkpoint is of another {name}: {_some(missing, 'it lacks')}"
            f"{' and ' if missing and unexpected else ''}{_some(unexpected, 'this model lacks')}"
            f"{_prefix(set(own), set(saved))}"
        )
    for key, (kind, held) in saved.items():
        mine = own[key]
        if not isinstance(mine, Tensor) or kind != "tensor":
            continue
        theirs = tensors[held]
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            raise ValueError(
                f"the checkpoint is of another {name}: {key!r} has shape {tuple(mine.shape)} and {mine.dtype}, the "
                f"checkpoint holds shape {tuple(theirs.shape)} and {theirs.dtype}"
            )


def _some(keys: list[str], verb: str) -> str:
    if not keys:
        return ""
    shown = ", ".join(map(repr, keys[:3]))
    return f"{verb} {shown}" + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")


def _prefix(own: set[str], saved: set[str]) -> str:
    if {f"module.{key}" for key in own} == saved:
        return (
            "; it was saved from a wrapper such as DistributedDataParallel: wrap this model too, or save wrapper.module"
        )
    if {f"module.{key}" for key in saved} == own:
        return "; it was saved from a bare model: load into wrapper.module"
    if {_uncompiled(key) for key in saved} == {_uncompiled(key) for key in own}:
        return "; one of the two is what torch.compile returned: save and load the model that it was given"
    return ""


def _uncompiled(key: str) -> str:
    """Return a name without the part that ``torch.compile`` inserts."""
    return key.replace("_orig_mod.", "")


def _require_optimizer(name: str, held: Optimizer, own: list[Any], saved: list[Any], state: dict[str, Node]) -> None:
    if len(own) != len(saved):
        raise ValueError(f"{name} has {len(own)} parameter groups, the checkpoint holds {len(saved)}")
    options = [dict(group[1]) for group in state["param_groups"][1]] if "param_groups" in state else []
    for g, (mine, theirs) in enumerate(zip(own, saved, strict=True)):
        if len(mine) != len(theirs):
            raise ValueError(f"group {g} of {name} has {len(mine)} parameters, that of the checkpoint {len(theirs)}")
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if a[1:] != b[1:] or (a[0] and b[0] and a[0] != b[0]):
                raise ValueError(
                    f"group {g} of {name} has {_parameter(a)} as parameter {i}, the checkpoint {_parameter(b)}"
                )
        lost = lost_options(held.param_groups[g], options[g]) if options else []
        if lost:  # the class is the same, so extra options in the checkpoint are a scheduler's and can be ignored
            raise ValueError(
                f"group {g} of {name} has {lost[0]!r}, that of the checkpoint has not and would take its place; make "
                f"{name} as the one that was saved"
            )


def _parameter(described: list[Any]) -> str:
    name, shape, dtype = described
    return f"{repr(name) + ' of ' if name else ''}shape {tuple(shape)} and {dtype}"
