"""Ranks that work on samples of their own draw random numbers of their own."""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import dataloader

from pdlcheck.checks.message import case, failure, name_of, takes_world
from pdlcheck.errors import Inconclusive

__all__ = ["check_random_streams"]

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random

_OF_TORCH = "torch"
_GLOBAL = {"random": "the random module", "numpy.random": "numpy.random"}  # and what messages call them
_MAKES_WORKERS = dataloader._BaseDataLoaderIter.__init__.__code__
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


@takes_world
def check_random_streams(
    make: Callable[[], Any],
    step: Callable[[Any], object],
    world: Any,
    *,
    world_size: int = 2,
    steps: int = 2,
    same_samples: Sequence[Sequence[int]] = (),
    divided: Callable[[Any], Sequence[nn.Module]] | None = None,
    generators: Callable[[Any], Sequence[Generator]] | None = None,
    agreed: Sequence[Literal["random", "numpy.random"]] = (),
) -> None:
    """No two ranks may draw the same random numbers in a step, as they do where all are seeded alike, and no rank what
    it has drawn in a step before, as it does where each step begins with one seed.

    Their dropout masks, noise and augmentations would be the same. What counts is the state of the generator that a
    draw begins with, not the numbers, so shapes, probabilities and order do not matter. Seeding alike for the initial
    weights is fine, and so is what ranks agree by on the order of samples: generators of the program's own
    (``generator=``) and permutations. The seed that a ``DataLoader`` draws counts if it has workers, who get it.

    Args:
        make: called as ``make()`` on every rank: seeds as the program does, and returns the model or whatever ``step``
            works on.
        step: called as ``step(made)`` on every rank, in training mode.
        world: where the ranks run.
        world_size: number of ranks.
        steps: so many calls of ``step``.
        same_samples: sets of ranks that work on the same samples, as in tensor parallelism, and may draw alike.
        divided: called as ``divided(made)`` on every rank; returns the modules that are divided over such a set, as
            attention heads are. What torch draws in their forward passes must differ there, too.
        generators: called as ``generators(made)`` on every rank; returns those of the program's own that draw masks,
            noise or augmentations, torch's, NumPy's or Python's, which then count too.
        agreed: the global generators by which all ranks decide together, on layers to drop or a length, for example:
            from these they must draw alike.

    Raises:
        AssertionError: names both ranks, the call and its line on each, and the seed if it is the same; or the steps.
        Inconclusive: no step draws random numbers of torch's, NumPy's or Python's global generators, or of
            ``generators``.

    Example:
        >>> import torch.distributed as dist
        >>> from torch import nn
        >>> from pdlcheck.worlds import get_world
        >>> def make():
        ...     torch.manual_seed(0)
        ...     model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
        ...     torch.manual_seed(1 + dist.get_rank())
        ...     return model
        >>> check_random_streams(make, lambda model: model(torch.ones(2, 4)), get_world("sim"))
    """
    __tracebackhide__ = True
    if world_size < 2 or steps < 1:
        raise ValueError(
            f"check_random_streams compares ranks over steps: world_size must be 2 or more, got {world_size}, "
            f"steps 1 or more, got {steps}"
        )
    for name in agreed:
        if name not in _GLOBAL:
            raise ValueError(f"check_random_streams takes as agreed {' and '.join(map(repr, _GLOBAL))}, got {name!r}")
    plan = _Plan(steps, generators, divided, tuple(_GLOBAL[name] for name in agreed))
    ranks: list[_Drawn] = world.run(_record, make, step, plan, world_size=world_size)
    facts = case(world, world_size, steps=steps)
    if not any(drawn.draws or drawn.decides for drawn in ranks):
        others = "" if generators is None else ", nor of those that it was given,"
        raise Inconclusive(
            f"{name_of(step)} draws no random numbers of torch's, NumPy's or Python's global generators{others} in "
            f"{steps} step(s): is the model in training mode?"
        )
    together = [set(ranks_of_one) for ranks_of_one in same_samples]
    for rank in range(world_size):
        _require_agreement(name_of(step), rank, ranks, facts)
        for other in range(rank):
            alike = any({rank, other} <= ranks_of_one for ranks_of_one in together)
            _compare(name_of(step), (other, rank), (ranks[other], ranks[rank]), facts, divided_alone=alike)
    for rank, drawn in enumerate(ranks):
        if drawn.again is not None:
            where, before, now = drawn.again
            raise failure(
                f"{name_of(step)}: rank {rank} draws in step {now} the random numbers of step {before}: {where}",
                likely_cause="each step begins with one seed: add the step to it, or seed once, before the first",
                case=facts,
            )


