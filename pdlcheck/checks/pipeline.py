"""A pipeline does what one process does on the whole batch: outputs, loss, gradients, and where training leads.

PipeDream does something else by intention; it is compared with a sequential simulation of its rule.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from pdlcheck.checks.message import case, failure, first_index, name_of, show
from pdlcheck.checks.state import require_bits, tied_names
from pdlcheck.errors import Inconclusive

__all__ = ["check_pipedream", "check_pipeline", "check_same_gradients"]

Loss = Callable[[Any, Any], Tensor]
Step = Callable[[Any, Any], "tuple[Tensor | None, Any] | None"]
Start = Callable[[nn.Module], tuple[nn.Module, Step]]
Named = dict[str, Tensor]
Batch = tuple[Any, Any]

# Sums of a few thousand float64 terms in another order agree to 1e-13 of their terms; one sample in a thousand with a
# wrong weight moves them by 1e-3.
RELATIVE = 1e-9
ABSOLUTE = 1e-12


@dataclass(frozen=True)
class Taken:
    """What one rank holds after a step: gradients and weights by name, and what its step returned."""

    gradients: Named
    weights: Named
    loss: Tensor | None
    outputs: Any


def check_pipeline(
    start: Start,
    make: Callable[[], nn.Module],
    loss: Loss,
    batches: Sequence[Batch],
    world: Any,
    *,
    world_size: int,
    n_microbatches: int,
    results: bool = True,
    optimizer: Callable[[list[Tensor]], Optimizer] | None = None,
    seed: int = 0,
) -> None:
    """After every step all ranks together must hold what one process holds that takes the whole batch at once.

    Outputs, loss and gradients may be off by 1e-9 of their largest element, weights by 1e-9 of theirs: in float64,
    sums in another order are off by 1e-13. Where two ranks hold a parameter of one name, or two names are tied in the
    model, gradients and weights must be equal bit for bit.

    Args:
        start: called on every rank with a copy of the same float64 model, under different random numbers; returns a
            module with the parameters that this rank holds, under the names of the model, and ``step(inputs,
            targets)``, which does forward and backward passes of a batch (given whole on every rank) and returns
            ``(loss, outputs)`` where it has them, None where not. The check calls ``zero_grad`` and steps optimizers.
        make: makes the model; no batch norm or dropout, which see micro-batches.
        loss: of outputs and targets, a mean or a sum over samples.
        batches: one for each step, not all of one size; three or more show momentum.
        world: where the ranks run.
        world_size: ranks.
        n_microbatches: parts of a batch, for the likely cause of a wrong number.
        results: False where no rank returns the loss and outputs of the whole batch, as with replicas.
        optimizer: makes the optimizer; SGD with momentum if None.
        seed: of the model.

    Raises:
        AssertionError: names step, rank, tensor, index and the likely cause: a lost scale, a micro-batch left out or
            taken twice, outputs in another order, tied copies that were not added, gradients of the step before.
        Inconclusive: the gradient of one process is zero.
    """
    __tracebackhide__ = True
    optimizer = optimizer or (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    batches = [(_double(x), _double(y)) for x, y in batches]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make().double()
    everyone: list[list[Taken]] = world.run(_trained, start, model, batches, optimizer, world_size=world_size)
    facts = case(world, world_size, n_microbatches=n_microbatches, samples=[_count(x) for x, _ in batches], seed=seed)
    who = name_of(start)
    own = copy.deepcopy(model)
    steps = optimizer(list(own.parameters()))
    before: Named = {}
    for number, (inputs, targets) in enumerate(batches):
        truth = Truth(own, loss, inputs, targets, n_microbatches, before)
        if not any(grad.any() for grad in truth.gradients.values()):
            raise Inconclusive(f"{who}: the gradient of step {number} is zero, no fault would show")
        taken = [ranks[number] for ranks in everyone]
        when = f"{who}: in step {number}"
        _require_all_held(when, taken, own, facts)
        if results:
            _require_results(when, taken, truth, facts)
        for rank, one in enumerate(taken):
            _require_gradients(when, rank, one, truth, facts)
        _require_equal_copies(when, taken, own, facts)
        own.zero_grad()
        for name, parameter in own.named_parameters():
            parameter.grad = truth.gradients[name].clone()
        steps.step()
        weights = _named(own)
        for rank, one in enumerate(taken):
            for name, found in one.weights.items():
                _require_near(f"{when}: rank {rank} ends", f"parameter {name!r}", found, weights[name], case=facts)
        before = truth.gradients


def check_pipedream(
    start: Start,
    make: Callable[[], nn.Sequential],
    loss: Loss,
    batch: Batch,
    world: Any,
    *,
    world_size: int,
    n_microbatches: int,
    optimizer: Callable[[list[Tensor]], Optimizer],
    vertical_sync: bool = False,
    seed: int = 0,
) -> None:
    """One call of ``step`` must leave the weights of PipeDream's rule, simulated one micro-batch after the other.

    Stage s of n computes micro-batch i, forwards and backwards, with weights that have had ``max(0, i - (n - s) + 1)``
    updates, with vertical sync ``max(0, i - n + 1)`` in every stage; the update goes to the latest weights.

    Args:
        start: as in :func:`check_pipeline`, but ``step`` also takes the steps of the optimizers, one after each
            backward pass. What rank r holds is stage r.
        make: makes a sequential model.
        loss: mean over a micro-batch.
        batch: cut by ``tensor_split`` into ``n_microbatches``; take more than twice as many as ranks.
        world, world_size, seed: as in :func:`check_pipeline`.
        n_microbatches: updates that every stage takes.
        optimizer: makes the optimizer of a stage, for the simulation.
        vertical_sync: as above.

    Raises:
        AssertionError: names rank, tensor, index, and which other rule gives what was found.
        Inconclusive: another rule gives the same weights, so that nothing would be seen.

    Source: D. Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP (2019).
    """
    __tracebackhide__ = True
    inputs, targets = _double(batch[0]), _double(batch[1])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make().double()
    everyone: list[list[Taken]] = world.run(_trained, start, model, [(inputs, targets)], None, world_size=world_size)
    stages = [sorted(ranks[0].weights) for ranks in everyone]
    parts = list(zip(inputs.tensor_split(n_microbatches), targets.tensor_split(n_microbatches), strict=True))
    who, facts = name_of(start), case(world, world_size, n_microbatches=n_microbatches, vertical_sync=vertical_sync)
    _require_all_held(who, [ranks[0] for ranks in everyone], model, facts)

    def simulated(version: Callable[[int, int], int], scale: float = 1.0) -> Named:
        return _simulate(model, stages, loss, parts, optimizer, version, scale)

    n = world_size

    def stashed(i: int, s: int) -> int:
        return max(0, i - (n - s) + 1)

    def vertical(i: int, s: int) -> int:
        return max(0, i - n + 1)

    rules: dict[str, Callable[[], Named]] = {
        "weights are stashed, without vertical sync": lambda: simulated(stashed),
        "all stages use the version of stage 0: vertical sync": lambda: simulated(vertical),
        "every micro-batch waits for the one before: there is no pipeline": lambda: simulated(lambda i, s: i),
        "weights are those of the start for all micro-batches": lambda: simulated(lambda i, s: 0),
        "versions are one update too old": lambda: simulated(lambda i, s: max(0, stashed(i, s) - 1)),
        f"gradients are divided by n_microbatches = {n_microbatches}": lambda: simulated(stashed, 1 / n_microbatches),
    }
    expected = rules.pop(list(rules)[1 if vertical_sync else 0])()
    others = {text: rule() for text, rule in rules.items()}
    for text, other in others.items():
        if all(_near(other[name], goal) for name, goal in expected.items()):
            raise Inconclusive(f"{who}: no fault would show, {text!r} gives the same weights; take more micro-batches")
    all_found = {name: found for (one,) in everyone for name, found in one.weights.items()}
    for rank, (one,) in enumerate(everyone):
        for name, found in one.weights.items():
            cause = next(
                (text for text, other in others.items() if all(_near(all_found[n], other[n]) for n in other)), None
            )
            _require_near(
                f"{who}: rank {rank} ends",
                f"parameter {name!r}",
                found,
                expected[name],
                likely_cause=cause
                or "forward and backward pass of a micro-batch used different weights, or updates are missing",
                case=facts,
            )


def check_same_gradients(
    start: Start,
    other: Start,
    make: Callable[[], nn.Module],
    batches: Sequence[Batch],
    world: Any,
    *,
    world_size: int,
    seed: int = 0,
) -> None:
    """Two pipelines must leave the same gradients bit for bit, from the same random numbers.

    For recomputation, and models with dropout, which no single process can be compared with. Buffers, and random
    numbers afterwards, must be the same too.

    Args:
        start, other: as in :func:`check_pipeline`; ``start`` is what is checked, ``other`` what it is compared with.
        make, batches, world, world_size, seed: as there; the dtype of the model is kept.

    Raises:
        AssertionError: names step, rank, tensor and index.
        Inconclusive: no gradient differs between two seeds, so that there are no random numbers to be seen.
    """
    __tracebackhide__ = True
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make()
    runs = [
        world.run(_random, one, model, batches, number, world_size=world_size)
        for one, number in ((start, seed), (other, seed), (other, seed + 1))
    ]
    facts = case(world, world_size, seed=seed)
    drawn = [(a[n], b[n]) for a, b in zip(runs[1], runs[2], strict=True) for n in a if n.startswith("gradient")]
    if all(torch.equal(one, another) for one, another in drawn):
        raise Inconclusive(f"{name_of(other)}: gradients do not depend on random numbers, no fault would show")
    for rank, (found, expected) in enumerate(zip(runs[0], runs[1], strict=True)):
        for name, goal in expected.items():
            require_bits(
                f"{name_of(start)}: rank {rank}",
                name,
                (found.get(name), goal),
                f"{name_of(other)} holds",
                likely_cause="random numbers of the forward pass were not restored, or not put back"
                if "buffer" not in name
                else "the second forward pass changed buffers again",
                case=facts,
            )


class Truth:
    """One process on the whole batch, and what it would hold with one thing wrong."""

    def __init__(
        self, model: nn.Module, loss: Loss, inputs: Any, targets: Any, n_microbatches: int, before: Named
    ) -> None:
        self.model, self.loss_of, self.before, self.count = model, loss, before, n_microbatches
        self.samples = _count(inputs)
        self.outputs, self.loss, self.gradients = self._of(model, inputs, targets)
        self.parts = list(zip(_split(inputs, n_microbatches), _split(targets, n_microbatches), strict=True))

    def _of(self, model: nn.Module, inputs: Any, targets: Any) -> tuple[Any, Tensor, Named]:
        one = copy.deepcopy(model)
        one.zero_grad()
        outputs = one(inputs)
        value = self.loss_of(outputs, targets)
        value.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return _plain(outputs), value.detach(), _gradients(one)

    def near(self, name: str, found: Tensor, candidate: Tensor) -> bool:
        # a candidate may be n_microbatches times larger than the gradient itself
        allowed = RELATIVE * self.count * float(self.gradients[name].abs().max()) + ABSOLUTE
        return bool(((found - candidate).abs() <= allowed).all())

    def cause(self, found: Named, wrong: Sequence[str]) -> str | None:
        """The first candidate that explains all wrong gradients."""
        for text, candidate in self._candidates():
            if all(name in candidate and self.near(name, found[name], candidate[name]) for name in wrong):
                return text
        return None

    def cause_of_loss(self, factor: float) -> str | None:
        """What a loss that is ``factor`` times too large tells."""
        m, samples = self.count, self.samples
        for text, value in (
            (f"summed over {samples} samples, where one process averages", samples),
            (f"averaged over {samples} samples, where one process sums", 1 / samples),
            (f"not divided by n_microbatches = {m}", m),
            (f"divided by n_microbatches = {m} once too often", 1 / m),
        ):
            if abs(factor - value) < RELATIVE * value:
                return text
        return None

    def _candidates(self) -> Iterator[tuple[str, Named]]:
        m, samples = self.count, self.samples

        def scaled(factor: float) -> Named:
            return {name: grad * factor for name, grad in self.gradients.items()}

        yield "it is zero: no gradient came back, or the activation was received without requires_grad", scaled(0)
        yield f"it is {m} times too large: not divided by n_microbatches", scaled(m)
        yield f"it is {m} times too small: divided by n_microbatches once too often", scaled(1 / m)
        yield f"it is {samples} times too large: not divided by the samples", scaled(samples)
        yield f"it is {samples} times too small: divided by the samples once too often", scaled(1 / samples)
        if self.before:
            yield "it is the gradient of the step before", self.before
            yield "the gradient of the step before was added", _sum([self.gradients, self.before], [1, 1])
        yield "it is the copy's own part: gradients of the tied copies were not added", self._untied()
        each = [self._of(self.model, x, y) for x, y in self.parts]
        grads, sizes = [grad for _, _, grad in each], [_count(x) for x, _ in self.parts]
        total = sum(float(value) * n / samples for (_, value, _), n in zip(each, sizes, strict=True))
        means = abs(total - float(self.loss)) < RELATIVE * max(1.0, abs(total))
        weights = [n / samples if means else 1.0 for n in sizes]
        yield "it is the plain mean over micro-batches: weight them with their samples", _sum(grads, [1 / m] * m)
        yield "it is the sum over micro-batches of means", _sum(grads, [1.0] * m)
        for left in range(m):
            kept = [w * (i != left) for i, w in enumerate(weights)]
            yield f"micro-batch {left} of {m} is missing", _sum(grads, kept)
            yield f"micro-batch {left} of {m} is left out", _sum(grads, [w / (1 - weights[left] or 1) for w in kept])
            yield (
                f"every micro-batch is micro-batch {left}",
                _sum(grads, [sum(weights) * (i == left) for i in range(m)]),
            )

    def _untied(self) -> Named:
        """The gradient that each of the tied names would have alone."""
        values = {name: p.detach().clone().requires_grad_() for name, p in _all_names(self.model).items()}
        inputs = _joined([x for x, _ in self.parts])
        targets = _joined([y for _, y in self.parts])
        out = functional_call(self.model, values, (inputs,), tie_weights=False)
        grads = torch.autograd.grad(self.loss_of(out, targets), list(values.values()), allow_unused=True)
        return {n: torch.zeros_like(v) if g is None else g for (n, v), g in zip(values.items(), grads, strict=True)}


def _require_results(when: str, taken: Sequence[Taken], truth: Truth, facts: str) -> None:
    __tracebackhide__ = True
    given = [rank for rank, one in enumerate(taken) if one.loss is not None]
    if not given:
        raise failure(f"{when} no rank returned a loss; results=False accepts that", case=facts)
    for rank in given:
        one = taken[rank]
        found = one.outputs if isinstance(one.outputs, tuple | list) else [one.outputs]
        goals = truth.outputs if isinstance(truth.outputs, tuple | list) else [truth.outputs]
        if len(found) != len(goals):
            raise failure(f"{when} rank {rank} returns {len(found)} outputs, one process {len(goals)}", case=facts)
        for value, goal in zip(found, goals, strict=True):
            if not isinstance(value, Tensor) or value.shape != goal.shape:
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise failure(
                    f"{when} rank {rank} returns outputs of shape {shape}, "
                    f"those of one process have {tuple(goal.shape)}",
                    likely_cause="outputs of some micro-batches are missing, or not put together",
                    case=facts,
                )
            if not _near(value, goal):
                _require_near(
                    f"{when} rank {rank} returns",
                    "the outputs",
                    value,
                    goal,
                    likely_cause=_order(value, goal, truth.count),
                    case=facts,
                )
        assert one.loss is not None  # it is one of those given
        if not _near(one.loss.double(), truth.loss):
            factor = float(one.loss) / float(truth.loss)
            raise failure(
                f"{when} rank {rank} returns the loss {show(one.loss)}, one process has {show(truth.loss)}",
                best_fit=f"{factor:.6g} times the loss of one process, n_microbatches = {truth.count}",
                likely_cause=truth.cause_of_loss(factor),
                case=facts,
            )


def _require_gradients(when: str, rank: int, one: Taken, truth: Truth, facts: str) -> None:
    __tracebackhide__ = True
    wrong = [name for name, grad in one.gradients.items() if not _near(grad, truth.gradients[name])]
    if not wrong:
        return
    name = wrong[0]
    found, goal = one.gradients[name], truth.gradients[name]
    at = first_index(~((found - goal).abs() <= RELATIVE * float(goal.abs().max()) + ABSOLUTE))
    raise failure(
        f"{when} rank {rank} holds {show(found[at])} at {at} of the gradient of {name!r}, "
        f"one process on the whole batch holds {show(goal[at])}",
        wrong_gradients=f"{len(wrong)} of {len(one.gradients)} on rank {rank}",
        likely_cause=truth.cause(one.gradients, wrong),
        case=facts,
    )


def _require_all_held(when: str, taken: Sequence[Taken], model: nn.Module, facts: str) -> None:
    __tracebackhide__ = True
    names = {name for one in taken for name in one.weights}
    known = _all_names(model)
    if strange := sorted(names - set(known)):
        raise failure(f"{when} a rank holds {strange[0]!r}, a name that the model does not have", case=facts)
    held = {id(known[name]) for name in names}
    for name, parameter in known.items():
        if id(parameter) not in held:
            raise failure(f"{when} no rank holds {name!r}", case=facts)


def _require_equal_copies(when: str, taken: Sequence[Taken], model: nn.Module, facts: str) -> None:
    """Parameters of one name, or tied in the model, are equal bit for bit wherever they are."""
    __tracebackhide__ = True
    same = {name: group[0] for group in tied_names(model) for name in group}
    first: dict[str, tuple[int, str]] = {}
    for rank, one in enumerate(taken):
        for name in one.weights:
            source, alias = first.setdefault(same.get(name, name), (rank, name))
            for what, values in (("gradient of ", "gradients"), ("parameter ", "weights")):
                require_bits(
                    f"{when} rank {rank}",
                    f"{what}{name!r}",
                    (getattr(one, values)[name], getattr(taken[source], values)[alias]),
                    f"rank {source} holds in its copy {alias!r}",
                    likely_cause="copies were not synchronised, or added in another order",
                    case=facts,
                )


def _require_near(who: str, what: str, found: Tensor, goal: Tensor, **details: object) -> None:
    __tracebackhide__ = True
    if _near(found, goal):
        return
    at = first_index(~((found - goal).abs() <= RELATIVE * float(goal.abs().max()) + ABSOLUTE))
    raise failure(f"{who} with {show(found[at])} at {at} of {what}, right is {show(goal[at])}", **details)


def _simulate(
    model: nn.Module,
    stages: Sequence[Sequence[str]],
    loss: Loss,
    parts: Sequence[Batch],
    optimizer: Callable[[list[Tensor]], Optimizer],
    version: Callable[[int, int], int],
    scale: float,
) -> Named:
    """The weights after all micro-batches, each with the version of the weights that ``version(i, stage)`` names."""
    latest = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    steps = [optimizer([latest[name] for name in names]) for names in stages]
    history = [{name: p.detach().clone() for name, p in latest.items()}]
    for i, (inputs, targets) in enumerate(parts):
        used = {
            name: history[version(i, stage)][name].clone().requires_grad_()
            for stage, names in enumerate(stages)
            for name in names
        }
        value = loss(functional_call(model, used, (inputs,)), targets) * scale
        value.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for name, weight in used.items():
            latest[name].grad = weight.grad
        for one in steps:
            one.step()
        history.append({name: p.detach().clone() for name, p in latest.items()})
    return history[-1]


def _trained(
    start: Start, model: nn.Module, batches: Sequence[Batch], optimizer: Callable[..., Optimizer] | None
) -> list[Taken]:
    """On every rank: a step for each batch."""
    torch.manual_seed(dist.get_rank() + 1)
    module, step = start(copy.deepcopy(model))
    params = list(module.parameters())
    steps = optimizer(params) if optimizer and params else None
    taken = []
    for inputs, targets in batches:
        module.zero_grad()
        loss, outputs = step(inputs, targets) or (None, None)
        gradients = _gradients(module)
        if steps:
            steps.step()
        weights = {name: p.detach().cpu().clone() for name, p in module.named_parameters()}
        taken.append(Taken(gradients, weights, None if loss is None else loss.detach().cpu(), _plain(outputs)))
    return taken


def _random(start: Start, model: nn.Module, batches: Sequence[Batch], seed: int) -> Named:
    """On every rank: gradients, buffers and the next random numbers."""
    torch.manual_seed(1000 * seed + dist.get_rank())
    module, step = start(copy.deepcopy(model))
    held: Named = {}
    for number, (inputs, targets) in enumerate(batches):
        module.zero_grad()
        step(inputs, targets)
        held |= {f"gradient of {name!r} in step {number}": grad for name, grad in _gradients(module).items()}
    held |= {f"buffer {name!r}": buffer.detach().cpu().clone() for name, buffer in module.named_buffers()}
    held["the next random numbers"] = torch.rand(3)
    return held


def _gradients(module: nn.Module) -> Named:
    return {
        name: torch.zeros_like(p).cpu() if p.grad is None else p.grad.detach().cpu().clone()
        for name, p in _all_names(module).items()
    }


def _all_names(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(remove_duplicate=False))


def _named(module: nn.Module) -> Named:
    return {name: p.detach() for name, p in _all_names(module).items()}


def _near(found: Tensor, goal: Tensor) -> bool:
    largest = float(goal.abs().max()) if goal.numel() else 0.0
    return found.shape == goal.shape and bool(((found - goal).abs() <= RELATIVE * largest + ABSOLUTE).all())


def _order(found: Tensor, goal: Tensor, count: int) -> str | None:
    """Whether the outputs of micro-batches are there, in another order."""
    parts = list(goal.tensor_split(count)) if goal.dim() else []
    order, left = [], found
    while len(left):
        fits = [i for i, part in enumerate(parts) if i not in order and len(part) and _near(left[: len(part)], part)]
        if not fits:
            return None
        order.append(fits[0])
        left = left[len(parts[fits[0]]) :]
    return f"micro-batches are in the order {order}"


def _sum(parts: Sequence[Named], weights: Sequence[float]) -> Named:
    return {name: torch.stack([p[name] * w for p, w in zip(parts, weights, strict=True)]).sum(0) for name in parts[0]}


def _split(batch: Any, count: int) -> list[Any]:
    if isinstance(batch, Tensor):
        return list(batch.tensor_split(count))
    return [tuple(parts) for parts in zip(*(one.tensor_split(count) for one in batch), strict=True)]


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _count(batch: Any) -> int:
    return len(batch if isinstance(batch, Tensor) else batch[0])


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return tuple(_double(one) for one in value)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    return tuple(_plain(one) for one in value) if isinstance(value, tuple | list) else value
