"""torch's own frameworks on simulated ranks: no alarm under any semantics, numbers as in a single process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.worlds import get_world

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch deprecates or tells about the CPU is its own affair

WORLD_SIZE = 4
STEPS = 3


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2 * WORLD_SIZE, 4, generator=generator, dtype=torch.float64)


def shard(step: int) -> torch.Tensor:
    return batch(step).chunk(WORLD_SIZE)[dist.get_rank()]


def make_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(model, optimizer, data=shard):
    for step in range(STEPS):
        optimizer.zero_grad()
        model(data(step)).square().mean().backward()
        optimizer.step()


def single_process() -> list[torch.Tensor]:
    model = make_model()
    train(model, make_sgd(model.parameters()), batch)
    return [parameter.detach() for parameter in model.parameters()]


def plain(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def full(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


# -- data parallel --------------------------------------------------------------------------------


def ddp(**options):
    model = make_model()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.0003, **options)
    train(wrapped, make_sgd(model.parameters()))
    return plain(model)


def ddp_with_hook(hook):
    model = make_model()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.0003)
    wrapped.register_comm_hook(None, hook)
    train(wrapped, make_sgd(model.parameters()))
    return plain(model)


def hook_of_the_users(state, bucket):
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def torchs_hook(state, bucket):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return allreduce_hook(state, bucket)


def ddp_with_accumulation():
    model = make_model()
    wrapped, optimizer = DistributedDataParallel(model), make_sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        first, second = shard(step).chunk(2)
        with wrapped.no_sync():
            (wrapped(first).square().mean() / 2).backward()
        (wrapped(second).square().mean() / 2).backward()
        optimizer.step()
    return plain(model)


def ddp_join():
    model = make_model()
    wrapped = DistributedDataParallel(model)
    with wrapped.join():
        train(wrapped, make_sgd(model.parameters()))
    return plain(model)


def zero_redundancy(**options):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, **options)
    train(wrapped, optimizer)
    return plain(model)


def post_local_sgd():
    """Averages at every step from the first on, so it is synchronous SGD."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hooks
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = make_model()
    wrapped = DistributedDataParallel(model)
    state = hooks.PostLocalSGDState(process_group=None, subgroup=dist.group.WORLD, start_localSGD_iter=100)
    wrapped.register_comm_hook(state, hooks.post_localSGD_hook)
    averager = PeriodicModelAverager(period=1, warmup_steps=0)
    train(wrapped, PostLocalSGDOptimizer(make_sgd(model.parameters()), averager))
    return plain(model)


def functional_collectives():
    """Gradients summed by functional collectives, which wait when their result is used."""
    import torch.distributed._functional_collectives as funcol

    model = make_model()
    optimizer = make_sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        model(shard(step)).square().mean().backward()
        sums = [funcol.all_reduce(p.grad, "avg", dist.group.WORLD) for p in model.parameters()]
        for parameter, total in zip(model.parameters(), sums, strict=True):
            parameter.grad.copy_(total)
        optimizer.step()
    return plain(model)


# -- sharded --------------------------------------------------------------------------------------