class _Plan(NamedTuple):
    """What each rank does: see :func:`check_random_streams`; ``agreed`` in the words of messages."""

    steps: int
    generators: Callable[[Any], Sequence[Generator]] | None
    divided: Callable[[Any], Sequence[nn.Module]] | None
    agreed: tuple[str, ...]


class _Draw(NamedTuple):
    """Where a generator has drawn, in which step, and the last ``torch.manual_seed`` before, on this rank."""

    where: str
    step: int
    seed: int


@dataclass(frozen=True)
class _Drawn:
    """What has drawn on a rank.

    Args:
        draws: by the state of the generator that it began with.
        divided: the states of those that drew in divided modules.
        again: where, in which step before and in which step a state came back.
        together: the states of each generator that ranks agree by, after each step.
        decides: one of these has drawn.
        seed: of torch, before the first step.
    """

    draws: dict[str, _Draw]
    divided: set[str]
    again: tuple[str, int, int] | None
    together: dict[str, list[str]]
    decides: bool
    seed: int


def _require_agreement(who: str, rank: int, ranks: Sequence[_Drawn], facts: str) -> None:
    __tracebackhide__ = True
    for name, states in ranks[rank].together.items():
        others = ranks[0].together[name]
        for number, (own, other) in enumerate(zip(states, others, strict=True)):
            if own != other:
                raise failure(
                    f"{who}: ranks 0 and {rank} decide together by {name}, and have drawn other numbers from it by the "
                    f"end of step {number}",
                    likely_cause="other seeds, or one rank draws more often",
                    case=facts,
                )


def _compare(
    who: str, numbers: tuple[int, int], ranks: tuple[_Drawn, _Drawn], facts: str, *, divided_alone: bool
) -> None:
    __tracebackhide__ = True
    (first, second), (of_first, of_second) = numbers, ranks
    same = [state for state in of_first.draws if state in of_second.draws]
    if divided_alone:
        same = [state for state in same if state in of_first.divided & of_second.divided]
    if not same:
        return
    one, two = of_first.draws[same[0]], of_second.draws[same[0]]
    cause = None
    if divided_alone:
        cause = "each holds a part of a divided module, whose masks must differ: draw there from a stream of the rank's"
    elif one.seed == two.seed and same[0].startswith(_OF_TORCH):
        cause = f"torch.manual_seed({one.seed}) on both: add the rank to the seed once the weights are made"
        if one.step != two.step and one.seed != of_first.seed:
            cause = (
                f"torch.manual_seed({one.seed}) in step {one.step} of rank {first} and in step {two.step} of rank "
                f"{second}: sums of step and rank meet; step * world_size + rank does not"
            )
    raise failure(
        f"{who}: ranks {first} and {second} draw the same random numbers: "
        f"rank {first} in {one.where}, rank {second} in {two.where}",
        draws=f"{len(of_first.draws)} on rank {first}, {len(of_second.draws)} on rank {second}, {len(same)} the same",
        likely_cause=cause,
        case=facts,
    )


