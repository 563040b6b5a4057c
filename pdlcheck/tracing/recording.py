"""``pdlcheck.trace``: it records a few steps of a training through hooks of modules, tensors and optimizers."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from pdlcheck.compat.torch.autograd import in_backward
from pdlcheck.compat.torch.pipelining import infers_shapes
from pdlcheck.compat.torch.pytree import tree_flatten, tree_leaves, tree_unflatten
from pdlcheck.compat.torch.tensors import in_place_version
from pdlcheck.tracing.files import clear_traces, write_trace
from pdlcheck.tracing.layout import MICRO_BATCH
from pdlcheck.tracing.mapping import Mapping, Rule, coordinates_of, finished, local_part, mapping_of, place
from pdlcheck.tracing.names import logical_names
from pdlcheck.tracing.noise import Noise
from pdlcheck.tracing.records import Record

__all__ = ["trace"]

Call = tuple[str, int, int, int]  # name, micro-batch, call, index


@contextmanager
def trace(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    directory: str | Path,
    *,
    steps: int = 3,
    mapping: Mapping | dict[str, Rule] | None = None,
    perturb: int | None = None,
) -> Iterator[None]:
    """Record the first steps of the training in the ``with`` block; the loop stays as it is.

    Recorded are the parameters before the first step, the inputs of the model, the output of each module and its
    gradient, the gradients given to the optimizer, and the updates. A step ends with ``optimizer.step()``. Calls of the
    model without gradients, as for evaluation, are left out. Each rank writes one safetensors file into ``directory``
    when it leaves the block; a block that raises an error writes none.

    Args:
        model: the model, or those that this rank has (the stages of a pipeline; their names then begin with ``0.``).
        optimizer: the optimizer, or several; a step ends when each has made its step.
        directory: where the files go; the same for all ranks.
        steps: how many steps are recorded.
        mapping: where this rank's tensors belong; none is needed for one process, plain DDP and FSDP2.
        perturb: a seed: noise of the size of rounding is added to the outputs and gradients. Record the trusted run a
            second time with it, into another directory, to estimate how much rounding explains.

    Raises:
        TypeError: the model or the optimizer is none.
        ValueError: an argument has a wrong value.

    Source: Jiang et al., "TTrace: Lightweight Error Checking and Diagnosis for Distributed Training", arXiv 2506.09280.
    """
    models, optimizers = _several(model, nn.Module, "model"), _several(optimizer, Optimizer, "optimizer")
    if steps < 1:
        raise ValueError(f"steps must be 1 or more, got {steps}")
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if perturb is not None and size > 1:
        raise ValueError(f"perturb= needs a run of one process, got {size} ranks; noise would part their replicas")
    recorder = _Recorder(models, optimizers, mapping_of(mapping), steps, perturb)
    clear_traces(Path(directory), rank, size)
    with ExitStack() as hooks:
        recorder.attach(hooks)
        yield
        recorder.keep_updates()
    header = recorder.header() | {"rank": rank, "world_size": size}
    write_trace(Path(directory), header, recorder.tensors, recorder.records)


def _several(given: Any, kind: type, name: str) -> list[Any]:
    found = [given] if isinstance(given, kind) else list(given) if isinstance(given, Sequence) else []
    if not found or not all(isinstance(one, kind) for one in found):
        raise TypeError(f"{name} must be a {kind.__module__}.{kind.__qualname__}, or a list of them; got {given!r}")
    return found


class _Recorder:
    """The hooks of one rank, and what they have recorded."""

    def __init__(
        self,
        models: list[nn.Module],
        optimizers: list[Optimizer],
        mapping: Mapping,
        steps: int,
        perturb: int | None,
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.records: list[Record] = []
        self._models = [one.module if isinstance(one, DistributedDataParallel) else one for one in models]
        self._optimizers = optimizers
        self._mapping = mapping
        self._axes = coordinates_of(mapping)
        self._steps = steps
        self._noise = None if perturb is None else Noise(perturb)
        self._modules, self._parameters = logical_names(self._models, mapping.rename)
        self._step = 0
        self._before: dict[str, tuple[int, Tensor]] = {}  # parameters before the optimizer changes them, and the step
        self._ignores = [False] * len(self._models)  # a call that finds out shapes
        self._inside = [False] * len(self._models)  # a call of the model that counts
        self._start_of_step()

    def _start_of_step(self) -> None:
        self._done: set[int] = set()  # the optimizers that have made their step
        self._now: list[Record] = []
        self._micro_batch = [-1] * len(self._models)
        self._calls: Counter[tuple[str, int]] = Counter()
        self._outputs: dict[int, tuple[weakref.ref[Tensor], int, str, str]] = {}
        self._unhooked: dict[str, list[Call]] = {}  # outputs that were computed without gradients

    def header(self) -> dict[str, Any]:
        return {
            "axes": {axis: list(at) for axis, at in self._axes.items()},
            "steps": min(self._step, self._steps),
            "perturbed": self._noise is not None,
            "parameters": [name for name, one in self._parameters.items() if one.requires_grad],
            "modules": {name: type(module).__name__ for name, (_, module) in self._modules.items()},
        }

    def attach(self, hooks: ExitStack) -> None:
        """Add the hooks; ``hooks`` removes them."""
        for name, parameter in self._parameters.items():
            self._keep("start", name, parameter, _copy(local_part(parameter)))
        for i, root in enumerate(self._models):
            hooks.callback(root.register_forward_pre_hook(partial(self._begin, i), with_kwargs=True).remove)
        for name, (i, module) in self._modules.items():
            hooks.callback(module.register_forward_hook(partial(self._forward, name, i), with_kwargs=True).remove)
        for i, root in enumerate(self._models):
            hooks.callback(root.register_forward_hook(partial(self._end, i)).remove)
        for optimizer in self._optimizers:
            hooks.callback(optimizer.register_step_pre_hook(self._before_step).remove)
            hooks.callback(optimizer.register_step_post_hook(self._after_step).remove)

    def keep_updates(self) -> None:
        """Keep the changes that the last step made, as the next one finds them.

        So a change that is lost or overwritten after the step of the optimizer is not recorded as made.
        """
        for name, (step, before) in list(self._before.items()):
            if step < self._step:
                old = _wide(before)
                size = (float(old.square().mean().sqrt()), float(old.abs().max())) if old.numel() else (0.0, 0.0)
                update = _wide(_copy(local_part(self._parameters[name]))) - old
                self._keep("update", name, self._parameters[name], update, step=step, around=size)
                del self._before[name]

    def _begin(self, i: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a micro-batch: a call of a model of this rank."""
        self._ignores[i] = infers_shapes() or _is_abstract((args, kwargs))
        if self._ignores[i] or not torch.is_grad_enabled() or in_backward():
            return
        self.keep_updates()
        if self._step >= self._steps:
            return
        self._micro_batch[i] += 1
        self._inside[i] = True
        if i or self._axes.get("pp", (0, 1))[0] or (self._mapping.rename and "pp" not in self._axes):
            return  # what a later stage is given is no input of the model
        for index, leaf in enumerate(one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)):
            self._hold("input", ("input", self._micro_batch[i], 0, index), leaf)

    def _end(self, i: int, *_: Any) -> None:
        self._inside[i] = self._ignores[i] = False

    def _forward(self, name: str, i: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if self._step >= self._steps or self._ignores[i] or _is_abstract(output):
            return None
        if in_backward():
            self._follow_again(name, output)
            return None
        if not (torch.is_grad_enabled() or self._inside[i]):
            return None  # an evaluation
        leaves, form = tree_flatten(output)
        is_noisy = self._noise is not None and not any(True for _ in module.children())
        if is_noisy:
            leaves = [self._noisy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        sources = {self._source(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)} - {""}
        micro_batch = max(self._micro_batch[i], 0)
        call = self._calls[name, micro_batch]
        self._calls[name, micro_batch] += 1
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                here = (name, micro_batch, call, index)
                self._hold("forward", here, leaf, tuple(sorted(sources)))
                if leaf.requires_grad:
                    leaf.register_hook(self._backward(here))  # type: ignore[no-untyped-call]
                elif not torch.is_grad_enabled():
                    self._unhooked.setdefault(name, []).append(here)
        return tree_unflatten(leaves, form) if is_noisy else None

    def _noisy(self, leaf: Tensor) -> Tensor:
        assert self._noise is not None
        moved = self._noise.added(leaf)
        if moved.requires_grad and moved is not leaf:
            moved.register_hook(self._noise.added)  # type: ignore[no-untyped-call]
        return moved

    def _follow_again(self, name: str, output: Any) -> None:
        """Follow the gradients of outputs that a backward pass computes again, as activation checkpointing does."""
        waiting = self._unhooked.get(name, [])
        for leaf in (one for one in tree_leaves(output) if isinstance(one, Tensor) and one.requires_grad):
            if waiting and leaf.is_floating_point():
                leaf.register_hook(self._backward(waiting.pop(0)))  # type: ignore[no-untyped-call]

    def _backward(self, here: Call) -> Callable[[Tensor], None]:
        step = self._step

        def hook(gradient: Tensor) -> None:
            if self._step == step:
                self._hold("backward", here, gradient)

        return hook

    def _source(self, tensor: Tensor) -> str:
        found = self._outputs.get(id(tensor))
        return found[2] if found is not None and found[0]() is tensor else ""

    def _hold(self, kind: str, here: Call, tensor: Tensor, sources: tuple[str, ...] = ()) -> None:
        """Keep an output, its gradient or an input."""
        name, micro_batch, call, index = here
        key = f"{self._step}/{kind}/{name}/{micro_batch}.{call}.{index}"
        is_output = kind == "forward"
        if is_output:
            found = self._outputs.get(id(tensor))
            is_same = found is not None and found[0]() is tensor and found[1] == in_place_version(tensor)
            key = found[3] if found is not None and is_same else key  # a module inside has returned this very tensor
            self._outputs[id(tensor)] = weakref.ref(tensor), in_place_version(tensor), name, key
        value = self.tensors.get(key)
        self._keep(kind, name, tensor, value, key=key, here=here, sources=sources)

    def _keep(
        self,
        kind: str,
        name: str,
        tensor: Tensor,
        value: Tensor | None = None,
        *,
        key: str = "",
        here: Call = ("", 0, 0, 0),
        sources: tuple[str, ...] = (),
        around: tuple[float, float] | None = None,
        step: int | None = None,
    ) -> None:
        """Keep ``value``, or a copy of this rank's part of ``tensor``, at the place of ``tensor``."""
        _, micro_batch, call, index = here
        step = self._step if step is None else step
        key = key or f"{step}/{kind}/{name}"
        of_samples = kind in {"input", "forward", "backward"}
        placed = place(
            self._mapping,
            self._axes,
            name,
            tensor,
            is_output=of_samples,
            is_gradient=kind == "backward",
            step=step,
            micro_batch=micro_batch,
        )
        if placed is None:
            return
        self.tensors[key] = _copy(placed.local) if value is None else value
        record = Record(
            kind=kind,
            name=name,
            step=step,
            key=key,
            order=len(self.records if kind == "update" else self._now),
            micro_batch=micro_batch,
            call=call,
            index=index,
            splits=placed.splits,
            mesh=placed.mesh,
            coordinates=placed.coordinates | ({MICRO_BATCH: micro_batch} if of_samples else {}),
            divide=placed.divide,
            sources=sources,
            around=around,
        )
        (self.records if kind == "update" else self._now).append(record)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.keep_updates()
        if self._step >= self._steps:
            return
        trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for name, parameter in self._parameters.items():
            if not parameter.requires_grad:
                continue
            gradient = parameter.grad
            if id(parameter) in trained and gradient is None:
                self._now.append(Record("gradient", name, self._step, None, len(self._now)))
            elif id(parameter) in trained and gradient is not None:
                self._keep("gradient", name, gradient)
            if name not in self._before:  # of all parameters: another rank may train this one and send it
                self._before[name] = self._step, _copy(local_part(parameter))

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._step >= self._steps:
            return
        self._done.add(id(optimizer))
        if len(self._done) < len(self._optimizers):
            return
        micro_batches = max(self._micro_batch) + 1
        for record in self._now:
            of_samples = record.kind in {"input", "forward", "backward"}
            self.records.append(finished(self._mapping, record, max(micro_batches, 1)) if of_samples else record)
        self._step += 1
        self._start_of_step()


def _is_abstract(values: Any) -> bool:
    """Return whether values have a shape and no data, as where a pipeline finds out the shapes of its stages."""
    tensors = [one for one in tree_leaves(values) if isinstance(one, Tensor)]
    return any(one.is_meta or type(one).__name__ == "FakeTensor" for one in tensors)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _copy(tensor: Tensor) -> Tensor:
    """Return a dense copy on the CPU that shares no storage."""
    held = tensor.detach()
    held = held if held.layout == torch.strided else held.to_dense()
    return held.to("cpu", copy=True).contiguous()
