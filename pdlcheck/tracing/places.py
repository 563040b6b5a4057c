"""The place of a difference in words: the module and the direction."""

from __future__ import annotations

from dataclasses import dataclass

from pdlcheck.tracing.assembly import Logical
from pdlcheck.tracing.files import Trace
from pdlcheck.tracing.names import owner_of
from pdlcheck.tracing.records import Key

__all__ = ["Place", "place_of"]

DIRECTIONS = {
    "start": "before the first step",
    "input": "input",
    "forward": "forward",
    "backward": "backward",
    "gradient": "gradient to the optimizer",
    "update": "update",
}


@dataclass(frozen=True)
class Place:
    """The place at which two traces part.

    Args:
        module: the module in which they part.
        class_name: its class in the trusted run.
        direction: one of ``DIRECTIONS``.
        tensor: the first tensor that differs, in words.
        evidence: what agrees before it.
    """

    module: str
    class_name: str
    direction: str
    tensor: str
    evidence: str


def place_of(key: Key, good: dict[Key, Logical], agreed: set[Key], trace: Trace) -> Place:
    """Return the place of a tensor that differs.

    An output that differs is one of its module. A gradient of an output that differs comes from the backward pass of
    the modules that take the output.

    Args:
        key: the first tensor that differs.
        good: the tensors of the trusted run.
        agreed: the tensors that agree.
        trace: the trusted trace.
    """
    kind, name, _, index = key
    classes = {one: found for rank in trace.ranks for one, found in rank.modules.items()}
    element = f"[{index}]" if index else ""
    evidence, module = "", name
    if kind == "forward":
        tensor = f"the output{element} of {name}"
        sources = good[key].members[0].record.sources
        if sources and all(("forward", one, 0, 0) in agreed for one in sources):
            evidence = f"its input agrees: the output of {' and '.join(sources)}"
        elif last := _before(key, good, agreed):
            evidence = f"the last output that agrees is that of {last}"
            if not sources and owner_of(name) != "model":
                evidence += f"; code of {owner_of(name)} between the two may be wrong as well"
    elif kind == "backward":
        tensor = f"the gradient{element} of the output of {name}"
        around, takers = _takers(name, good, classes)
        module = around or name
        if around:
            takes = "takes" if len(takers) == 1 else "take"
            evidence = f"{' and '.join(takers)} {takes} that output"
            if last := _before(key, good, agreed):
                evidence += f"; the last gradient of an output that agrees is that of {last}"
        elif last := _before(key, good, agreed):
            evidence = f"the last gradient of an output that agrees is that of {last}"
        else:
            evidence = "it is the first gradient of the backward pass: the loss, or its scale"
    elif kind in {"gradient", "update"}:
        module = owner_of(name)
        tensor = f"the gradient of {name} given to the optimizer" if kind == "gradient" else f"the update of {name}"
        evidence = "all outputs and their gradients agree" if kind == "gradient" else "the gradients given to it agree"
    else:
        tensor = f"the parameter {name}" if kind == "start" else f"input {index} of the model"
        module = owner_of(name) if kind == "start" else "model"
    return Place(module, classes.get(module, ""), DIRECTIONS[kind], tensor, evidence)


def _before(key: Key, good: dict[Key, Logical], agreed: set[Key]) -> str:
    """Return the last module before a tensor of the same kind that agrees."""
    names = [
        other[1] for other in good if other[0] == key[0] and other in agreed and good[other].order < good[key].order
    ]
    return names[-1] if names else ""


def _takers(name: str, good: dict[Key, Logical], classes: dict[str, str]) -> tuple[str, list[str]]:
    """Return the innermost module with all code that is given the output of a module, and the modules that are."""
    takers = [one for (kind, one, *_), tensor in good.items() if kind == "forward" and name in _sources(tensor)]
    own = [one for one in dict.fromkeys(takers) if classes.get(one) != "Sequential"]  # it has no code of its own
    parts = [one.split(".") for one in own]
    common = [names[0] for names in zip(*parts, strict=False) if len(set(names)) == 1] if parts else []
    while common and any(one[: len(common)] != common for one in parts):
        common.pop()
    return ".".join(common), own


def _sources(tensor: Logical) -> tuple[str, ...]:
    return tensor.members[0].record.sources
