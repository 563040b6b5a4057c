"""What a training needs to go on, besides its weights: found in what its functions hold, and put back by experiment."""

from __future__ import annotations

import collections
import copy
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from pdlcheck.checks.checkpoint.lost_numbers import IN_CONTAINERS, NUMBERS, numbers_reached
from pdlcheck.checks.checkpoint.reach import Reached, has_state, reached
from pdlcheck.checks.held import bits

__all__ = [
    "IN_CONTAINERS",
    "NUMBERS",
    "STREAMS",
    "Gradients",
    "first_difference",
    "first_pass_draws_elsewhere",
    "is_no_state",
    "loaders_that_draw",
    "numbers_of",
    "parts_of",
    "put_back",
    "seed_streams",
    "states_of",
]

_SUMS = 1e-5  # a float32 sum is off by less; an average that has forgotten its past, by far more
# What torch's schedulers count in order to warn: no learning rate depends on it, and one made anew with last_epoch= has
# other numbers.
_COUNTS_OF_SCHEDULERS = ("_step_count", "_get_lr_called_within_step", "_is_initial", "verbose")
_CONTAINERS = (dict, list, collections.deque)
_SMALL, _TIMES = 2**20, 4  # bytes, and times the model: a tensor with more of both is data
STREAMS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "the random numbers of torch": (torch.get_rng_state, torch.set_rng_state),
    "the random numbers of Python": (random.getstate, random.setstate),
    "the random numbers of numpy": (np.random.get_state, np.random.set_state),
}


class Gradients:
    """Those of ``model``, which a step finds where they accumulate over steps, as something with a state."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._model.named_parameters() if p.grad is not None}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, parameter in self._model.named_parameters():
            parameter.grad = state.get(name)


class Entries(dict[Any, Any]):
    """What a plain dict, list or deque of tensors and numbers holds: by key, or by place where keys are objects."""


def seed_streams(seed: int) -> None:
    """Start every global random stream of this rank from ``seed``."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def parts_of(model: nn.Module, functions: tuple[Callable[..., object], ...]) -> dict[str, Any]:
    """The objects with a state that ``functions`` reach, by the names that the functions have for them.

    Plain dicts and lists of tensors, and tensors, are among them; as a step may replace one, ask again before each use.
    What shares parameters with ``model``, and holds nothing else, is the model. No part is a number, a tensor of one
    number, such as a loss, one far larger than the model, such as data, or a generator from which a loader draws but a
    seed whenever a pass begins: a run that goes on begins one more.
    """
    tensors = [*model.parameters(), *model.buffers()]
    own, places = {id(tensor) for tensor in tensors}, {_place(tensor) for tensor in tensors}
    most = max(_SMALL, _TIMES * sum(map(_nbytes, tensors)))
    everything = reached(functions)
    loaders = [one.held for one in everything if isinstance(one.held, DataLoader)]
    known = {id(model), *(id(loader.generator) for loader in loaders if not _shuffles(loader))}
    found: list[Reached] = []
    for one in everything:
        held = one.held
        if id(held) in known or not (isinstance(held, (*_CONTAINERS, Tensor)) or has_state(held)):
            continue
        known.add(id(held))
        if isinstance(held, nn.Module) and _is_of_the_model(held, own):
            continue
        if isinstance(held, Tensor):
            counts = held.numel() > 1 and _nbytes(held) <= most and _place(held) not in places
        else:
            entries = [entry for entry in (_entries(held) or Entries()).values() if isinstance(entry, Tensor)]
            known.update(map(id, entries))
            counts = not any(_place(entry) in places for entry in entries)
        if counts:
            found.append(one)
    return _named_apart(found)


def loaders_that_draw(functions: tuple[Callable[..., object], ...]) -> list[DataLoader[Any]]:
    """Those that ``functions`` reach, and that draw a seed from the random numbers of torch whenever a pass begins."""
    found = {id(one.held): one.held for one in reached(functions) if isinstance(one.held, DataLoader)}
    return [loader for loader in found.values() if loader.generator is None]


@contextmanager
def first_pass_draws_elsewhere(loaders: Sequence[DataLoader[Any]]) -> Iterator[Callable[[], None]]:
    """Has them draw from generators of their own, until what is returned is called."""

    def as_before() -> None:
        for loader in loaders:
            loader.generator = None

    for loader in loaders:
        loader.generator = torch.Generator()
    try:
        yield as_before
    finally:
        as_before()