def mesh(*shape: int):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def fsdp2(*shape: int, reshard_after_forward=True):
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    where = mesh(*shape)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=where, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=where, reshard_after_forward=reshard_after_forward)
    train(model, make_sgd(model.parameters()))
    return full(model)


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    model = FullyShardedDataParallel(
        make_model(), device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.FULL_SHARD
    )
    train(model, make_sgd(model.parameters()))
    with FullyShardedDataParallel.summon_full_params(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


def tensor_parallel():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(make_model(), mesh(WORLD_SIZE), plan)
    train(model, make_sgd(model.parameters()), batch)
    return [p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def distributed_checkpoint(path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(make_model(), mesh=mesh(WORLD_SIZE))
    train(model, make_sgd(model.parameters()))
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    torch.manual_seed(1)
    again = fully_shard(nn.Sequential(*[nn.Linear(i, o) if i else nn.Tanh() for i, o in SHAPES]).double(), mesh=mesh(4))
    state = {"model": again.state_dict()}
    dcp.load(state, checkpoint_id=path)
    again.load_state_dict(state["model"])
    return full(again)


SHAPES = [(4, 8), (0, 0), (8, 8), (0, 0), (8, 4)]


# -- pipelines ------------------------------------------------------------------------------------


def pipeline(schedule_name):
    """Layers of the model over the ranks; the loss of a batch is the mean over micro-batches."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    kind = get_schedule_class(schedule_name)
    stages_of_rank = 1 if schedule_name in ("GPipe", "1F1B") else 2
    count = WORLD_SIZE * stages_of_rank
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4).double() for _ in range(count)]
    places = [rank + WORLD_SIZE * i for i in range(stages_of_rank)]
    if schedule_name == "ZBVZeroBubble":
        places = [rank, count - 1 - rank]
    stages = [PipelineStage(layers[place], place, count, torch.device("cpu")) for place in places]
    schedule = kind(stages if stages_of_rank > 1 else stages[0], 8, loss_fn=nn.functional.mse_loss)
    x = batch(0)
    schedule.step(*([x] if 0 in places else []), **({"target": torch.zeros_like(x)} if count - 1 in places else {}))
    mine = {place: [layers[place].weight.grad, layers[place].bias.grad] for place in places}
    gathered = [None] * WORLD_SIZE
    dist.all_gather_object(gathered, mine)
    merged = {place: gradients for part in gathered for place, gradients in part.items()}
    return [gradient for place in range(count) for gradient in merged[place]]


def pipeline_in_one_process(count):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4).double() for _ in range(count)])
    x = batch(0)
    nn.functional.mse_loss(model(x), torch.zeros_like(x)).backward()
    return [parameter.grad for parameter in model.parameters()]


FRAMEWORKS = {
    "ddp": ddp,
    "ddp-bucket-views": partial(ddp, gradient_as_bucket_view=True),
    "ddp-static-graph": partial(ddp, static_graph=True),
    "ddp-find-unused": partial(ddp, find_unused_parameters=True),
    "ddp-hook-of-the-users": partial(ddp_with_hook, hook_of_the_users),
    "ddp-hook-of-torch": partial(ddp_with_hook, torchs_hook),
    "ddp-no-sync": ddp_with_accumulation,
    "ddp-join": ddp_join,
    "zero": zero_redundancy,
    "zero-bucket-views": partial(zero_redundancy, parameters_as_bucket_view=True),
    "post-local-sgd": post_local_sgd,
    "functional-collectives": functional_collectives,
    "fsdp1": fsdp1,
    "fsdp2": partial(fsdp2, WORLD_SIZE),
    "fsdp2-kept": partial(fsdp2, WORLD_SIZE, reshard_after_forward=False),
    "hsdp": partial(fsdp2, 2, 2),
    "tensor-parallel": tensor_parallel,
}
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"]
PROFILES = ["rendezvous", "gloo", "nccl", "buffered"]


def assert_equal_on_all_ranks(results, expected):
    for rank in results:
        for found, wanted in zip(rank, expected, strict=True):
            # float64 sums of a few terms in another order
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS)
def test_training_ends_as_in_a_single_process(framework, profile):
    results = get_world("sim", seed=1, semantics=profile).run(framework, world_size=WORLD_SIZE)
    assert_equal_on_all_ranks(results, single_process())


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipelines_have_the_gradients_of_a_single_process(schedule, profile):
    results = get_world("sim", seed=1, semantics=profile).run(pipeline, schedule, world_size=WORLD_SIZE)
    assert_equal_on_all_ranks(results, pipeline_in_one_process(len(results[0]) // 2))


@pytest.mark.parametrize("profile", PROFILES)
def test_a_checkpoint_comes_back_whole(profile, tmp_path):
    world = get_world("sim", semantics=profile)
    results = world.run(distributed_checkpoint, str(tmp_path / "checkpoint"), world_size=WORLD_SIZE)
    assert_equal_on_all_ranks(results, single_process())
