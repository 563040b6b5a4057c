"""The facts that a pipeline was made from, as texts; ranks compare them before any exchange that depends on them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from torch import Tensor, nn

__all__ = ["Facts", "Fingerprint", "differences", "kind_of", "model_facts", "settings_of", "stage_facts"]

Facts = dict[str, str]


@dataclass(frozen=True)
class Fingerprint:
    """The facts that one rank made its part from.

    Args:
        whole: the same on every rank.
        stages: the same on ranks that have the same stages, in pipelines side by side.
    """

    whole: Facts = field(default_factory=dict)
    stages: Facts = field(default_factory=dict)


def model_facts(model: nn.Module) -> Facts:
    """Return shape, dtype and ties of every parameter and buffer of the model.

    A tied parameter includes whether it is trained, because the gradients of its copies are added.
    """
    facts = {}
    for kind, named in (
        ("parameter", list(model.named_parameters(remove_duplicate=False))),
        ("buffer", list(model.named_buffers(remove_duplicate=False))),
    ):
        names: dict[int, list[str]] = {}
        for name, tensor in named:
            names.setdefault(id(tensor), []).append(name)
        for name, tensor in named:
            others = [other for other in names[id(tensor)] if other != name]
            tied = f", tied to {', '.join(map(repr, others))}" if others else ""
            facts[f"{kind} {name!r}"] = f"{_look(tensor)}{tied}{_frozen(tensor, kind) if others else ''}"
    return facts


def stage_facts(module: nn.Module) -> Facts:
    """Return, for the layers of one rank, the types of all modules and which parameters are trained."""
    facts = {f"layer {name!r}": type(layer).__qualname__ for name, layer in module.named_modules() if name}
    for name, parameter in module.named_parameters():
        facts[f"parameter {name!r}"] = f"{_look(parameter)}{_frozen(parameter, 'parameter')}"
    return facts


def kind_of(made: object) -> str:
    """Return the name of a function or a class, or of another object's class; for a partial, that of its function."""
    if made is None:
        return "not given"
    if isinstance(made, functools.partial):
        return kind_of(made.func)
    return str(getattr(made, "__qualname__", type(made).__qualname__))


def settings_of(made: object) -> str:
    """Return the arguments of a partial that can be compared as text."""
    if not isinstance(made, functools.partial):
        return ""
    simple = (bool, int, float, str, tuple, type(None))
    positions = [repr(value) for value in made.args if isinstance(value, simple)]
    return ", ".join(positions + [f"{n}={v!r}" for n, v in sorted(made.keywords.items()) if isinstance(v, simple)])


def differences(expected: Facts, found: Facts, first: str, second: str, *, at_most: int = 3) -> list[str]:
    """Return lines that describe the differences between two ranks."""
    names = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    pairs = [(name, expected.get(name, "not there"), found.get(name, "not there")) for name in names]
    short = [f"{name}: {one} on {first}, {other} on {second}" for name, one, other in pairs if "\n" not in one + other]
    ranks = first, second
    if not short:  # show grids only if nothing else differs: a grid also differs if a number does
        texts = [(f"{name} on {who}:", text) for name, *both in pairs for who, text in zip(ranks, both, strict=True)]
        return [line for title, text in texts for line in (title, *text.splitlines())]
    return [*short[:at_most], *([f"and {len(short) - at_most} more"] if len(short) > at_most else [])]


def _look(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _frozen(tensor: Tensor, kind: str) -> str:
    return ", frozen" if kind == "parameter" and not tensor.requires_grad else ""
