"""Traces of wrappers and plans: DDP, FSDP2, tensor parallelism, pipelines, accumulation and recomputation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import pdlcheck
from pdlcheck.tracing import Mapping, Positions, compare_traces
from pdlcheck.tracing.report import as_json, as_text
from pdlcheck.worlds import get_world

STEPS = 2


class Network(nn.Module):
    """Two layers, a table that has no samples, and a loss of the mean."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(3, 4)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
        self.head = nn.Linear(5, 2)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table(torch.arange(3)).sum(0)
        recomputes = self.recompute is not None and torch.is_grad_enabled()
        return self.head(checkpoint(self.layers, x, use_reentrant=self.recompute) if recomputes else self.layers(x))


def batch(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, mine=slice(None), parts: int = 1, scale: float = 1
) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.no_grad():
            model(batch(9))  # an evaluation, which no trace has
        for part in batch(step)[mine].chunk(parts):
            (model(part).square().mean() * scale / parts).backward()
        optimizer.step()


@pytest.fixture(scope="module")
def trusted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces") / "trusted"
    model = Network()
    optimizer = adam(model)
    with pdlcheck.trace(model, optimizer, folder, steps=STEPS):
        train(model, optimizer)
    return folder


def compared(trusted: Path, folder: Path, program, *arguments, world_size: int = 2):
    get_world("sim").run(program, folder, *arguments, world_size=world_size)
    return compare_traces(trusted, folder)