def _record(make: Callable[[], Any], step: Callable[[Any], object], plan: _Plan) -> _Drawn:
    made = make()
    seed = torch.initial_seed()
    own = [] if plan.generators is None else list(plan.generators(made))
    for one in own:
        if not isinstance(one, Generator):
            raise TypeError(
                "check_random_streams takes generators of torch, NumPy or Python, such as torch.Generator(), got "
                f"{type(one).__name__}"
            )
    torchs = [one for one in own if isinstance(one, torch.Generator)]
    others = [one for one in own if not isinstance(one, torch.Generator)]
    together: dict[str, list[str]] = {name: [] for name in plan.agreed}
    decides, notes = False, _Notes()
    with _inside([] if plan.divided is None else plan.divided(made), notes):
        for number in range(plan.steps):
            notes.step = number
            before = _other_states(others)
            with _Recorder(notes, torchs):
                step(made)
            after = _other_states(others)
            for name, state in before.items():
                if name in together:
                    together[name].append(after[name])
                    decides |= after[name] != state
                elif after[name] != state:
                    kind = name.partition(",")[0]  # streams of one kind may begin alike in other places
                    notes.add(f"{kind} {state}", name)
    return _Drawn(notes.draws, notes.divided, notes.again, together, decides, seed)


class _Notes:
    """What has drawn so far, and in which step."""

    def __init__(self) -> None:
        self.draws: dict[str, _Draw] = {}
        self.divided: set[str] = set()
        self.again: tuple[str, int, int] | None = None
        self.step = 0
        self.depth = 0  # of divided modules

    def add(self, state: str, where: str) -> None:
        """A draw began with this state of a generator."""
        first = self.draws.setdefault(state, _Draw(where, self.step, torch.initial_seed()))
        if self.depth:
            self.divided.add(state)
        if first.step != self.step and self.again is None:
            self.again = where, first.step, self.step


@contextmanager
def _inside(modules: Sequence[nn.Module], notes: _Notes) -> Iterator[None]:
    """Note when one of the modules, or one below, runs its forward pass."""

    def enter(*_: object) -> None:
        notes.depth += 1

    def leave(*_: object) -> None:
        notes.depth -= 1

    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


class _Recorder(TorchDispatchMode):
    """Notes the state of the global generator before each operation that draws from it."""

    def __init__(self, notes: _Notes, counted: Sequence[torch.Generator]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes = notes
        self._counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        has_generator = any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))
        if has_generator and self._counted:
            return self._of_its_own(func, args, kwargs)
        if has_generator or func.overloadpacket is torch.ops.aten.randperm:
            return func(*args, **kwargs)  # ranks may draw alike here, to agree
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        device = tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")
        before = _state_of(device)
        result = func(*args, **kwargs)
        if _state_of(device) != before and (line := _line()):  # it may draw nothing, as dropout with p=0
            self._notes.add(before, f"{func} at {line}")
        return result

    def _of_its_own(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The generator that comes here is another object each time: what counts is whose state moves on."""
        before = [_text_of(one.get_state(), one.device) for one in self._counted]
        result = func(*args, **kwargs)
        for one, state in zip(self._counted, before, strict=True):
            if _text_of(one.get_state(), one.device) != state:
                self._notes.add(state, f"{func} of a generator at {_line()}")
        return result


def _state_of(device: torch.device) -> str:
    state = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return _text_of(state, device)


def _text_of(state: Tensor, device: torch.device) -> str:
    """Alike for the global generator and one of the program's own: they draw the same numbers."""
    return f"{_OF_TORCH} on {device}: {hashlib.sha256(state.numpy().tobytes()).hexdigest()}"


def _other_states(own: Sequence[Any]) -> dict[str, str]:
    states: dict[str, Any] = dict(zip(_GLOBAL.values(), (random.getstate(), np.random.get_state()), strict=True))
    for place, one in enumerate(own):
        if isinstance(one, random.Random):
            states[f"the random module, generator {place}"] = one.getstate()
        elif isinstance(one, np.random.RandomState):
            states[f"numpy.random, generator {place}"] = one.get_state()
        else:
            states[f"numpy.random.Generator, generator {place}"] = one.bit_generator.state
    return {name: hashlib.sha256(pickle.dumps(state)).hexdigest() for name, state in states.items()}


def _line() -> str:
    """The nearest line that is neither torch's nor of this package; none, if a loader draws a seed that nobody gets."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        if frame.f_code is _MAKES_WORKERS and frame.f_locals["self"]._num_workers == 0:
            return ""
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
