"""Programs of two ranks that use CUDA, each for one feature; they assert the behaviour of a machine with two GPUs."""

from __future__ import annotations

import copy
import io
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pdlcheck.errors import Unsupported
from pdlcheck.worlds.cuda_as_cpu.replaced import NAMES_REFUSED, replaced_names

from .cuda_device_programs import (
    memory_statistics,
    questions,
    random_streams,
    streams_and_events,
    the_accelerator,
)
from .cuda_parallel_programs import (
    a_pipeline,
    ddp_with_device_ids,
    fsdp2_on_a_mesh_of_cuda,
    fsdp_with_device_id,
    fsdp_with_its_scaler,
    groups_of_nccl,
    groups_of_two_backends,
    on,
    tensor_parallel_on_a_mesh_of_cuda,
)

__all__ = ["LOUD", "QUIET", "REFUSED"]


def the_current_device():
    rank = dist.get_rank()
    assert torch.cuda.current_device() == 0
    torch.cuda.set_device(rank)
    assert torch.cuda.current_device() == rank
    with torch.cuda.device(1 - rank):
        assert torch.cuda.current_device() == 1 - rank
    torch.cuda.set_device(f"cuda:{1 - rank}")
    dist.barrier()  # another simulated rank runs meanwhile
    assert torch.cuda.current_device() == 1 - rank


def device_arguments():
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    for made in (
        torch.zeros(2, device="cuda"),
        torch.empty(2, device=on(rank)),
        torch.tensor([1, 2], device=f"cuda:{rank}"),
        torch.randint(5, (2,), device=rank),
        torch.ones(2).new_zeros(2, device="cuda"),
        torch.zeros_like(torch.ones(2), device="cuda"),
        torch.as_tensor([1.0], device="cuda"),
        nn.Linear(2, 2, device="cuda").weight,
    ):
        assert made.is_cuda
        assert not made.is_cpu
        assert made.device == on(rank)
        assert made.get_device() == rank


def tensors_that_are_moved():
    rank = dist.get_rank()
    host = torch.ones(2)
    several = [host.cuda(), host.cuda(0), host.to("cuda"), host.to(0), host.to(device=on(0))]
    for moved in (*several, host.to("cuda:0", torch.float64)):
        assert moved.device == on(0)
    assert host.to(rank).device == on(rank)
    there = host.cuda(rank, non_blocking=True)
    assert there.to(rank) is there
    assert there.cuda(rank) is there
    assert there.to(torch.float32) is there
    assert there.to(host).device.type == "cpu"
    assert host.to(there).device == on(rank)
    assert (there + 1).device == (there @ there).device == there[0].device == there.view(2, 1).device == on(rank)
    assert [host.device.type, there.cpu().device.type, there.to("cpu").device.type] == ["cpu"] * 3
    assert there.double().type() == "torch.cuda.DoubleTensor"
    assert host.type() == "torch.FloatTensor"
    assert torch.stack([there, there]).is_cuda
    assert all(part.is_cuda for part in there.split(1))


def a_copy_on_the_host_is_a_copy():
    weights = torch.zeros(3, device="cuda")
    kept = {"cpu": weights.cpu(), "to": weights.to("cpu"), "again": weights.cpu().cpu()}
    weights += 1
    assert all(not copy.any() for copy in kept.values())
    host = torch.zeros(3)
    there = host.cuda()
    there += 1
    assert not host.any()
    aliases = torch.as_tensor(host, device="cpu")
    aliases += 1
    assert host.all()
    assert torch.as_tensor(there, device="cuda") is there


def the_gradients_are_where_the_parameters_are():
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    seen = []

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch.ones(3, device="cuda"))
            return grad * seen[-1].cuda()

    weight = nn.Parameter(torch.ones(3, device=rank))
    weight.register_hook(lambda grad: grad + torch.zeros(3, device="cuda"))
    Scale.apply(weight).sum().backward()
    assert weight.grad.device == on(rank)
    assert weight.grad.tolist() == [1.0] * 3
    assert seen[0].is_cuda
    (grad,) = torch.autograd.grad(Scale.apply(weight).sum(), [weight])
    assert grad.is_cuda
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].is_cuda


def a_module_that_is_moved():
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    weight = model[0].weight
    for moved in (model.to(rank), model.cuda(rank), model.to(f"cuda:{rank}"), model.to(device=on(rank))):
        assert moved is model
        assert model[0].weight is weight
        assert {value.device for value in model.state_dict().values()} == {on(rank)}
    assert model.cpu()[0].weight.device.type == "cpu"
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    assert empty.to_empty(device=rank).weight.device == on(rank)


