"""PowerSGD: gradient matrices travel as two thin factors, in collectives with the same order on every rank."""

# No `from __future__ import annotations`: DDP compares the hooks' annotations with the types, not with their names.

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdlcheck.primitives.arguments import members, require_at_least
from pdlcheck.primitives.comm_hooks.bucket import Bucket
from pdlcheck.primitives.comm_hooks.residuals import Residuals
from pdlcheck.primitives.flat import sum_dtype

__all__ = ["PowerSGDState", "power_sgd"]


class PowerSGDState:
    """The state of :func:`power_sgd` between steps: this rank's residuals, and factors that are equal on every rank.

    Args:
        module: the module that DDP wraps; its parameters have residuals and factors by name.
        rank: rank of the approximation, at most the sides of a matrix; a higher rank is more exact and sends more.
        start_step: number of first steps that use the plain mean, because early gradients change fast.
        min_compression: a parameter is compressed if it shrinks by more than this factor; vectors never are.
        warm_start: begin each step with the factors of the previous step; otherwise with random ones.
        error_feedback: keep the error of the approximation and add it to the next gradient.
        seed: seed of the first factors; same on every rank.
        group: the process group of DDP; ``None`` is the default group.

    Raises:
        TypeError: ``module`` is not a module, or has complex parameters.
        ValueError: ``rank`` is below 1, ``start_step`` is below 0 or ``min_compression`` is not positive; no parameter
            requires a gradient.
    """

    same_on_every_rank = (
        "rank",
        "start_step",
        "min_compression",
        "warm_start",
        "error_feedback",
        "seed",
        "step",
    )

    def __init__(
        self,
        module: nn.Module,
        *,
        rank: int = 1,
        start_step: int = 10,
        min_compression: float = 2.0,
        warm_start: bool = True,
        error_feedback: bool = True,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        require_at_least("PowerSGDState", "rank", rank, 1)
        require_at_least("PowerSGDState", "start_step", start_step, 0)
        require_at_least("PowerSGDState", "seed", seed, 0)
        if not (math.isfinite(min_compression) and min_compression > 0):
            raise ValueError(f"PowerSGDState needs a min_compression above 0, got {min_compression}")
        self.residuals = Residuals("PowerSGDState", module)
        self.rank = rank
        self.start_step = start_step
        self.min_compression = min_compression
        self.warm_start = warm_start
        self.error_feedback = error_feedback
        self.seed = seed
        self.group = group
        self.step = 0
        self.factors: dict[str, Tensor] = {}  # Q of the last step, by name
        self.pending: list[_Bucket] = []  # the buckets of this step whose first phase is posted

    def compresses(self, parameter: Tensor) -> bool:
        """Return whether this parameter is sent as factors. The first dimension gives the rows of its matrix."""
        if parameter.dim() < 2 or not parameter.numel():
            return False
        rows, columns = _sides(parameter)
        return parameter.numel() > self.min_compression * (rows + columns) * min(self.rank, rows, columns)

    def scale_residuals(self, factor: float) -> None:
        """Multiply the residuals by ``factor``: the ratio of the scales when a loss scaler changes its scale."""
        self.residuals.scale(factor)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for this rank's checkpoint: plain values and tensors that ``weights_only=True`` can read."""
        who = members("PowerSGDState", self.group)
        return {
            "rank": who.rank,
            "world_size": who.world_size,
            "approximation": self.rank,
            "step": self.step,
            "residuals": self.residuals.state_dict(),
            "factors": {name: factor.clone() for name, factor in self.factors.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that this rank saved.

        Raises:
            ValueError: the state was saved on another rank or world size, with another ``rank``, or for another model.
        """
        self.residuals.require_place(state, self.group)
        if state["approximation"] != self.rank:
            raise ValueError(f"PowerSGDState of rank={self.rank} got a state of rank={state['approximation']}")
        for name in state["factors"]:
            if name not in self.residuals.parameters:
                raise ValueError(f"PowerSGDState got saved factors of {name!r}, the model has no such parameter")
        self.residuals.load_state_dict(state["residuals"])
        self.factors = {name: factor.detach().clone() for name, factor in state["factors"].items()}
        self.step = int(state["step"])

    def factor_of(self, parameter: Tensor) -> Tensor:
        """Return the factor Q of this step, of shape columns x rank."""
        name = self.residuals.name(parameter)
        if self.warm_start and name in self.factors:
            return self.factors[name].to(parameter.device)
        rows, columns = _sides(parameter)
        place = list(self.residuals.parameters).index(name)
        step = 0 if self.warm_start else self.step
        # The generator reads only 32 bits of its seed, so the seed is a hash of 4 bytes.
        seed = hashlib.blake2b(f"{self.seed} {step} {place}".encode(), digest_size=4).digest()
        draws = torch.Generator().manual_seed(int.from_bytes(seed))
        dtype = sum_dtype(parameter.dtype)
        drawn = torch.randn(columns, min(self.rank, rows, columns), generator=draws, dtype=torch.float64)
        return drawn.to(dtype).to(parameter.device)


@dataclass
class _Matrix:
    """One compressed parameter: its gradient plus the residual, and the factors computed so far."""

    parameter: Tensor
    grad: Tensor
    used: Tensor
    whole: Tensor
    factor: Tensor
    left: Tensor | None = None
    right: Tensor | None = None
    finite: Tensor | None = None


@dataclass
class _Bucket:
    """A bucket whose first phase is posted."""

    buffer: Tensor
    plain: list[Tensor]
    matrices: list[_Matrix]
    message: Tensor
    work: Any
    future: torch.futures.Future[Tensor]


def power_sgd(state: PowerSGDState, bucket: Bucket) -> torch.futures.Future[Tensor]:
    """Return the mean of the gradients, each matrix M approximated by ``P @ Q.T`` of the state's rank.

    With G the gradient plus the residual: P = mean of G Q over ranks, made orthonormal; then Q = mean of ``G.T @ P``.
    The residual of a rank is ``G - P @ P.T @ G``. For each rank, the sum of all sent values plus the residual equals
    the sum of all gradients, up to round-off. Vectors, and matrices that would not shrink, are averaged without
    compression. float16 and bfloat16 are computed in float32. The assignment of parameters to buckets does not change
    the result, up to round-off.

    **Order.** The first phase of a bucket is one all_reduce of its P and its uncompressed gradients. It starts when DDP
    passes the bucket, during backward. The second phase of all buckets is one all_reduce for each dtype, with the last
    bucket. DDP passes buckets in the same order on all ranks, and no operation is posted at the completion of another
    one. So the operations of all ranks always match. (torch's hook posts P and Q in callbacks: with two buckets it
    hangs on gloo.)

    A matrix whose gradient is zero on this rank contributes nothing and keeps its residual. The reason: if it is zero
    or None on every rank, DDP may drop the result. If P or Q has a NaN or inf, every rank gets NaN for the whole
    matrix, so that a loss scaler skips the step everywhere. The residual and the factors then stay as before the step.

    Args:
        state: made on every rank with the same arguments.
        bucket: the bucket that DDP passes to its hook.

    Returns:
        A future of the bucket's buffer, which then holds the mean. All futures of a step complete with the last bucket.

    Raises:
        TypeError: ``state`` is not a :class:`PowerSGDState`.
        ValueError: the bucket has a parameter that the state's module does not have.

    Example:
        >>> from torch import nn
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> def step():
        ...     ddp = DistributedDataParallel(nn.Linear(8, 8, bias=False))
        ...     ddp.register_comm_hook(PowerSGDState(ddp.module, start_step=0), power_sgd)
        ...     ddp(torch.full((1, 8), dist.get_rank() + 1.0)).sum().backward()
        ...     return ddp.module.weight.grad
        >>> first, other = world.run(step, world_size=2)
        >>> torch.equal(first, other), torch.allclose(first, torch.tensor(1.5))  # a gradient of rank 1
        (True, True)

    Source: T. Vogels, S. Karimireddy, M. Jaggi, "PowerSGD: practical low-rank gradient compression for distributed
    optimization", NeurIPS (2019). The hang: docs/findings/powersgd.md.
    """
    if not isinstance(state, PowerSGDState):
        raise TypeError(f"power_sgd takes a PowerSGDState as its state, got {type(state).__name__}")
    world_size = members("power_sgd", state.group).world_size
    if bucket.index() == 0:
        state.pending = []  # a failed backward pass may have left buckets
    compressing = state.step >= state.start_step
    begun = _first_phase(state, bucket, compressing)
    if not bucket.is_last():
        return begun.future
    state.step += 1
    _second_phase(state, world_size)
    return begun.future


def _first_phase(state: PowerSGDState, bucket: Bucket, compressing: bool) -> _Bucket:
    buffer = bucket.buffer()
    dtype = sum_dtype(buffer.dtype)
    plain, matrices = [], []
    for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if not compressing or not state.compresses(parameter):
            state.residuals.name(parameter)  # raises if the parameter is unknown
            plain.append(grad)
            continue
        sides = _sides(parameter)
        flat = grad.detach().reshape(sides).to(dtype)
        used = torch.linalg.vector_norm(flat) != 0  # true for NaN
        whole = flat + state.residuals.of(parameter).view(sides)
        matrices.append(_Matrix(parameter, grad, used, whole, state.factor_of(parameter)))
    parts = [*plain, *(torch.where(matrix.used, matrix.whole @ matrix.factor, 0) for matrix in matrices)]
    message = torch.cat([part.detach().reshape(-1).to(dtype) for part in parts])
    work = dist.all_reduce(message, group=state.group, async_op=True)
    devices: list[int | str | torch.device] = [buffer.device] if buffer.device.type == "cuda" else []
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    begun = _Bucket(buffer, plain, matrices, message, work, future)
    state.pending.append(begun)
    return begun


def _second_phase(state: PowerSGDState, world_size: int) -> None:
    """Wait for the first phases in order, send all Q, and write the result into every bucket."""
    buckets, state.pending = state.pending, []
    for begun in buckets:
        begun.work.wait()
        begun.message /= world_size
        sizes = [grad.numel() for grad in begun.plain]
        lefts = [matrix.whole.shape[0] * matrix.factor.shape[1] for matrix in begun.matrices]
        parts = iter(torch.split(begun.message, [*sizes, *lefts]))
        for grad in begun.plain:
            grad.copy_(next(parts).view(grad.shape))
        for matrix in begun.matrices:
            product = next(parts).view(-1, matrix.factor.shape[1])
            matrix.finite = torch.isfinite(product).all()
            matrix.left = torch.linalg.qr(torch.where(matrix.finite, product, 0)).Q
            matrix.right = torch.where(matrix.finite & matrix.used, matrix.whole.mH @ matrix.left, 0)
    matrices = [matrix for begun in buckets for matrix in begun.matrices]
    for dtype in dict.fromkeys((m.whole.dtype, m.whole.device) for m in matrices):
        chosen = [m for m in matrices if (m.whole.dtype, m.whole.device) == dtype]
        _mean_of_rights(state, chosen, world_size)
    for begun in buckets:
        begun.future.set_result(begun.buffer)


def _mean_of_rights(state: PowerSGDState, matrices: list[_Matrix], world_size: int) -> None:
    own = [matrix.right for matrix in matrices if matrix.right is not None]
    message = torch.cat([right.reshape(-1) for right in own])
    dist.all_reduce(message, group=state.group)
    message /= world_size
    means = torch.split(message, [right.numel() for right in own])
    for matrix, mine, flat in zip(matrices, own, means, strict=True):
        mean = flat.view(mine.shape)
        assert matrix.left is not None
        assert matrix.finite is not None
        finite = matrix.finite & torch.isfinite(mean).all()
        approximation = matrix.left @ torch.where(finite, mean, torch.nan).mH
        matrix.grad.copy_(approximation.view(matrix.grad.shape))
        if state.error_feedback:  # for an unused matrix `mine` is zero, so its residual does not change
            rest = torch.addmm(matrix.whole, matrix.left, mine.mH, alpha=-1).reshape(-1)
            state.residuals.keep(matrix.parameter, _chosen(finite, rest, state.residuals.of(matrix.parameter)))
        if state.warm_start:
            name = state.residuals.name(matrix.parameter)
            state.factors[name] = torch.where(finite & mean.any(), mean, matrix.factor)


def _chosen(condition: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Return ``torch.where`` of a single condition. On the CPU, read the condition instead of copying a tensor."""
    if condition.device.type == "cpu":
        return one if condition else other
    return torch.where(condition, one, other)


def _sides(parameter: Tensor) -> tuple[int, int]:
    """Return the rows and columns of a parameter as a matrix."""
    return parameter.shape[0], parameter.numel() // parameter.shape[0]
