"""Gradient clipping by the norm of all gradients in the group, including sharded ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdlcheck.primitives.arguments import Members, members
from pdlcheck.primitives.flat import LOW_PRECISION
from pdlcheck.primitives.precision.rows import Rows, gather_rows, raise_everywhere

__all__ = ["clip_grad_norm"]

FLOAT32_MAX = torch.finfo(torch.float32).max
WIDE = (torch.float64, torch.complex128)
# Norms of equal gradients differ only by the order of addition, by about 1e-6 in float32.
SAME_NORM = 1e-4


def clip_grad_norm(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    sharded: bool | Iterable[Tensor] = False,
    copies: Iterable[Tensor] = (),
    error_if_nonfinite: bool = False,
    agree: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale all gradients of all ranks by one factor, so that their total norm is at most ``max_norm``.

    Call it on every rank, after the gradients are synchronised and unscaled. The factor equals that of
    ``torch.nn.utils.clip_grad_norm_`` in one process that holds every gradient once: ``max_norm / (norm + 1e-6)``, at
    most 1. Norms of float16 and bfloat16 gradients are computed in float32. A norm whose squares overflow float32 is
    computed again in float64, so it is infinite only if a gradient is.

    The cost is one all_gather of 48 bytes from each rank; on a GPU the host waits for the norm. Gradients that need no
    clipping are not modified.

    Args:
        parameters: a module, a tensor or tensors. A parameter whose gradient is None has norm 0. A parameter that is
            listed twice (tied weights) counts once.
        max_norm: above 0; ``math.inf`` only measures.
        norm_type: above 0, ``math.inf`` for the largest element; the same on every rank, like ``max_norm``.
        sharded: False if every rank holds the same, synchronised gradients. True if each rank holds different elements
            (pipeline stages, ZeRO); a rank may have none. Or a list of the sharded ``parameters``; the others are then
            the same on every rank. DTensors (FSDP2, tensor parallel) count as the same on every rank, because each rank
            gets their whole norm.
        copies: sharded parameters that another rank counts, such as the second copy of an embedding that the first and
            the last stage share. They are scaled, not counted.
        error_if_nonfinite: raise, on every rank, if the norm is infinite or NaN.
        agree: False sends nothing, like torch's own function. It is allowed only if nothing is sharded. Gradients that
            were not synchronised, or arguments that differ between ranks, are then not detected.
        group: the ranks over which parameters are sharded; ``None`` is the default group.

    Returns:
        The norm before clipping: float64, without dimensions, on the device of the gradients, equal bit for bit on
        every rank.

    Raises:
        TypeError: something other than tensors is to be clipped.
        ValueError: ``max_norm`` or ``norm_type`` is not above 0, or differs between ranks; no rank has a parameter; a
            gradient is sparse; a sharded parameter is a DTensor; ``sharded`` or ``copies`` names a tensor that is not
            clipped; gradients that should be the same on every rank have different norms; ``agree=False`` is given with
            ``sharded``. If one rank raises, every rank does.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.

    Example:
        >>> def clip():
        ...     stage = nn.Linear(1, 1, bias=False)
        ...     stage.weight.grad = torch.tensor([[3.0 + dist.get_rank()]])    # 3 here, 4 there
        ...     norm = clip_grad_norm(stage, 1.0, sharded=True)
        ...     return norm.item(), round(stage.weight.grad.item(), 4)
        >>> world.run(clip, world_size=2)
        [(5.0, 0.6), (5.0, 0.8)]

    Source: R. Pascanu, T. Mikolov, Y. Bengio, "On the difficulty of training recurrent neural networks", ICML (2013).
    """
    who = members("clip_grad_norm", group)
    if not agree and sharded is not False:
        raise ValueError("clip_grad_norm needs the norms of all ranks where gradients are sharded; leave agree=True")
    problem: Exception | None = None
    found = Found([], [], 0.0, 0.0)
    try:
        found = _look(parameters, max_norm, norm_type, sharded, copies, who.ranks)
    except (TypeError, ValueError) as error:
        problem = error
    if problem is not None and not agree:
        raise problem
    flag = float(problem is not None)
    agreed = [0.0, 0.0] if flag else [float(max_norm), float(norm_type)]
    row = [flag, *agreed, len(found.parameters), found.own, found.common]
    rows = gather_rows(row, who) if agree else [row] * who.world_size
    raise_everywhere("clip_grad_norm", problem, rows, who)
    _require_agreement(rows, who)
    total = _combined([*(row[4] for row in rows), rows[0][5]], norm_type)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"clip_grad_norm found a norm of {total} over all ranks and error_if_nonfinite is set; norms: "
            + ", ".join(f"rank {rank}: {row[4] or row[5]:g}" for rank, row in zip(who.ranks, rows, strict=True))
        )
    norm = torch.tensor(total, dtype=torch.float64, device=found.grads[0].device if found.grads else None)
    if found.grads and max_norm != math.inf and not max_norm / (total + 1e-6) >= 1:  # true for NaN too
        wide = total > FLOAT32_MAX or any(grad.dtype in WIDE for grad in found.grads)
        for parameters_ in _apart(found.parameters):
            nn.utils.clip_grads_with_norm_(parameters_, max_norm, norm if wide else norm.float())  # twice as fast
    return norm