def results_that_stay_on_the_device():
    rank = dist.get_rank()
    x = torch.ones(3, 2, device=rank)
    model = nn.Linear(2, 2).to(rank)
    lstm, layer = nn.LSTM(2, 2).to(rank), nn.TransformerEncoderLayer(2, 1, 4, batch_first=True).to(rank)
    made = [
        copy.deepcopy(model).weight,
        copy.deepcopy(x),
        nn.utils.parameters_to_vector(model.parameters()),
        torch.func.vmap(lambda row: row * 2)(x),
        torch.func.grad(lambda weight: (weight * x).sum())(x),
        torch.func.functional_call(model, dict(model.named_parameters()), (x,)),
        lstm(x[None])[0],
        layer(x[None]),
        nn.utils.rnn.pack_padded_sequence(x[None], torch.tensor([3]), batch_first=True).data,
        x.type("torch.cuda.HalfTensor"),
        x.sum(0, keepdim=True).expand(4, 2),
    ]
    assert [tensor.device for tensor in made] == [on(rank)] * len(made)
    numbers = x.cpu().numpy()
    x += 1
    assert numbers.max() == 1
    torch.testing.assert_close(x, torch.full((3, 2), 2.0, device=rank))


def the_default_device():
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(2).is_cuda
        assert nn.Linear(2, 2).weight.is_cuda
        assert torch.get_default_device() == on(0)
        assert not torch.zeros(2, device="cpu").is_cuda
    finally:
        torch.set_default_device(None)
    with torch.device("cuda", 1):
        assert torch.arange(3).device == on(1)
        dist.barrier()
        assert torch.arange(3).device == on(1)
    assert not torch.zeros(2).is_cuda


def files_of_tensors():
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    file = io.BytesIO()
    torch.save({"weight": torch.ones(2, device="cuda")}, file)
    places = {
        "cpu": "cpu",
        f"cuda:{rank}": "cuda",
        "cuda": "cuda",
        on(rank): "cuda",
    }
    for place, expected in places.items():
        file.seek(0)
        assert torch.load(file, map_location=place)["weight"].device.type == expected
    for mapped in ({"cpu": f"cuda:{rank}"}, lambda storage, location: storage.cuda(rank)):
        file.seek(0)
        assert torch.load(file, map_location=mapped)["weight"].device == on(rank)
    model = nn.Linear(2, 2).cuda()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file, map_location=f"cuda:{rank}", weights_only=True))
    assert model.weight.device == on(rank)


def files_that_a_gpu_has_written():
    torch.cuda.set_device(dist.get_rank())
    file = io.BytesIO()
    torch.save(torch.ones(2), file, _use_new_zipfile_serialization=False)
    from_gpu = file.getvalue().replace(b"\x03\x00\x00\x00cpu", b"\x06\x00\x00\x00cuda:1")
    assert torch.load(io.BytesIO(from_gpu)).device == on(1)
    assert torch.load(io.BytesIO(from_gpu), map_location="cpu").device.type == "cpu"


def batches_in_pinned_memory():
    data = TensorDataset(torch.arange(8.0))
    loader = DataLoader(data, batch_size=2, pin_memory=True, sampler=DistributedSampler(data, shuffle=False))
    moved = [batch.to(dist.get_rank(), non_blocking=True) for (batch,) in loader]
    assert [batch.device for batch in moved] == [on(dist.get_rank())] * 2
    host = torch.ones(2)
    pinned = host.pin_memory()
    assert pinned.is_pinned()
    assert not host.is_pinned()
    assert pinned.pin_memory() is pinned
    assert torch.empty(2, pin_memory=True).is_pinned()
    assert not pinned.cuda().is_pinned()


def autocast():
    model, x = nn.Linear(4, 4).cuda(), torch.ones(2, 4, device="cuda")
    for block, dtype in (
        (torch.autocast("cuda"), torch.float16),
        (torch.autocast("cuda", dtype=torch.bfloat16), torch.bfloat16),
        (torch.amp.autocast(device_type="cuda", dtype=torch.float16), torch.float16),
        (torch.autocast(x.device.type, torch.bfloat16), torch.bfloat16),
    ):
        with block:
            dist.barrier()
            assert model(x).dtype == dtype
            assert torch.is_autocast_enabled("cuda")
            assert torch.is_autocast_enabled()
            assert torch.get_autocast_dtype("cuda") == dtype
    assert model(x).dtype == torch.float32
    assert not torch.is_autocast_enabled("cuda")
    with torch.autocast("cuda", enabled=False):
        assert model(x).dtype == torch.float32
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    assert model(x).dtype == torch.bfloat16
    torch.set_autocast_enabled(False)
    assert model(x).dtype == torch.float32


