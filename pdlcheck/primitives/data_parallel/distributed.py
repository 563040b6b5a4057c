"""A data parallel replica in each process, with the gradients of one process on all samples."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh

from pdlcheck.compat.torch.data_parallel import device_index, ignore_names, ignored_names, is_joining
from pdlcheck.compat.torch.pytree import tree_map
from pdlcheck.primitives.arguments import members
from pdlcheck.primitives.broadcasts import broadcast_tensors
from pdlcheck.primitives.data_parallel.agreement import require_alike
from pdlcheck.primitives.data_parallel.changes import Wrapped
from pdlcheck.primitives.data_parallel.hook_answers import Hook
from pdlcheck.primitives.data_parallel.joining import Replica, Shadow
from pdlcheck.primitives.data_parallel.logging_data import logging_data
from pdlcheck.primitives.data_parallel.options import (
    bucket_caps,
    group_of,
    takes_buffers,
    wrong_arguments,
    wrong_devices,
)
from pdlcheck.primitives.data_parallel.reducer import Reducer
from pdlcheck.primitives.data_parallel.sparse_bucket import sparse_embeddings
from pdlcheck.uncompiled import uncompiled_frame

__all__ = ["DistributedDataParallel"]

ME = "DistributedDataParallel"


class Owner:
    """An object that the wrapper and its graphs share; the hooks are removed when the last of them is gone."""


class DistributedDataParallel(nn.Module, Joinable):
    """A wrapper of ``module``: backward leaves the mean of the gradients over ranks, and replicas stay equal.

    It can replace ``torch.nn.parallel.DistributedDataParallel``: same arguments, ``module.`` prefix in the state_dict,
    ``no_sync()``, ``join()``, ``register_comm_hook``. At construction ranks compare their models and copy rank 0's
    parameters and buffers. Gradients are reduced in buckets during backward, in the order in which they became ready in
    the first backward pass on rank 0.

    Differences from torch's wrapper:

    * Every backward pass through an output is synchronised, including a second one in the same iteration. The exception
      is the output of a forward pass in ``no_sync()``, even if other passes ran in between.
    * A backward pass that reaches no output, such as that of a penalty alone, is synchronised if it is the first one
      after a forward pass. If it also leaves out the parameters that reveal it, the next forward pass raises.
    * A parameter without a gradient, or a module that was changed after wrapping, is an error. Every rank raises it at
      the end of that backward pass, with the parameter's name. torch's wrapper raises in the next forward pass, or
      never. The same holds for a buffer with another shape or dtype than at wrapping; torch accepts it if all ranks
      have it. On devices other than CPU, the host would have to wait for the answer. So there, after the first pass,
      only the ranks that detect the error themselves raise.
    * A value that is changed on one rank only, after wrapping, is not detected, as in torch: the replicas then differ.
    * A parameter without a gradient on any rank keeps None; with ``find_unused_parameters`` this needs no extra
      message.
    * ``torch.autograd.grad`` does not communicate.
    * Gradients of embeddings with ``sparse=True`` are sparse, as in torch. Only rows that a rank has looked up travel;
      a communication hook does not receive them. A table that is also the weight of a dense layer has a dense gradient
      where that layer is used.
    * It is not a subclass of torch's wrapper, and has no ``reducer``, ``logger``, ``scatter``, ``gather`` or
      ``to_kwargs``.
    * It cannot be pickled; save ``module`` or the ``state_dict()``.

    Args:
        module: same parameters and buffers (shape, dtype, strides, order) on every rank. Names in its attribute
            ``_ddp_params_and_buffers_to_ignore`` are ignored.
        device_ids: for a module on one GPU, a list with that GPU, to which inputs are moved; or None.
        output_device: accepted with ``device_ids``; outputs stay on the device where the module makes them.
        dim: kept as an attribute.
        broadcast_buffers: copy the buffers of rank 0 at construction and in some forward passes: the first one, and
            each that follows one whose backward pass is to be synchronised. So the forward passes of an evaluation,
            whose number may differ between ranks, copy them once. None is True, as in torch. ``forward_sync_buffers``,
            if given, decides about forward passes.
        init_sync: compare models and broadcast at construction; otherwise the caller must make the models equal.
        process_group: None is the default group. A ``device_mesh`` of one dimension may replace it.
        bucket_cap_mb: a bucket is closed when it holds this many MiB; None is 25.
        bucket_cap_mb_list: the same for the first bucket, the second, ...; the last entry holds for all that follow.
        first_bucket_mb: the same for the first bucket if there is no list, so that communication begins early.
        find_unused_parameters: parameters may stay without a gradient in a pass, different ones on each rank.
        gradient_as_bucket_view: gradients are views of the buckets, which saves their memory and a copy.
        static_graph: every pass is like the first one; parameters may be unused, or used several times by re-entrant
            checkpointing.
        check_reduction, skip_all_reduce_unused_params, batched_grad_copy, lazy_bucket_allocation: accepted without
            effect. Small gradients are always copied together, gradients that no rank has travel as zeros, and buckets
            are kept from pass to pass.
        delay_all_reduce_named_params, param_to_hook_all_reduce, mixed_precision: must be None.
        reduce_dtype: dtype in which float16 and bfloat16 gradients are divided and summed, such as torch.float32. None
            keeps their dtype, as in torch: bfloat16 gradients are then reduced in bfloat16, and each sum is rounded to
            8 bits.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: no parameter requires a gradient; a parameter is lazy, expanded or a DTensor; a sparse embedding on
            mpi or nccl, which cannot sum it; bucket sizes that are not positive; several devices, or a device for a
            module that is not on one GPU; an argument that must be None; a mesh of several dimensions, or a mesh
            together with a group; models or options that differ between ranks; in backward, communication hooks that
            differ. The same on every rank.
        RuntimeError: in backward, see above; a second communication hook; or a hook that does not return a future with
            as many numbers as its bucket has.

    Example:
        >>> def step():
        ...     torch.manual_seed(dist.get_rank())
        ...     ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        ...     ddp(torch.tensor([[dist.get_rank() + 1.0]])).sum().backward()
        ...     return ddp.module.weight.grad.item()
        >>> world.run(step, world_size=2)
        [1.5, 1.5]

    Source: S. Li et al., "PyTorch Distributed: experiences on accelerating data parallel training", VLDB 13 (2020).
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = True,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: None = None,
        param_to_hook_all_reduce: None = None,
        mixed_precision: None = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        first_bucket_mb: float = 1.0,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        broadcast_buffers = True if broadcast_buffers is None else broadcast_buffers
        if not isinstance(module, nn.Module):
            raise TypeError(f"{ME} takes a torch.nn.Module, got {type(module).__name__}")
        cap_mb = 25.0 if bucket_cap_mb is None else bucket_cap_mb
        caps_mb = None if bucket_cap_mb_list is None else list(bucket_cap_mb_list)
        who = members(ME, group_of(process_group, device_mesh))
        super().__init__()
        Joinable.__init__(self)
        self.module = module
        self.process_group = who.group
        self.dim = dim
        self.forward_sync_buffers = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.lazy_bucket_allocation = lazy_bucket_allocation
        self.mixed_precision = mixed_precision
        if device_mesh is not None:  # otherwise the attribute does not exist, as in torch
            self.device_mesh = device_mesh
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._options: dict[str, Any] = {
            "dim": dim,
            "broadcast_buffers": broadcast_buffers,
            "forward_sync_buffers": forward_sync_buffers,
            "bucket_cap_mb": cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "skip_all_reduce_unused_params": skip_all_reduce_unused_params,
            "bucket_cap_mb_list": caps_mb,
            "batched_grad_copy": batched_grad_copy,
            "lazy_bucket_allocation": lazy_bucket_allocation,
            "first_bucket_mb": first_bucket_mb,
            "reduce_dtype": reduce_dtype,
        }
        self.parameters_to_ignore = ignored_names(module)
        absent = {
            "delay_all_reduce_named_params": delay_all_reduce_named_params,
            "param_to_hook_all_reduce": param_to_hook_all_reduce,
            "mixed_precision": mixed_precision,
        }
        problem = wrong_devices(module, device_ids, output_device) or wrong_arguments(
            module, self.parameters_to_ignore, who, self._options, absent
        )
        if problem is not None and not init_sync:
            raise ValueError(f"{ME}: {problem}")
        held: dict[str, Tensor] = {}
        if problem is None:
            self._wrapped = Wrapped(module, self.parameters_to_ignore)
            held = {**self._wrapped.parameters, **self._wrapped.buffers()}
        if init_sync:
            require_alike(ME, held, self._options | {"sparse": [*sparse_embeddings(module)]}, problem, who)
            sent = held if takes_buffers(self._options) else self._wrapped.parameters
            broadcast_tensors(sent.values(), who.at(0), who.group)
        trained = {name: param for name, param in self._wrapped.parameters.items() if param.requires_grad}
        self.device = next(iter(trained.values())).device
        self.device_type = self.device.type
        self.is_multi_device_module = len({param.device for param in self._wrapped.parameters.values()}) > 1
        self.device_ids = [device_index(one, True) for one in device_ids] if device_ids else None
        self.output_device = None
        if self.device_ids is not None:
            self.output_device = device_index(self.device_ids[0] if output_device is None else output_device, True)
        caps = bucket_caps(first_bucket_mb, cap_mb, caps_mb)
        self.bucket_bytes_cap = max(caps)
        self.bucket_bytes_cap_list = caps if caps_mb else []
        self.bucket_bytes_cap_default = bucket_cap_mb is None and not caps_mb
        self._reducer = Reducer(
            trained,
            who,
            self._wrapped.first_change,
            bucket_caps=caps,
            reduce_dtype=reduce_dtype,
            sparse={id(param) for param in sparse_embeddings(module).values()},
            as_view=gradient_as_bucket_view,
            find_unused=find_unused_parameters,
            static_graph=static_graph,
        )
        self._replica = Replica(who, self._wrapped, self._reducer, self.device)
        self._owner = Owner()
        weakref.finalize(self._owner, self._reducer.close).atexit = False

    @uncompiled_frame
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module. A backward pass from its output is synchronised, except in ``no_sync()``."""
        reducer = self._reducer
        reducer.prepare()
        syncs = self.require_backward_grad_sync and torch.is_grad_enabled()
        change = self._wrapped.change() if syncs else None
        if is_joining(self):
            Join.notify_join_context(self)
            self._replica.tell(syncs=syncs, buffers=self.require_forward_param_sync)
        if self.forward_sync_buffers and self.require_forward_param_sync:
            change = self._replica.take_buffers() or change
            if change is not None and not syncs:
                raise RuntimeError(f"{ME}: {change}")
        self.require_forward_param_sync = syncs
        if self.device_ids is not None:
            inputs, kwargs = tree_map(self._moved, (inputs, kwargs))
        if syncs:
            reducer.problems = [] if change is None else [change]
        try:
            output = self.module(*inputs, **kwargs)
        except Exception:
            if change is not None:
                reducer.shadow()  # raises here, and in the backward passes of the other ranks
            raise
        if syncs:
            if not reducer.expect(output, self._owner) and change is not None:
                raise RuntimeError(f"{ME}: {change}")
        elif torch.is_grad_enabled():
            reducer.leave_alone(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add to the local gradients only, in backward passes of forward passes in this context.

        The next backward pass outside averages all that has been added.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Reduce each bucket by ``hook(state, bucket)``, which returns a future of the reduced buffer.

        The hook must divide by the number of ranks itself. Hooks of ``torch.distributed.algorithms.ddp_comm_hooks``
        work. The hook is called for the buckets one after the other, in the same order on every rank. Operations that
        it posts in callbacks of futures have no such order (see docs/findings/powersgd.md).

        The next backward pass begins with two messages by which ranks compare their hooks. Every rank raises if a rank
        has no hook, another one, or other settings. Hooks are compared by their names. States are compared by the
        attributes that they list in ``same_on_every_rank``, torch's states by their hyper-parameters. (If a rank
        without a hook has had backward passes before, it detects this on CPU only.)

        Args:
            state: passed to the hook.
            hook: a function of ``state`` and a bucket with the methods of ``torch.distributed.GradBucket``.
        """
        if not callable(hook):
            raise TypeError(f"{ME}.register_comm_hook takes a function, got {type(hook).__name__}")
        if self._reducer.hook is not None:
            raise RuntimeError(f"{ME} has a communication hook already; register one, before the first backward pass")
        self._reducer.hook = state, hook

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context in which ranks may have different numbers of inputs.

        A rank that leaves the context early takes part in the reductions of the others with zeros. In the context,
        forward passes copy the buffers of the last rank that still has inputs. At the end all ranks copy its model.

        Args:
            divide_by_initial_world_size: divide by the number of all ranks; otherwise by the number of ranks that still
                have inputs. A communication hook divides by itself, independent of this argument.
            enable: False makes an ordinary context, for inputs that are known to be even.
            throw_on_early_termination: raise on all ranks as soon as one has no inputs left.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for ``torch.distributed.algorithms.join.Join``."""
        self._replica.divides_by_all = bool(kwargs.get("divide_by_initial_world_size", True))
        return Shadow(self._replica, lambda: self.forward_sync_buffers)

    @property
    def broadcast_buffers(self) -> bool:
        """Return ``forward_sync_buffers``, under its second name."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """Return the current buffers that forward passes copy from rank 0, by name."""
        return self._wrapped.buffers()

    @property
    def modules_buffers(self) -> list[Tensor]:
        """Return the buffers of ``named_module_buffers`` without their names."""
        return list(self._wrapped.buffers().values())

    @property
    def join_device(self) -> torch.device:
        """Return the device for the messages of ``Join``."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """Return the process group for ``Join``."""
        return self.process_group

    # -- methods with the names of torch's wrapper, which torch documents or other libraries call ----

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        return logging_data(self, self._reducer)

    def _set_static_graph(self) -> None:
        if self._reducer.is_rebuilt and not self.static_graph:
            raise RuntimeError(f"{ME} has had a backward pass, now no graph becomes static; pass static_graph=True")
        self.static_graph = self._options["static_graph"] = self._reducer.static_graph = True

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, params_and_buffers_to_ignore: list[str]) -> None:
        ignore_names(module, params_and_buffers_to_ignore)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        """Return a new wrapper around a copy of the module. No communication.

        The copy has the same mode, the same module hooks and the attributes that the user has set.
        """
        if self._reducer.hook is not None:
            raise TypeError(f"{ME} with a communication hook has state that cannot be copied; copy its .module")
        copied = memo[id(self)] = type(self)(
            copy.deepcopy(self.module, memo),
            self.device_ids,
            self.output_device,
            init_sync=False,
            process_group=self.process_group,
            **self._options,
        )
        own = vars(copied)
        for name, value in vars(self).items():
            if name not in own or "_hooks" in name or name.startswith(("training", "require_")):
                own[name] = copy.deepcopy(value, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"{ME} holds a process group, which cannot be pickled; save .module or its state_dict()")

    def _moved(self, value: Any) -> Any:
        assert self.device_ids is not None
        device = torch.device(self.device_type, self.device_ids[0])
        return value.to(device) if isinstance(value, Tensor) else value
