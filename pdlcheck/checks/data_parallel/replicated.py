"""The check of a module that runs on several workers of one process: it computes and learns like the plain module."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pdlcheck.checks.diagnosis import Candidate, Diagnosis, explain, predictions
from pdlcheck.checks.message import Place, failure, first_index, name_of, show
from pdlcheck.checks.state import in_dtype, made_by
from pdlcheck.checks.tolerances import Tolerance
from pdlcheck.errors import Inconclusive

__all__ = ["check_replicated_module"]

Wrap = Callable[[nn.Module, int], Callable[..., Any]]
Loss = Callable[[Any], Tensor]
Gradients = dict[str, Tensor | None]

# float64 sums of a few hundred terms in another order agree to about 1e-14 of the largest term. A lost sample, or a
# gradient that counts twice, moves a sum by 1e-3 or more.
RELATIVE = 1e-9
ABSOLUTE = 1e-12
ROUNDINGS = 64  # the allowed multiple of eps for a dtype other than float64, such as complex64


def check_replicated_module(
    wrap: Wrap,
    make: Callable[[], nn.Module],
    batch: Callable[[int], tuple[Any, ...]],
    *,
    workers: Sequence[int] = (1, 2, 3),
    sizes: Sequence[int] = (6, 5, 1, 4),
    loss: Loss | None = None,
    seed: int = 0,
) -> None:
    """Check that ``wrap(module, n)`` gives the outputs, gradients and training steps of ``module``, for any batch.

    For each number of workers, a module and its wrapped twin take one step of SGD with momentum on a batch of each
    size, in float64. The check compares the outputs with their order and structure, the gradients of the inputs, and
    the gradients of the parameters, where None must match None. After the step it compares the weights. An element may
    be off by 1e-9 of the largest of its tensor, or by the rounding of a few operations if it is not in float64. An
    element that is infinite or NaN must be so in both.

    The module must draw no random numbers, and its samples must not affect each other. This excludes BatchNorm in
    training, whose statistics are those of one worker's samples by definition.

    Args:
        wrap: called as ``wrap(module, n)``; returns the callable that replaces ``module``. The optimizer updates
            ``module``.
        make: makes the module.
        batch: ``batch(num_samples)`` returns the arguments of one call, drawn under a seed; floating tensors are cast
            to float64.
        workers: numbers of workers.
        sizes: numbers of samples in the batches, in the order of the steps; for 0, only the outputs are compared.
        loss: returns a scalar for an output. The default adds up the mean square of each tensor of the output.
        seed: seed of weights and batches.

    Raises:
        AssertionError: a result differs. The message names it, the number of workers and samples, the index, both
            values and the likely cause: samples dropped or out of order, gradients lost in the copies, summed or
            averaged once too often.
        Inconclusive: the plain module draws random numbers, or its gradient is zero.

    Example:
        >>> from pdlcheck.primitives import DataParallel
        >>> def wrap(module, n):
        ...     return DataParallel(module, workers=n)
        >>> check_replicated_module(wrap, lambda: nn.Linear(2, 1), lambda n: (torch.randn(n, 2),))
    """
    __tracebackhide__ = True
    measure: Loss = in_dtype(loss or _mean_squares, torch.float64)
    learnt = False
    for n in workers:
        plain, module = _model(make, seed), _model(make, seed)
        wrapped = wrap(module, n)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (plain, module)]
        for step, size in enumerate(sizes):
            pair = Pair(name_of(wrap), plain, module, n, size, step, seed)
            inputs = _batch(batch, size, seed + step)
            pair.forward(wrapped, inputs)
            if size:
                learnt |= pair.backward(wrapped, inputs, measure)
                for optimizer in optimizers:
                    optimizer.step()
                pair.same_weights()
    if not learnt:
        raise Inconclusive(f"{name_of(wrap)}: the gradient of the plain module is zero, no fault would show")


@dataclasses.dataclass(frozen=True)
class Pair:
    """The plain module and the wrapped module, before one step on one batch."""

    who: str
    plain: nn.Module
    module: nn.Module
    workers: int
    samples: int
    step: int
    seed: int

    @property
    def case(self) -> str:
        return f"workers={self.workers} samples={self.samples} step={self.step} seed={self.seed}"

    def forward(self, wrapped: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        """Compare the outputs without gradients, on copies of the inputs."""
        __tracebackhide__ = True
        with torch.no_grad():
            expected, again = self.plain(*_copied(inputs)), self.plain(*_copied(inputs))
            if any(_unequal(a, b).any() for (_, a), (_, b) in zip(_leaves(expected), _leaves(again), strict=True)):
                raise Inconclusive(f"{self.who}: the plain module gives two outputs for one batch; call .eval() on it")
            found = wrapped(*_copied(inputs))
        self.same_output(found, expected)
        if any(tensor.requires_grad for _, tensor in _leaves(found)):
            raise failure(
                f"{self.who}: the output requires a gradient under torch.no_grad()",
                likely_cause="grad mode belongs to a thread: carry it into the workers",
                case=self.case,
            )

    def same_output(self, found: Any, expected: Any) -> None:
        """Compare two outputs: structure, shapes, dtypes and values."""
        __tracebackhide__ = True
        forms = [_form(found), _form(expected)]
        if forms[0] != forms[1]:
            raise failure(
                f"{self.who}: the output is {forms[0]}, the plain module's is {forms[1]}",
                likely_cause="outputs were not put together in the structure that forward returned",
                case=self.case,
            )
        for (path, one), (_, other) in zip(_leaves(found), _leaves(expected), strict=True):
            if (one.shape, one.dtype) != (other.shape, other.dtype):
                raise failure(
                    f"{self.who}: the output{path} has shape {tuple(one.shape)} and {one.dtype}, the plain module's "
                    f"{tuple(other.shape)} and {other.dtype}",
                    likely_cause=_why_of_another_shape(one, other),
                    case=self.case,
                )
            wrong = _wrong(one, other)
            if wrong.any():
                at = first_index(wrong)
                raise failure(
                    f"{self.who}: the output{path} holds {show(one[at])} at {at}, "
                    f"the plain module's holds {show(other[at])}",
                    wrong_elements=f"{int(wrong.sum())} of {one.numel()}",
                    likely_cause=_why_other_values(one, other),
                    case=self.case,
                )

    def backward(self, wrapped: Callable[..., Any], inputs: tuple[Any, ...], loss: Loss) -> bool:
        """Compare the gradients of parameters and inputs; return whether a gradient of the plain module is not zero."""
        __tracebackhide__ = True
        self.plain.zero_grad()
        self.module.zero_grad()
        given, reference = _leaf_inputs(inputs), _leaf_inputs(inputs)
        _backward(loss(self.plain(*reference)))
        output = wrapped(*given)
        self.same_output(_detached(output), _detached(self.plain(*inputs)))
        value = loss(output)
        if not value.requires_grad:
            raise failure(
                f"{self.who}: the output does not lead back to the parameters",
                likely_cause="workers run without gradients, or outputs were detached when they were put together",
                case=self.case,
            )
        _backward(value)
        found = {name: _dense(p.grad) for name, p in self.module.named_parameters()}
        expected = {name: _dense(p.grad) for name, p in self.plain.named_parameters()}
        for name in expected:
            self._same_gradient(found, expected, name, inputs, loss)
        for (path, one), (_, other) in zip(_leaves(given), _leaves(reference), strict=True):
            if (one.grad is None) != (other.grad is None):
                texts = ["None" if tensor.grad is None else "not None" for tensor in (one, other)]
                raise failure(
                    f"{self.who}: the gradient of input{path} is {texts[0]}, the plain module's is {texts[1]}",
                    likely_cause="inputs were detached when they were cut",
                    case=self.case,
                )
            if one.grad is not None and other.grad is not None and _wrong(one.grad, other.grad).any():
                at = first_index(_wrong(one.grad, other.grad))
                raise failure(
                    f"{self.who}: the gradient of input{path} holds {show(one.grad[at])} at {at}, "
                    f"the plain module's {show(other.grad[at])}",
                    case=self.case,
                )
        return any(grad is not None and bool(grad.any()) for grad in expected.values())

    def _same_gradient(
        self, found: Gradients, expected: Gradients, name: str, inputs: tuple[Any, ...], loss: Loss
    ) -> None:
        __tracebackhide__ = True
        one, other = found[name], expected[name]
        if one is None and other is None:
            return
        if one is None or other is None:
            texts = ["None" if grad is None else "not None" for grad in (one, other)]
            cause = "copies return zeros for what they did not use; momentum and weight decay then move the weight"
            lost = "its copies were used, and their gradients were not added to it"
            raise failure(
                f"{self.who}: the gradient of {name!r} is {texts[0]}, the plain module's is {texts[1]}",
                likely_cause=lost if one is None else cause,
                case=self.case,
            )
        wrong = _wrong(one, other)
        if not wrong.any():
            return
        at = first_index(wrong)
        raise failure(
            f"{self.who}: the gradient of {name!r} holds {show(one[at])} at {at}, the plain module's {show(other[at])}",
            Place(None, f"gradient of {name!r}", at, one[at], other[at]),
            wrong_elements=f"{int(wrong.sum())} of {one.numel()}",
            likely_cause=self._diagnose(one, name, other, inputs, loss),
            case=self.case,
        )

    def _diagnose(self, found: Tensor, name: str, expected: Tensor, inputs: tuple[Any, ...], loss: Loss) -> Diagnosis:
        finite = expected[expected.isfinite()].abs()
        slack = max(RELATIVE, ROUNDINGS * torch.finfo(expected.dtype).eps) * float(
            finite.max() if finite.numel() else 0
        )
        return explain(
            found,
            predictions(self._wrong_gradients(name, expected, inputs, loss)),
            tolerance=Tolerance(absolute=self.workers * slack + ABSOLUTE),
            expected=expected,
        )

    def _wrong_gradients(
        self, name: str, expected: Tensor, inputs: tuple[Any, ...], loss: Loss
    ) -> Iterator[tuple[str, Tensor]]:
        n = self.workers
        yield f"it is {n} times too large: summed where the loss is one mean over all samples", expected * n
        yield f"it is {n} times too small: averaged over the workers, whose parts belong to one sum", expected / n
        for worker, own in enumerate(self._parts(name, inputs, loss)):
            text = f"it is what the samples of worker {worker} give: the gradients of other workers were lost"
            yield text, own
            if n > 2:  # with two, what one gives is missing where the other's is lost
                yield f"what the samples of worker {worker} give is missing", expected - own

    def _parts(self, name: str, inputs: tuple[Any, ...], loss: Loss) -> Iterator[Tensor]:
        """Yield the part of the plain module's gradient that comes from each worker's samples."""
        lengths = [len(piece) for piece in torch.arange(self.samples).tensor_split(self.workers)]
        for worker, length in enumerate(lengths):
            start = sum(lengths[:worker])
            self.plain.zero_grad()

            def only(tensor: Tensor, start: int = start, length: int = length) -> Tensor:
                if not tensor.dim() or len(tensor) != self.samples:
                    return tensor
                rows = [tensor[:start].detach(), tensor[start : start + length], tensor[start + length :].detach()]
                return torch.cat(rows)

            _backward(loss(_mapped(self.plain(*inputs), only)))
            grad = _dense(dict(self.plain.named_parameters())[name].grad)
            yield torch.zeros(()) if grad is None else grad

    def same_weights(self) -> None:
        """Compare the weights after a step."""
        __tracebackhide__ = True
        for (name, one), (_, other) in zip(self.module.named_parameters(), self.plain.named_parameters(), strict=True):
            if _wrong(one.detach(), other.detach()).any():
                at = first_index(_wrong(one.detach(), other.detach()))
                raise failure(
                    f"{self.who}: after the step {name!r} holds {show(one[at])} at {at}, "
                    f"the plain module's {show(other[at])}",
                    case=self.case,
                )


def _model(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return made_by(make).double()


def _batch(batch: Callable[[int], tuple[Any, ...]], size: int, seed: int) -> tuple[Any, ...]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inputs = batch(size)
    if not isinstance(inputs, tuple | list):
        raise TypeError(f"batch must return a tuple of the arguments of one call, got {type(inputs).__name__}")
    return tuple(_mapped(inputs, lambda t: t.double() if t.is_floating_point() else t))


def _mean_squares(output: Any) -> Tensor:
    parts = [tensor.square().mean() for _, tensor in _leaves(output) if tensor.is_floating_point()]
    return torch.stack(parts).sum()


def _dense(grad: Tensor | None) -> Tensor | None:
    return grad.to_dense() if grad is not None and grad.layout != torch.strided else grad


def _backward(value: Tensor) -> None:
    value.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _copied(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_mapped(inputs, lambda tensor: tensor.clone()))


def _detached(output: Any) -> Any:
    return _mapped(output, lambda tensor: tensor.detach())


def _leaf_inputs(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_mapped(inputs, lambda t: t.clone().requires_grad_() if t.is_floating_point() else t.clone()))


def _wrong(found: Tensor, expected: Tensor) -> Tensor:
    if found.shape != expected.shape:
        return torch.ones(found.shape, dtype=torch.bool)
    unequal = _unequal(found, expected)
    if not (found.is_floating_point() or found.is_complex()):
        return unequal
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    relative = max(RELATIVE, ROUNDINGS * torch.finfo(expected.dtype).eps)
    return unequal & ~((found - expected).abs() <= relative * scale + ABSOLUTE)


def _unequal(found: Tensor, expected: Tensor) -> Tensor:
    """Return where two tensors differ, element by element; NaN equals NaN."""
    return (found != expected) & ~(found.isnan() & expected.isnan())


def _why_of_another_shape(found: Tensor, expected: Tensor) -> Diagnosis:
    have_rows = bool(found.dim() and expected.dim())
    rows = (len(found), len(expected)) if have_rows else (0, 0)
    other_rows = have_rows and found.shape[1:] == expected.shape[1:]
    dropped = f"{rows[1] - rows[0]} of {rows[1]} samples were dropped when the batch was cut"
    again = f"{rows[0] - rows[1]} samples too many: some went to several workers"
    return explain(
        found,
        [
            Candidate.when(dropped, other_rows and rows[0] < rows[1]),
            Candidate.when(again, other_rows and rows[0] >= rows[1]),
        ],
    )


def _why_other_values(found: Tensor, expected: Tensor) -> Diagnosis:
    def rows(tensor: Tensor) -> list[Any]:
        return sorted(map(repr, tensor.reshape(len(tensor), -1).tolist()))

    order = "the samples are in another order: outputs were put together as workers ended, not as they are numbered"
    return explain(found, [Candidate(order, holds=lambda held: bool(held.dim()) and rows(held) == rows(expected))])


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a nested structure with their paths."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for place, entry in enumerate(value):
            yield from _leaves(entry, f"{path}[{place}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            yield from _leaves(getattr(value, part.name), f"{path}.{part.name}")


def _form(value: Any) -> str:
    """Return the structure in words, so that two can be compared: ``tuple of (tensor, dict of {'a': tensor})``."""
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} of {{{', '.join(f'{key!r}: {_form(value[key])}' for key in value)}}}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of ({', '.join(map(_form, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = (f"{part.name}={_form(getattr(value, part.name))}" for part in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(parts)})"
    return repr(value)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same structure, with the same types of containers and with changed tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        new = {key: _mapped(value[key], change) for key in value}
        if not isinstance(value, MutableMapping):
            return type(value)(new)  # type: ignore[call-arg]  # an immutable mapping of some type
        result = copy.copy(value)  # keeps the default of a defaultdict
        result.update(new)
        return result
    if isinstance(value, list | tuple):
        parts = [_mapped(entry, change) for entry in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [part.name for part in dataclasses.fields(value) if part.init]
        return dataclasses.replace(value, **{name: _mapped(getattr(value, name), change) for name in names})
    return value
