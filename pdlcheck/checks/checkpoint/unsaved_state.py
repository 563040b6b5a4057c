"""The state besides the weights that a resumed training needs: how to find, copy, restore and compare it."""

from __future__ import annotations

import collections
import copy
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from pdlcheck.checks.checkpoint.lost_numbers import IN_CONTAINERS, NUMBERS, numbers_reached
from pdlcheck.checks.checkpoint.object_graph import Reached, has_state, reached
from pdlcheck.checks.rank_results import bits
from pdlcheck.compat.torch.optim import SCHEDULER_COUNTS

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

_SUMS = 1e-5  # relative; a float32 sum is off by less, and an average without its history by far more
# Torch's schedulers use these attributes only for warnings. No learning rate depends on them, and a scheduler that is
# recreated with last_epoch= has other values.
_COUNTS_OF_SCHEDULERS = (*SCHEDULER_COUNTS, "verbose")
_CONTAINERS = (dict, list, collections.deque)
_SMALL, _TIMES = 2**20, 4  # bytes, and multiples of the model's size; a tensor above both limits is data
STREAMS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "the random numbers of torch": (torch.get_rng_state, torch.set_rng_state),
    "the random numbers of Python": (random.getstate, random.setstate),
    "the random numbers of numpy": (np.random.get_state, np.random.set_state),
}


class Gradients:
    """The gradients of ``model``, as an object with a state.

    A step starts from these gradients if it accumulates gradients over steps.
    """

    def __init__(self, model: nn.Module) -> None:
        """Read and write the gradients of ``model``."""
        self._model = model

    def state_dict(self) -> dict[str, Tensor]:
        """Return the gradients that are not None, by parameter name."""
        return {name: p.grad for name, p in self._model.named_parameters() if p.grad is not None}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Replace every gradient; a parameter that is missing in ``state`` gets None."""
        for name, parameter in self._model.named_parameters():
            parameter.grad = state.get(name)


class Entries(dict[Any, Any]):
    """The contents of a plain dict, list or deque of tensors and numbers.

    The keys are those of the dict. An entry has its position as key in a list, and where the dict's key is an object.
    """


class Positions(dict[Any, Any]):
    """The state of an object that gives out samples or batches, such as a sampler."""


def seed_streams(seed: int) -> None:
    """Start every global random stream of this rank from ``seed``."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def parts_of(model: nn.Module, functions: tuple[Callable[..., object], ...]) -> dict[str, Any]:
    """Return the objects with a state that ``functions`` reach, by the names that the functions use for them.

    Tensors, and plain dicts, lists and deques, count as such objects. A step may replace one of them, so call this
    function again before each use.

    A module that shares parameters with ``model``, and has no other tensors, counts as the model and is left out. Also
    left out are:

    - numbers, and tensors of one element, such as a loss;
    - tensors far larger than the model, such as data;
    - generators from which a loader draws only a seed when a pass begins, because a resumed run begins one pass more.
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
    """Return the reached loaders that draw a seed from the random numbers of torch when a pass begins."""
    found = {id(one.held): one.held for one in reached(functions) if isinstance(one.held, DataLoader)}
    return [loader for loader in found.values() if loader.generator is None]


@contextmanager
def first_pass_draws_elsewhere(loaders: Sequence[DataLoader[Any]]) -> Iterator[Callable[[], None]]:
    """Make ``loaders`` draw from generators of their own.

    Yields:
        A function that makes them draw from the random numbers of torch again. The end of the block calls it too.
    """

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
    """Return the numbers that ``functions`` reach, by name.

    See :func:`pdlcheck.checks.checkpoint.lost_numbers.numbers_reached`.
    """
    return _named_apart(list(numbers_reached(functions)))


def _named_apart(found: Sequence[Reached]) -> dict[str, Any]:
    """Return the objects by name.

    Objects that share a name get their long names. Objects that share a long name get a number as well.
    """
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
    """Return copies of the states of the random streams and of ``parts``.

    A part that has no state, or whose state cannot be read or pickled, is left out.

    Args:
        parts: the objects with a state, by name.
        buffers: False leaves out the buffers of modules, such as the averaged statistics in an average of weights.
        unread: receives the error of each part whose state cannot be read, by name.
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
            state = pickle.loads(pickle.dumps(own))  # the controller receives it pickled
        except Exception:
            continue
        if state is not None:
            states[name] = state
    return states