def autocast_of_a_function_of_ones_own():
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)
        def forward(ctx, x):
            assert not torch.is_autocast_enabled("cuda")
            return x @ x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, grad):
            return grad

    x = torch.ones(2, 2, device="cuda", requires_grad=True)
    with torch.autocast("cuda"):
        product = Product.apply(x)
    assert product.dtype == torch.float16
    product.sum().backward()
    assert x.grad.is_cuda


def checkpointed_activations():
    from torch.utils.checkpoint import checkpoint

    torch.cuda.set_device(dist.get_rank())

    def layer(x):
        noise = torch.nn.functional.dropout(torch.ones(4, device="cuda"))
        seen.append(noise.cpu())
        return (model(x) * noise.cuda()).sum()

    for reentrant in (False, True):
        seen = []
        model, x = nn.Linear(4, 4).cuda(), torch.ones(1, 4, device="cuda", requires_grad=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = checkpoint(layer, x, use_reentrant=reentrant)
        loss.backward()
        assert torch.equal(*seen)
        assert model.weight.grad.is_cuda
        assert x.grad.is_cuda


def scaled_gradients():
    for make in (
        torch.amp.GradScaler,
        lambda kind: torch.amp.GradScaler(),
        lambda kind: torch.amp.GradScaler(device=kind),
    ):
        scaler = make("cuda")
        model = nn.Linear(2, 1).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = model.weight.tolist()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.ones(4, 2, device="cuda")).float().mean() / 4
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        assert model.weight.grad.tolist() == [[0.25, 0.25]]
        scaler.step(optimizer)
        scaler.update()
        assert scaler.is_enabled()
        assert scaler.get_scale() == 2.0**16
        assert model.weight.tolist() != before


def a_thread_of_a_rank():
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    made = []
    thread = threading.Thread(target=lambda: made.append(torch.ones(2).cuda()))
    thread.start()
    thread.join()
    assert made[0].device == on(rank)


def names_that_were_imported():
    from torch.cuda import current_device, is_available, set_device

    set_device(1)
    assert is_available()
    assert current_device() == torch.cuda.current_device() == 1


def an_index_that_no_device_has():
    third = dist.get_world_size()
    for use in (
        lambda: torch.zeros(1).to(third),
        lambda: torch.cuda.set_device(third),
        lambda: dist.barrier(device_ids=[third]),
        lambda: DistributedDataParallel(nn.Linear(2, 1), device_ids=[third]),
    ):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            use()


def a_compiled_function():
    @torch.compile
    def double(x):
        return x * 2

    x = double(torch.ones(2, device="cuda"))
    assert x.is_cuda
    assert x.tolist() == [2.0, 2.0]


def flags_of_libraries():
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.deterministic = False
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = torch.backends.cuda.matmul.allow_tf32 = False


def a_capability_of_the_accelerator():
    torch.accelerator.get_device_capability()


def a_graph():
    torch.cuda.CUDAGraph()


def a_block_of_a_graph():
    torch.cuda.graph(None)


def a_synchronised_batch_norm():
    nn.SyncBatchNorm(2).cuda()(torch.ones(2, 2, device="cuda"))


def a_reading_of_the_gpu():
    torch.cuda.utilization()


def every_name_that_is_refused():
    refused = [entry for entry in replaced_names(processes=False) if entry.name in NAMES_REFUSED]
    assert refused
    for entry in refused:
        with pytest.raises(Unsupported, match=rf"^torch\.cuda\.{entry.name} has no counterpart"):
            getattr(torch.cuda, entry.name)()


# programs on which torch without CUDA raises
LOUD = (
    a_pipeline,
    autocast_of_a_function_of_ones_own,
    checkpointed_activations,
    a_module_that_is_moved,
    a_thread_of_a_rank,
    batches_in_pinned_memory,
    ddp_with_device_ids,
    device_arguments,
    files_of_tensors,
    files_that_a_gpu_has_written,
    fsdp2_on_a_mesh_of_cuda,
    fsdp_with_its_scaler,
    fsdp_with_device_id,
    groups_of_nccl,
    groups_of_two_backends,
    memory_statistics,
    random_streams,
    results_that_stay_on_the_device,
    streams_and_events,
    tensor_parallel_on_a_mesh_of_cuda,
    tensors_that_are_moved,
    the_current_device,
    the_default_device,
    the_gradients_are_where_the_parameters_are,
)
# programs on which it does not raise, but behaves differently from CUDA
QUIET = (
    a_compiled_function,
    a_copy_on_the_host_is_a_copy,
    an_index_that_no_device_has,
    autocast,
    every_name_that_is_refused,
    flags_of_libraries,
    names_that_were_imported,
    questions,
    scaled_gradients,
    the_accelerator,
)
REFUSED = (
    a_block_of_a_graph,
    a_capability_of_the_accelerator,
    a_graph,
    a_reading_of_the_gpu,
    a_synchronised_batch_norm,
)