@dataclass(frozen=True)
class Found:
    """The parameters of this rank, each once, their non-empty gradients, and two norms.

    Args:
        parameters: each parameter once.
        grads: the gradients that are not empty.
        own: the norm of the sharded gradients that this rank counts.
        common: the norm of the gradients that are the same on every rank.
    """

    parameters: list[Tensor]
    grads: list[Tensor]
    own: float
    common: float


def _look(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float,
    sharded: bool | Iterable[Tensor],
    copies: Iterable[Tensor],
    ranks: Sequence[int],
) -> Found:
    for argument, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not value > 0:  # true for NaN too
            raise ValueError(f"clip_grad_norm needs {argument} above 0, got {argument}={value}")
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    listed = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    once: dict[int, Tensor] = {}
    filled: list[tuple[int, Tensor]] = []
    for p in listed:
        if id(p) in once:
            continue
        if not isinstance(p, Tensor):
            raise TypeError(f"clip_grad_norm takes a module or tensors, got {type(p).__name__}")
        once[id(p)] = p
        grad = p.grad
        if grad is None:
            continue
        if grad.layout != torch.strided:
            raise ValueError(
                f"clip_grad_norm needs dense gradients, that of parameter {len(once) - 1} has layout {grad.layout}; "
                "build the embedding with sparse=False"
            )
        if grad.numel():
            filled.append((id(p), grad))
    own = set(once) if sharded is True else set() if sharded is False else {id(p) for p in sharded}
    uncounted = {id(p) for p in copies}
    if not own <= set(once):
        raise ValueError("clip_grad_norm got a tensor in sharded that is not among its parameters; pass it in both")
    if not uncounted <= own:
        raise ValueError("clip_grad_norm got a tensor in copies that is not sharded; what is not counts once anyway")
    for key, grad in filled:
        mesh = getattr(grad, "device_mesh", None)
        if key in own and mesh is not None and len(set(mesh.mesh.flatten().tolist()).intersection(ranks)) > 1:
            raise ValueError(
                "clip_grad_norm got a DTensor as sharded, whose norm is that of all its shards already and would count "
                "once for each rank; leave sharded=False, or name those that are not DTensors"
            )
    return Found(
        list(once.values()),
        [grad for _, grad in filled],
        _norm([grad for key, grad in filled if key in own - uncounted], norm_type),
        _norm([grad for key, grad in filled if key not in own], norm_type),
    )


def _norm(grads: Sequence[Tensor], norm_type: float) -> float:
    """Return the norm of all elements of non-empty tensors, in float32 or the wider dtype of the gradients."""
    low = [grad for grad in grads if grad.dtype in LOW_PRECISION]
    wide = [grad for grad in grads if grad.dtype not in LOW_PRECISION]
    norms = [torch.linalg.vector_norm(grad, norm_type, dtype=torch.float32) for grad in low]
    norms += [nn.utils.get_total_norm(some, norm_type) for some in _apart(wide)]
    total = _combined([float(norm) for norm in norms], norm_type)
    if not math.isfinite(total):
        again = [g.to(torch.complex128 if g.is_complex() else torch.float64) for g in grads]
        total = _combined([float(torch.linalg.vector_norm(grad, norm_type)) for grad in again], norm_type)
    return total


def _apart(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return DTensors and other tensors in separate lists: torch cannot scale or measure both in one call."""
    sharded = [tensor for tensor in tensors if hasattr(tensor, "to_local")]
    return [some for some in (sharded, [t for t in tensors if not hasattr(t, "to_local")]) if some]


def _combined(norms: Sequence[float], norm_type: float) -> float:
    """Return the norm of parts with the given norms. The largest one is factored out, so that no power overflows.

    With the infinite norm, parts below the largest become 0, and the root of the number of largest parts is 1.
    """
    largest = max(norms, default=0.0)
    if any(math.isnan(norm) for norm in norms):
        return math.nan
    if largest in (0.0, math.inf):
        return largest
    return float(largest * math.fsum((norm / largest) ** norm_type for norm in norms) ** (1 / norm_type))


def _require_agreement(rows: Rows, who: Members) -> None:
    """Raise ValueError if the ranks differ. Every rank decides on the same rows, so all ranks raise or none does."""
    for column, argument in ((1, "max_norm"), (2, "norm_type")):
        if len({row[column] for row in rows}) > 1:
            raise ValueError(f"clip_grad_norm got another {argument} on every rank: {_listed(rows, column, who)}")
    if not any(row[3] for row in rows):
        raise ValueError(
            "clip_grad_norm got no parameter on any rank; "
            "pass a module, or a list of parameters (a generator is used up by its first reader)"
        )
    norms = [row[5] for row in rows]
    low, high = min(norms), max(norms)
    alike = all(math.isnan(n) for n in norms) or low == high or high - low <= SAME_NORM * high < math.inf
    if not alike:
        raise ValueError(
            f"clip_grad_norm got gradients that should be the same on every rank, their norms are "
            f"{_listed(rows, 5, who)}; synchronise them first, "
            "or pass sharded=True where each rank holds gradients of its own"
        )


def _listed(rows: Rows, column: int, who: Members) -> str:
    return ", ".join(f"rank {rank}: {row[column]:g}" for rank, row in zip(who.ranks, rows, strict=True))