def numbers_of(functions: tuple[Callable[..., object], ...]) -> dict[str, Any]:
    """See :func:`pdlcheck.checks.checkpoint.lost_numbers.numbers_reached`; by name."""
    return _named_apart(list(numbers_reached(functions)))


def _named_apart(found: Sequence[Reached]) -> dict[str, Any]:
    """By name; those of one name by their long names, and those that have one in common by number, too."""
    short = collections.Counter(one.name for one in found)
    named: dict[str, Any] = {}
    for one in found:
        first = name = one.name if short[one.name] == 1 else one.long_name
        number = 1
        while name in named:
            number += 1
            name = f"{first} ({number})"
        named[name] = one.held
    return named


def states_of(parts: dict[str, Any], *, buffers: bool = True, unread: dict[str, str] | None = None) -> dict[str, Any]:
    """Copies of the states of the streams and the parts; what has none, or cannot be copied, is left out.

    ``buffers``: False leaves out those of modules, such as an average of weights that averages statistics, too.
    ``unread``: takes what raises where it is asked, by name, and what it raises.
    """
    states: dict[str, Any] = {name: copy.deepcopy(get()) for name, (get, _) in STREAMS.items()}
    for name, held in parts.items():
        try:
            own = _state(held) if buffers or not isinstance(held, nn.Module) else _without_buffers(held)
        except Exception as error:
            if unread is not None:
                unread[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        try:
            state = pickle.loads(pickle.dumps(own))  # it travels to the controller
        except Exception:
            continue
        if state is not None:
            states[name] = state
    return states


def is_no_state(resumed: tuple[Any, Any], straight: tuple[Any, Any]) -> bool:
    """Whether a plain dict, list or tensor is a constant or a log, by what two runs have after the stop and in the end.

    Steps leave a constant as it is. A log grows by steps, or entries that were written stay, or the newest is that of
    a resumed run too, or it is a sum since a run began.
    """
    (_, found), (before, after) = resumed, straight
    if not isinstance(after, Tensor | Entries):
        return False
    found, before, after = map(_own, (found, before, after))
    return not first_difference(before, after) or _is_log(found, before, after) or _is_sum(resumed, straight)


def _is_log(found: Any, before: Any, after: Tensor | Entries) -> bool:
    if isinstance(after, Tensor):
        if not isinstance(before, Tensor) or before.shape != after.shape:
            return not isinstance(found, Tensor) or found.shape != after.shape
        if not isinstance(found, Tensor) or (found.shape, found.dtype) != (after.shape, after.dtype):
            return False
        return not bool(((bits(before) != bits(after)) & (bits(found) != bits(after))).any())
    held = found if isinstance(found, Entries) else Entries()
    if held.keys() == after.keys():
        return False
    if not isinstance(before, Entries) or before.keys() != after.keys():
        return True
    return bool(held) and not first_difference([*held.values()][-1], [*after.values()][-1])


def _is_sum(resumed: tuple[Any, Any], straight: tuple[Any, Any]) -> bool:
    """Whether the resumed run has begun at 0 and added what the straight one has."""
    everything = [*resumed, *straight]
    if all(isinstance(one, Entries) and one.keys() == resumed[0].keys() for one in everything):
        return all(_is_sum(*((pair[0][key], pair[1][key]) for pair in (resumed, straight))) for key in resumed[0])
    tensors = [torch.as_tensor(one) for one in map(_own, everything) if isinstance(one, Tensor | int | float)]
    numbers = [one.double() for one in tensors if not one.is_complex()]
    if len(numbers) < len(everything) or len({one.shape for one in numbers}) > 1 or numbers[0].any():
        return False
    _, found, before, after = numbers
    return torch.allclose(found, after - before, rtol=_SUMS, atol=_SUMS * float(after.abs().max()))


def put_back(parts: dict[str, Any], states: dict[str, Any], names: list[str]) -> None:
    """Give the named parts and streams these states."""
    for name in names:
        if name not in states or name not in {*STREAMS, *parts}:
            continue
        if name in STREAMS:
            STREAMS[name][1](states[name])
        elif isinstance(states[name], Entries):
            _put_entries(parts[name], states[name])
        elif isinstance(parts[name], Tensor):
            _put_values(parts[name], states[name])
        elif isinstance(parts[name], torch.Generator):
            parts[name].set_state(states[name])
        else:
            parts[name].load_state_dict(copy.deepcopy(states[name]))


def first_difference(found: Any, expected: Any, where: str = "") -> str | None:
    """The first place where two states differ, in words; None where they are the same bit for bit."""
    if isinstance(found, Tensor) != isinstance(expected, Tensor) or (found is None and isinstance(expected, Entries)):
        return f"{where} {'should not be there' if isinstance(found, Tensor) else 'is missing'}"
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        found, expected = _own(found), _own(expected)
        if (found.shape, found.dtype) != (expected.shape, expected.dtype) or not torch.equal(
            bits(found), bits(expected)
        ):
            return f"{where} holds other values" if where else "other values"
        return None
    if isinstance(found, np.ndarray) and isinstance(expected, np.ndarray):
        return None if found.tobytes() == expected.tobytes() else f"{where} holds other values"
    if isinstance(found, dict) and isinstance(expected, dict):
        missing = [key for key in expected if key not in found]
        if missing:
            return f"{where}[{missing[0]!r}] is missing"
        added = [key for key in found if key not in expected]
        if added:
            return f"{where}[{added[0]!r}] should not be there"
        pairs = [(found[key], expected[key], f"{where}[{key!r}]") for key in expected]
    elif isinstance(found, (list, tuple)) and isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            return f"{where} has {len(found)} entries instead of {len(expected)}"
        pairs = [(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(found, expected, strict=True))]
    else:
        same = type(found) is type(expected) and repr(found) == repr(expected)
        return None if same else f"{where} is {found!r} instead of {expected!r}"
    return next((text for text in (first_difference(*pair) for pair in pairs) if text), None)


def _own(tensor: Any) -> Any:
    """Dense, and of a DTensor the shard of this rank, as states are compared where no process group is."""
    if not isinstance(tensor, Tensor):
        return tensor
    held: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held if held.layout == torch.strided else held.to_dense()


def _place(tensor: Tensor) -> int:
    """Where its memory is; equal for what shares memory from its first element on."""
    held = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return (held.data_ptr() if held.layout == torch.strided else 0) or id(tensor)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _entries(held: Any) -> Entries | None:
    """What a plain dict, list or deque holds, if that is tensors, and numbers perhaps."""
    if has_state(held) or not isinstance(held, _CONTAINERS):
        return None
    pairs = list(held.items() if isinstance(held, dict) else enumerate(held))
    kinds = {Tensor if isinstance(value, Tensor) else type(value) for _, value in pairs}
    if Tensor not in kinds or kinds - {Tensor, bool, int, float, type(None)}:
        return None
    return Entries({key if isinstance(key, str | int) else i: value for i, (key, value) in enumerate(pairs)})


def _put_entries(held: Any, entries: Entries) -> None:
    if isinstance(held, collections.deque):
        held.clear()
        held.extend(copy.deepcopy(list(entries.values())))
        return
    for place, (label, value) in enumerate(copy.deepcopy(entries).items()):
        if isinstance(held, list):
            held[place : place + 1] = [value]
        elif label in held or isinstance(label, str):
            held[label] = value


def _put_values(held: Tensor, values: Tensor) -> None:
    if held.shape == values.shape:
        held.detach().copy_(values)


def _state(held: Any) -> Any:
    if isinstance(held, Tensor):
        return held.detach()
    if isinstance(held, _CONTAINERS) and not has_state(held):
        return _entries(held)
    if isinstance(held, LRScheduler):
        return _without_counts(held.state_dict())
    return held.get_state() if isinstance(held, torch.Generator) else held.state_dict()


def _without_buffers(module: nn.Module) -> dict[str, Any]:
    names = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    return {name: value for name, value in module.state_dict().items() if name not in names}


def _without_counts(state: Any) -> Any:
    """Of a scheduler, and of those that it holds."""
    if isinstance(state, dict):
        return {key: _without_counts(value) for key, value in state.items() if key not in _COUNTS_OF_SCHEDULERS}
    return [_without_counts(one) for one in state] if type(state) is list else state


def _is_of_the_model(module: nn.Module, own: set[int]) -> bool:
    """Whether it shares parameters with the model, and has nothing beside, as an average that holds both models has.

    Args:
        module: what may be of the model.
        own: the model's parameters and buffers.
    """
    shares = any(id(parameter) in own for parameter in module.parameters())
    return shares and all(id(tensor) in own for tensor in [*module.parameters(), *module.buffers()])


def _shuffles(loader: DataLoader[Any]) -> bool:
    """Whether the order of the samples comes from the loader's generator."""
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(getattr(sampler, "generator", None) is loader.generator for sampler in samplers)
