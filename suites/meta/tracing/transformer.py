"""A small transformer on one process, and under tensor, sequence, pipeline and data parallelism by hand.

The parallel one is written as Megatron does it. The residual stream is divided by positions over the tensor parallel
ranks. A layer gathers it, computes its own heads or columns, and scatters the sum. ``fault`` plants one silent fault.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from pdlcheck.tracing import Mapping

WIDTH, HEADS, VOCABULARY, POSITIONS, SAMPLES = 16, 4, 32, 8, 8
RATE = 0.5


def tokens(step: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and labels of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    drawn = torch.randint(VOCABULARY, (SAMPLES, POSITIONS + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int, width: int) -> Tensor:
    """Return causal attention; ``width`` is the number of columns of one head."""
    q, k, v = (one.unflatten(-1, (heads, -1)).transpose(1, 2) for one in (q, k, v))
    scores = (q @ k.transpose(-1, -2) / math.sqrt(width)).masked_fill(
        torch.ones(q.shape[2], q.shape[2]).triu(1).bool(), float("-inf")
    )
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Layer(nn.Module):
    """A layer on one process."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.o(attention(self.q(y), self.k(y), self.v(y), HEADS, WIDTH // HEADS))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """The whole model on one process; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def whole(dtype: torch.dtype) -> Transformer:
    """Return the model with weights that no test changes."""
    torch.manual_seed(0)
    model = Transformer()
    with torch.no_grad():
        model.embedding.weight.mul_(0.5)
        for name, one in model.named_parameters():
            one.add_(0.1 * torch.randn_like(one) if name.endswith("bias") else 0.0)
    return model.to(dtype)


def train_whole(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Train the model on one process."""
    for step in range(steps):
        ids, labels = tokens(step)
        optimizer.zero_grad()
        F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()


class Plan:
    """The groups of a rank of 2 x 2 x 2 ranks, in the order pipeline, data, tensor; and the planted fault."""

    def __init__(self, fault: str) -> None:
        rank = dist.get_rank()
        self.fault = fault
        self.pp, self.dp, self.tp = rank // 4, rank // 2 % 2, rank % 2
        groups = {}
        for axis, stride in (("pp", 4), ("dp", 2), ("tp", 1)):
            for first in (one for one in range(8) if one // stride % 2 == 0):
                members = [first, first + stride]
                group = dist.new_group(members)
                if rank in members:
                    groups[axis] = group
        self.groups = groups
        self.peer = (rank + 4) % 8

    def ranks(self) -> dict[str, tuple[int, int]]:
        return {"pp": (self.pp, 2), "dp": (self.dp, 2), "tp": (self.tp, 2)}


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, 1)


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


class Gather(torch.autograd.Function):
    """All positions of the ranks; the backward pass scatters the sum."""

    @staticmethod
    def forward(ctx, x, plan, is_broken):
        ctx.plan, ctx.is_broken = plan, is_broken
        return _gathered(x, plan.groups["tp"])

    @staticmethod
    def backward(ctx, gradient):
        total = gradient if ctx.is_broken else _summed(gradient, ctx.plan.groups["tp"])
        return total.chunk(2, 1)[ctx.plan.tp].contiguous(), None, None


class Scatter(torch.autograd.Function):
    """The sum over the ranks, of this rank's positions; the backward pass gathers."""

    @staticmethod
    def forward(ctx, x, plan, axis):
        ctx.plan = plan
        return _summed(x, plan.groups[axis]).chunk(2, 1)[plan.tp].contiguous()

    @staticmethod
    def backward(ctx, gradient):
        return _gathered(gradient, ctx.plan.groups["tp"]), None, None


class AllPositions(torch.autograd.Function):
    """All positions, for a loss that every rank computes: the backward pass takes this rank's."""

    @staticmethod
    def forward(ctx, x, plan):
        ctx.plan = plan
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x.contiguous(), group=plan.groups["tp"])
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(2, -1)[ctx.plan.tp].contiguous(), None


