"""The parts of a training that a program has, in the forms in which checks take them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pdlcheck.checks.evidence.dropout import DROPOUTS
from pdlcheck.checks.state import made_by
from pdlcheck.errors import Inconclusive

__all__ = ["Parts", "size_of"]


@dataclass(frozen=True)
class Parts:
    """The parts of a training; see :func:`pdlcheck.checks.check_training`."""

    make: Callable[[], nn.Module]
    batches: Sequence[Any]
    loss: Callable[[nn.Module, Any], Tensor] | None
    optimizer: Callable[[Iterable[Tensor]], Optimizer]
    wrap: Callable[[nn.Module], nn.Module | tuple[nn.Module, Optimizer]] | None
    step: Callable[[nn.Module, Optimizer, Any], object] | None
    share: Callable[[Any], Any] | None
    same_samples: Sequence[Sequence[int]]
    save: Callable[[Path, nn.Module, Optimizer], object] | None
    load: Callable[[Path, nn.Module, Optimizer], object] | None
    train: Callable[[nn.Module, int], object] | None
    reference: Callable[[nn.Module, int], object] | None
    loader: Callable[[range, int], Any] | None
    loader_options: Mapping[str, Any]
    evaluate: Callable[..., Any] | None
    samples: Sequence[Tensor] | None

    @property
    def trains(self) -> bool:
        """Return whether there is all that a training step needs."""
        return bool(self.batches) and (self.loss is not None or self.step is not None)

    def wrapped_model(self) -> nn.Module:
        """Return a new model as the program trains it."""
        return self._wrapped(made_by(self.make))[0]

    def training(self) -> tuple[nn.Module, Callable[[int], object]]:
        """Return the wrapped model, and a step that takes the rank's share of batch ``i``."""
        model, step, _ = self._begin(made_by(self.make))
        return model, step

    def saved_training(self) -> tuple[nn.Module, Callable[[int], object], Any, Any]:
        """Return the wrapped model, the step, and how to save and load under a path."""
        return self._saved(made_by(self.make))

    def saved_training_of_any_ranks(self) -> tuple[nn.Module, Callable[[int], object], Any, Any]:
        """Return the same, with one initial model for any number of ranks, and without dropout."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = made_by(self.make)
        for layer, name, _ in _dropouts(model):
            setattr(layer, name, 0.0)
        return self._saved(model)

    def _saved(self, made: nn.Module) -> tuple[nn.Module, Callable[[int], object], Any, Any]:
        model, step, optimizer = self._begin(made)
        save, load = (  # check_resume finds what a partial holds
            partial(_at, function=function, model=model, optimizer=optimizer) for function in (self.save, self.load)
        )
        return model, step, save, load

    def _wrapped(self, model: nn.Module) -> tuple[nn.Module, Optimizer]:
        wrapped = model if self.wrap is None else self.wrap(model)
        return wrapped if isinstance(wrapped, tuple) else (wrapped, self.optimizer(wrapped.parameters()))

    def _begin(self, made: nn.Module) -> tuple[nn.Module, Callable[[int], object], Optimizer]:
        model, optimizer = self._wrapped(made)
        return model, partial(self._step, model=model, optimizer=optimizer), optimizer

    def _step(self, i: int, model: nn.Module, optimizer: Optimizer) -> None:
        self._take(model, optimizer, self._share(self.batches[i % len(self.batches)]))

    def own_training(self, model: nn.Module, steps: int) -> None:
        """Train the wrapped model on this rank's shares, without dropout."""
        with _without_dropout(model):
            wrapped, optimizer = self._wrapped(model)
            for batch in itertools.islice(itertools.cycle(self.batches), steps):
                self._take(wrapped, optimizer, self._share(_like(model, batch)))

    def plain_training(self, model: nn.Module, steps: int) -> None:
        """Train the plain model on whole batches, without dropout."""
        loss = self.loss
        assert loss is not None
        with _without_dropout(model):
            optimizer = self.optimizer(model.parameters())
            for batch in itertools.islice(itertools.cycle(self.batches), steps):
                before = torch.get_rng_state()
                _plain_step(loss, model, optimizer, _like(model, batch))
                if not torch.equal(before, torch.get_rng_state()):
                    raise Inconclusive(
                        "the loss draws random numbers, and ranks draw others than one process: nothing to compare; "
                        "let make() return a model that draws none, such as one without stochastic depth"
                    )

    def training_step(self, made: tuple[nn.Module, Callable[[int], object]]) -> None:
        """Take a training step in training mode."""
        model, step = made
        model.train()
        step(0)

    def report(self, *samples: Tensor) -> Any:
        """Return what the program reports for all samples, with an untrained model."""
        evaluate = self.evaluate
        assert evaluate is not None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = made_by(self.make)
        return evaluate(model.eval(), *samples)

    def shares(self, world_size: int) -> int:
        """Return the number of shares into which ranks divide a batch."""
        return len({self._first(rank) for rank in range(world_size)})

    def _share(self, batch: Any) -> Any:
        """Return this rank's part of the samples of a batch; by default equal parts for each set of ranks."""
        if self.share is not None:
            return self.share(batch)
        number, count = self.shares(self._first(dist.get_rank())), self.shares(dist.get_world_size())
        return _mapped(lambda tensor: tensor.tensor_split(count)[number], batch)

    def _first(self, rank: int) -> int:
        """Return the first of the ranks that work on the samples of this rank."""
        return next((min(ranks) for ranks in self.same_samples if rank in ranks), rank)

    def _take(self, model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
        if self.step is not None:
            self.step(model, optimizer, batch)
        else:
            assert self.loss is not None
            _plain_step(self.loss, model, optimizer, batch)


def _at(path: Path, function: Callable[..., object] | None, model: nn.Module, optimizer: Optimizer) -> None:
    assert function is not None
    function(path, model, optimizer)


def _plain_step(loss: Callable[[nn.Module, Any], Tensor], model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    loss(model, batch).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def size_of(batch: Any) -> int:
    """Return the number of samples of a batch."""
    if isinstance(batch, Tensor):
        return len(batch)
    return size_of(next(iter(batch.values() if isinstance(batch, dict) else batch)))


def _like(model: nn.Module, batch: Any) -> Any:
    """Return the batch with its floats in the dtype of the model, which the check may have made wider."""
    dtype = next((one.dtype for one in model.parameters() if one.dtype == torch.float64), None)

    def like(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    return _mapped(like, batch)


def _mapped(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: _mapped(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [_mapped(function, value) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def _dropouts(model: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """Return the layers of torch that drop values, with the name and the value of the probability."""
    return [
        (layer, name, getattr(layer, name))
        for layer in model.modules()
        for name in ("p", "dropout")
        if isinstance(getattr(layer, name, None), float) and (name == "dropout" or isinstance(layer, DROPOUTS))
    ]


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Set the dropout of torch's layers to 0 during the block."""
    layers = _dropouts(model)
    for layer, name, _ in layers:
        setattr(layer, name, 0.0)
    try:
        yield
    finally:
        for layer, name, value in layers:
            setattr(layer, name, value)