def ranks_rows(ranks: int = 2) -> slice:
    return slice(dist.get_rank() * 8 // ranks, (dist.get_rank() + 1) * 8 // ranks)


def of_ddp(folder: Path, mine: str = "block", scale: float = 1, parts: int = 1) -> None:
    rank = dist.get_rank()
    model = DistributedDataParallel(Network())
    optimizer = adam(model)
    samples = None if mine == "block" else lambda step, micro_batch: range(rank, 8, 2)
    with pdlcheck.trace(model, optimizer, folder, steps=STEPS, mapping=Mapping(samples=samples)):
        train(model, optimizer, ranks_rows() if mine == "block" else slice(rank, None, 2), parts, scale)


def test_plain_ddp_needs_no_mapping(trusted, tmp_path):
    found = compared(trusted, tmp_path, of_ddp)
    assert found.first is None, as_text(found)
    assert found.steps == STEPS
    assert found.tensors > 60


def test_accumulated_micro_batches_are_put_together(trusted, tmp_path):
    found = compared(trusted, tmp_path, of_ddp, "block", 1, 2)
    assert found.first is None, as_text(found)


def test_samples_may_be_dealt_in_turn(trusted, tmp_path):
    found = compared(trusted, tmp_path, of_ddp, "in turn")
    assert found.first is None, as_text(found)


def test_a_wrong_loss_scale_is_the_first_gradient(trusted, tmp_path):
    first = compared(trusted, tmp_path, of_ddp, "block", 2).first
    assert (first.place.module, first.place.direction) == ("head", "backward")
    assert "2 times the trusted tensor" in first.cause


def other_samples(folder: Path) -> None:
    model = DistributedDataParallel(Network())
    optimizer = adam(model)
    with pdlcheck.trace(model, optimizer, folder, steps=STEPS):
        train(model, optimizer, slice(dist.get_rank(), None, 2))


def test_samples_in_another_order_are_no_fault_of_a_module(trusted, tmp_path):
    first = compared(trusted, tmp_path, other_samples).first
    assert first.place.direction == "input"
    assert "samples=" in first.cause


def other_start(folder: Path) -> None:
    model = Network()
    with torch.no_grad():
        model.head.weight[1, 2] += 0.5
    optimizer = adam(model)
    with pdlcheck.trace(model, optimizer, folder, mapping=Mapping(ranks={"tp": (dist.get_rank(), 2)})):
        train(model, optimizer)


def test_other_weights_are_named_before_the_first_step(trusted, tmp_path):
    first = compared(trusted, tmp_path, other_start).first
    assert (first.place.module, first.place.direction) == ("head", "before the first step")
    assert first.index == (1, 2)


def of_fsdp(folder: Path, fault: str = "") -> None:
    model = Network()
    fully_shard(model.layers)
    fully_shard(model)
    optimizer = adam(model)
    if fault:
        optimizer.param_groups[0]["betas"] = (0.9, 0.999)
        optimizer.param_groups[0]["lr"] = 0.1 if dist.get_rank() == 0 else 0.2
    with pdlcheck.trace(model, optimizer, folder, steps=STEPS):
        train(model, optimizer, ranks_rows())


def test_fsdp2_needs_no_mapping(trusted, tmp_path):
    found = compared(trusted, tmp_path, of_fsdp)
    assert found.first is None, as_text(found)


def test_a_learning_rate_of_one_shard_is_found(trusted, tmp_path):
    first = compared(trusted, tmp_path, of_fsdp, "rate").first
    assert (first.place.direction, first.ranks) == ("update", [1])
    assert "2 times the trusted tensor" in first.cause
    assert "learning rate" in first.cause


def of_tp(folder: Path, mapping_is_given: bool = True, fault: bool = False) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Network()
    parallelize_module(model.layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if fault and dist.get_rank() == 1:
        model.layers[1].register_forward_hook(lambda module, args, output: output * 1.5)
    optimizer = adam(model)
    rules = {"layers.0": Shard(-1), "layers.1": Shard(-1)}
    mapping = Mapping(rules, ranks=mesh) if mapping_is_given else None
    with pdlcheck.trace(model, optimizer, folder, steps=STEPS, mapping=mapping):
        train(model, optimizer)


def test_dtensors_of_tensor_parallelism_are_put_together(trusted, tmp_path):
    found = compared(trusted, tmp_path, of_tp)
    assert found.first is None, as_text(found)


def test_a_wrong_part_of_the_columns_is_found_on_its_rank(trusted, tmp_path):
    first = compared(trusted, tmp_path, of_tp, True, True).first
    assert (first.place.module, first.place.direction, first.ranks) == ("layers.1", "forward", [1])
    assert "3/2 times" in first.cause


def of_fsdp_and_tp(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Network()
    parallelize_module(model.layers, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = adam(model)
    rules = {"layers.0": Shard(-1), "layers.1": Shard(-1)}
    with pdlcheck.trace(model, optimizer, folder, steps=STEPS, mapping=Mapping(rules, ranks=mesh)):
        train(model, optimizer, slice(mesh.get_coordinate()[0] * 4, mesh.get_coordinate()[0] * 4 + 4))


def test_fsdp2_over_tensor_parallelism(trusted, tmp_path):
    found = compared(trusted, tmp_path, of_fsdp_and_tp, world_size=4)
    assert found.first is None, as_text(found)


class First(nn.Module):
    def __init__(self, whole: Network) -> None:
        super().__init__()
        self.table, self.layers = whole.table, whole.layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + self.table(torch.arange(3)).sum(0))


def of_pipeline(folder: Path, rate: float = 0.1) -> None:
    rank, whole = dist.get_rank(), Network()
    model = whole.head if rank else First(whole)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, _: y.square().mean())
    optimizer = adam(model)
    optimizer.param_groups[0]["lr"] = rate
    mapping = Mapping(ranks={"pp": (rank, 2)}, rename=lambda name: f"head.{name}" if rank else name)
    with pdlcheck.trace(model, optimizer, folder, steps=STEPS, mapping=mapping):
        for step in range(STEPS):
            optimizer.zero_grad()
            if rank:
                schedule.step(target=batch(step))
            else:
                schedule.step(batch(step))
            optimizer.step()


def test_a_pipeline_of_torch_scales_the_loss_of_a_micro_batch(trusted, tmp_path):
    found = compared(trusted, tmp_path, of_pipeline)
    assert found.first is None, as_text(found)
    assert any("gradients of outputs are 2 times" in note for note in found.notes)
    first = compared(trusted, tmp_path, of_pipeline, 0.2).first
    assert (first.place.module, first.place.direction, first.step) == ("table", "update", 1)


def of_recomputing(folder: Path, reentrant: bool) -> None:
    model = Network(recompute=reentrant)
    optimizer = adam(model)
    with pdlcheck.trace(model, optimizer, folder, steps=STEPS, mapping=Mapping(ranks={"tp": (dist.get_rank(), 1)})):
        train(model, optimizer)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_outputs_are_recorded_once(trusted, tmp_path, reentrant):
    found = compared(trusted, tmp_path, of_recomputing, reentrant, world_size=1)
    assert found.first is None, as_text(found)
    whole = compare_traces(trusted, trusted)
    assert found.tensors == whole.tensors


class Attention(nn.Module):
    """Positions of a sequence that a rank has, in two chunks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def of_context(folder: Path | None, world_size: int = 2) -> None:
    rank = dist.get_rank()
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = [rank, 3 - rank] if world_size == 2 else [0, 1, 2, 3]
    zigzag = Positions(1, own)
    mapping = Mapping(outputs={"cp": zigzag}, ranks={"cp": (rank, world_size)})
    with pdlcheck.trace(model, optimizer, folder, steps=1, mapping=mapping):
        model(torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(2))[:, own]).square().mean().backward()
        for one in model.parameters():
            dist.all_reduce(one.grad)
            one.grad /= world_size
        optimizer.step()


def test_positions_of_zigzag_context_parallelism(tmp_path):
    get_world("sim").run(of_context, tmp_path / "trusted", 1, world_size=1)
    found = compared(tmp_path / "trusted", tmp_path / "parallel", of_context)
    assert found.first is None, as_text(found)


def of_one_gradient_less(folder: Path) -> None:
    model = DistributedDataParallel(Network())
    optimizer = adam(model)
    if dist.get_rank() == 1:
        optimizer.register_step_pre_hook(lambda *_: setattr(model.module.head.bias, "grad", None))
    with pdlcheck.trace(model, optimizer, folder, steps=STEPS):
        train(model, optimizer, ranks_rows())


def test_a_gradient_that_one_rank_lacks_is_named(trusted, tmp_path):
    found = compared(trusted, tmp_path, of_one_gradient_less)
    first = found.first
    assert (first.place.module, first.place.direction, first.ranks) == ("head", "gradient to the optimizer", [1])
    assert "rank 1 had no gradient" in first.cause
    assert "  rank          1 wrong\n" in as_text(found)
    assert json.loads(as_json(found))["first"]["times"] is None


def test_several_models_of_a_rank_run_their_micro_batches_in_any_order(trusted, tmp_path):
    whole = Network()
    chunks = [First(whole), whole.head]
    optimizer = adam(nn.ModuleList(chunks))
    mapping = Mapping(ranks={"pp": (0, 1)}, rename=lambda name: f"head{name[1:]}" if name[0] == "1" else name[2:])
    with pdlcheck.trace(chunks, optimizer, tmp_path, steps=STEPS, mapping=mapping):
        for step in range(STEPS):
            optimizer.zero_grad()
            middle = [chunks[0](part) for part in batch(step).chunk(2)]
            for y in [chunks[1](one) for one in middle]:
                (y.square().mean() / 2).backward()
            optimizer.step()
    found = compare_traces(trusted, tmp_path)
    assert found.first is None, as_text(found)
    assert found.notes == ["not compared, as the parallel run has no such output: model"]


class Experts(nn.Module):
    """Two experts, each for every second sample; a rank of expert parallelism has one of them."""

    def __init__(self, own: range) -> None:
        super().__init__()
        torch.manual_seed(2)
        every = [nn.Linear(4, 4) for _ in range(2)]
        self.own, self.experts = own, nn.ModuleList(every[one] for one in own)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for number, expert in zip(self.own, self.experts, strict=True):
            total = total.index_add(0, torch.arange(number, len(x), 2), expert(x[number::2]))
        return self.out(Summed.apply(total))


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def of_experts(folder: Path, rate: float = 0.1) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    own = range(rank, rank + 1) if size > 1 else range(2)
    model = Experts(own)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if rank == 1:
        model.experts[0].weight.register_hook(lambda gradient: gradient * rate / 0.1)
    mapping = Mapping(
        {"experts.*": None},  # rows are routed
        ranks={"ep": (rank, size)},
        rename=lambda name: name.replace("experts.0", f"experts.{rank}"),
    )
    with pdlcheck.trace(model, optimizer, folder, steps=STEPS, mapping=mapping):
        train(model, optimizer)


def test_experts_have_their_numbers_in_the_whole_model(tmp_path):
    get_world("sim").run(of_experts, tmp_path / "trusted", world_size=1)
    found = compared(tmp_path / "trusted", tmp_path / "parallel", of_experts)
    assert found.first is None, as_text(found)
    first = compared(tmp_path / "trusted", tmp_path / "parallel", of_experts, 0.3).first
    assert (first.place.module, first.place.direction) == ("experts.1", "gradient to the optimizer")
    assert "3 times the trusted tensor" in first.cause