class Embedding(nn.Module):
    """The rows of a part of the vocabulary; the sum over the ranks has all."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.weight = nn.Parameter(torch.empty(VOCABULARY // 2, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        first = self.plan.tp * (VOCABULARY // 2)
        last = first + VOCABULARY // 2 - (self.plan.fault == "embedding mask")
        mine = (ids >= first) & (ids < last)
        rows = F.embedding((ids - first).masked_fill(~mine, 0), self.weight) * mine.unsqueeze(-1)
        return Scatter.apply(rows, self.plan, "tp")


class Column(nn.Module):
    """A part of the columns of a linear layer."""

    def __init__(self, width: int, columns: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(columns // 2, width))
        self.bias = nn.Parameter(torch.empty(columns // 2)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Row(nn.Module):
    """A part of the rows of a linear layer; the sum over the ranks is its output."""

    def __init__(self, plan: Plan, width: int, columns: int, name: str) -> None:
        super().__init__()
        self.plan, self.name = plan, name
        self.weight = nn.Parameter(torch.empty(columns, width // 2))
        self.bias = nn.Parameter(torch.empty(columns))

    def forward(self, x: Tensor) -> Tensor:
        fault = self.plan.fault if self.name == "o" else ""
        y = F.linear(x, self.weight)
        if fault == "bias on each rank":
            return Scatter.apply(y + self.bias, self.plan, "tp")
        return Scatter.apply(y, self.plan, "dp" if fault == "sum over the wrong group" else "tp") + self.bias


class ParallelLayer(nn.Module):
    """A layer under tensor and sequence parallelism."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (Column(WIDTH, WIDTH) for _ in range(3))
        self.o = Row(plan, WIDTH, WIDTH, "o")
        self.up, self.down = Column(WIDTH, 4 * WIDTH), Row(plan, 4 * WIDTH, WIDTH, "down")

    def forward(self, x: Tensor) -> Tensor:
        y = Gather.apply(self.norm1(x), self.plan, False)
        width = WIDTH // HEADS // (2 if self.plan.fault == "scale of attention" else 1)
        x = x + self.o(attention(self.q(y), self.k(y), self.v(y), HEADS // 2, width))
        z = Gather.apply(self.norm2(x), self.plan, self.plan.fault == "no sum in backward")
        if self.plan.fault == "recomputed from another input":
            return x + self.down(Recomputed.apply(self.up(z)))
        return x + self.down(F.gelu(self.up(z)))


class Recomputed(torch.autograd.Function):
    """A gelu whose backward pass recomputes from a rounded input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().clamp(-0.2, 0.2).requires_grad_()
            return torch.autograd.grad(F.gelu(x), x, gradient)[0]


class Stage(nn.Module):
    """One of two stages: the embedding and a layer, or a layer and the head."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.layers = nn.ModuleList([ParallelLayer(plan)])
        if plan.pp == 0:
            self.embedding = Embedding(plan)
        else:
            self.norm = nn.LayerNorm(WIDTH)
            self.head = Column(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.plan.pp == 0:
            return self.layers[0](self.embedding(x))
        return self.head(Gather.apply(self.norm(self.layers[0](x)), self.plan, False))

    def rename(self, name: str) -> str:
        """Return the name in the whole model."""
        name = name.replace("layers.0", f"layers.{self.plan.pp}")
        return name.replace("head.weight", "embedding.weight")

    def load(self, model: Transformer) -> None:
        """Take this rank's part of the weights of the whole model."""
        state = model.state_dict()
        for name, one in self.named_parameters():
            full = state[self.rename(name)]
            for dim in range(full.dim()):
                if full.shape[dim] != one.shape[dim]:
                    full = full.chunk(2, dim)[self.plan.tp]
            one.data = full.clone()


def of_sequence(name: str) -> bool:
    """Return whether each tensor parallel rank has a term of the gradient: it has only its own positions."""
    return "norm" in name or name.endswith(("o.bias", "down.bias"))


def synchronise(stage: Stage, plan: Plan) -> None:
    """Complete the gradients over the tensor, pipeline and data parallel ranks."""
    for name, one in stage.named_parameters():
        assert one.grad is not None
        if of_sequence(name) and not (plan.fault == "norms not synchronised" and "norm2" in name):
            dist.all_reduce(one.grad, group=plan.groups["tp"])
        if name in {"embedding.weight", "head.weight"} and plan.fault != "embedding not tied":
            dist.all_reduce(one.grad, group=plan.groups["pp"])
        if not (plan.fault == "left out of data parallel" and name == "layers.0.k.weight"):
            dist.all_reduce(one.grad, group=plan.groups["dp"])
            if plan.fault != "sum over data parallel":
                one.grad /= 2


def mapping_of(plan: Plan, stage: Stage) -> Mapping:
    """Return where the tensors of a rank belong."""
    columns = {f"layers.*.{name}": Shard(-1) for name in ("q", "k", "v", "up")} | {"head": Shard(-1)}
    of_columns = {f"{name}.*": Shard(0) for name in columns} | {"embedding.weight": Shard(0)}
    rows = {"layers.*.o.weight": Shard(1), "layers.*.down.weight": Shard(1)}
    positions = {"embedding": Shard(1), "layers.*": Shard(1), "layers.*.*": Shard(1), "norm": Shard(1)}
    return Mapping(columns | of_columns | rows | positions, ranks=plan.ranks(), rename=stage.rename)


def train_parallel(stage: Stage, plan: Plan, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Train a stage: all micro-batches forward, then all backward."""
    for step in range(steps):
        ids, labels = (one.chunk(2)[plan.dp].chunk(2) for one in tokens(step))
        optimizer.zero_grad()
        runs = list(_forward(stage, plan, ids, labels))
        order = (1, 0) if plan.fault == "gradients of micro-batches exchanged" and plan.pp == 0 else (0, 1)
        for micro_batch in order:
            _backward(*runs[micro_batch], plan)
        synchronise(stage, plan)
        before = stage.layers[0].up.weight.detach().clone()
        if plan.fault == "learning rate of a stage" and plan.pp == 1:
            optimizer.param_groups[0]["lr"] = RATE / 2
        optimizer.step()
        if plan.fault == "update lost" and plan.tp == 1:
            with torch.no_grad():
                stage.layers[0].up.weight.copy_(before)


def _forward(stage: Stage, plan: Plan, ids: tuple[Tensor, ...], labels: tuple[Tensor, ...]) -> Iterator:
    shape = (len(ids[0]), POSITIONS // 2, WIDTH)
    for micro_batch in range(2):
        if plan.pp == 0:
            y = stage(ids[micro_batch])
            dist.send(y.detach(), plan.peer)
            yield None, y
        else:
            x = torch.empty(shape, dtype=stage.norm.weight.dtype)
            dist.recv(x, plan.peer)
            x.requires_grad_()
            logits = AllPositions.apply(stage(x), plan)
            loss = F.cross_entropy(logits.flatten(0, 1), labels[micro_batch].flatten())
            yield x, loss if plan.fault == "loss not divided" else loss / 2


def _backward(x: Tensor | None, y: Tensor, plan: Plan) -> None:
    if plan.pp == 1:
        assert x is not None
        y.backward()
        dist.send(x.grad, plan.peer)
    else:
        gradient = torch.empty_like(y)
        dist.recv(gradient, plan.peer)
        y.backward(gradient)