def is_no_state(resumed: tuple[Any, Any], straight: tuple[Any, Any]) -> bool:
    """Return whether a plain dict, list or tensor is a constant or a log, which a resumed training does not need.

    Steps leave a constant as it is. A container or tensor is a log in each of these cases:

    - steps make it grow;
    - steps do not change the entries that were written before;
    - its newest entry equals that of the resumed run;
    - it is a sum since the run began;
    - it holds single numbers only, such as the last losses and their average.

    Nor are numbers a state by themselves in an object that gives out samples. They may count the samples that are drawn
    ahead, or drawn in this run. The weights show whether training continues with the right samples.

    Args:
        resumed: the object after the stop and at the end, in the resumed run.
        straight: the same in the run without a stop.
    """
    (_, found), (before, after) = resumed, straight
    if isinstance(after, Positions):
        return isinstance(found, Positions) and _differ_in_numbers(found, after)
    if not isinstance(after, Tensor | Entries):
        return False
    if isinstance(after, Entries) and all(_is_single(one) for one in (*after.values(), *(found or {}).values())):
        return True
    found, before, after = map(_own, (found, before, after))
    return not first_difference(before, after) or _is_log(found, before, after) or _is_sum(resumed, straight)


def _is_single(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else True


def _differ_in_numbers(found: Any, expected: Any) -> bool:
    """Return whether two states differ in nothing but whole numbers."""
    if isinstance(found, dict) and isinstance(expected, dict) and found.keys() == expected.keys():
        return all(_differ_in_numbers(found[key], value) for key, value in expected.items())
    return type(found) is type(expected) is int or not first_difference(found, expected)


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
    """Return whether the resumed run began at 0 and added the same amount as the run without a stop."""
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
    """Set the named parts and random streams to these states; skip a name that is unknown."""
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
    """Return the first place where two states differ, in words; None if they are equal bit for bit."""
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
    """Return a tensor in dense form; for a DTensor, the shard of this rank.

    The controller compares states without a process group, so it cannot gather shards.
    """
    if not isinstance(tensor, Tensor):
        return tensor
    held: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held if held.layout == torch.strided else held.to_dense()


def _place(tensor: Tensor) -> int:
    """Return the address of the tensor's memory.

    Two tensors that share memory from their first element on have the same address.
    """
    held = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return (held.data_ptr() if held.layout == torch.strided else 0) or id(tensor)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _entries(held: Any) -> Entries | None:
    """Return the contents of a plain dict, list or deque of tensors, possibly with numbers; None for another object."""
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
    state = held.get_state() if isinstance(held, torch.Generator) else held.state_dict()
    return Positions(state) if type(state) is dict and _gives_out_samples(held) else state


def _gives_out_samples(held: Any) -> bool:
    return hasattr(type(held), "__iter__") and not isinstance(held, (nn.Module, Mapping))


def _without_buffers(module: nn.Module) -> dict[str, Any]:
    names = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    return {name: value for name, value in module.state_dict().items() if name not in names}


def _without_counts(state: Any) -> Any:
    """Remove the counters from the state of a scheduler, and from the states of schedulers inside it."""
    if isinstance(state, dict):
        return {key: _without_counts(value) for key, value in state.items() if key not in _COUNTS_OF_SCHEDULERS}
    return [_without_counts(one) for one in state] if type(state) is list else state


def _is_of_the_model(module: nn.Module, own: set[int]) -> bool:
    """Return whether ``module`` shares parameters with the model and has no other tensors.

    An object that holds both the model and an average of it has other tensors.

    Args:
        module: the candidate.
        own: the ids of the model's parameters and buffers.
    """
    shares = any(id(parameter) in own for parameter in module.parameters())
    return shares and all(id(tensor) in own for tensor in [*module.parameters(), *module.buffers()])


def _shuffles(loader: DataLoader[Any]) -> bool:
    """Return whether the order of the samples comes from the loader's generator."""
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(getattr(sampler, "generator", None) is loader.generator for sampler in samplers)
