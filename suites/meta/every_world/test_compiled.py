"""Programs that use ``torch.compile``: processes compile them, simulated ranks run them uncompiled."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._dynamo import eval_frame
from torch.nn.parallel import DistributedDataParallel as TorchsDDP

from pdlcheck.errors import CollectiveMismatch
from pdlcheck.primitives import DistributedDataParallel, Pipeline
from pdlcheck.worlds import get_world


@torch.compile(backend="eager")
def left_neighbours(x):
    """Use the rank in Python, which Dynamo treats as a constant."""
    rank = dist.get_rank()
    other = torch.empty(3)
    if rank == 0:
        dist.send(x * 2, 1)
        dist.recv(other, 1)
    else:
        dist.recv(other, 0)
        dist.send(x * 2, 0)
    return other + rank


@torch.compile(backend="eager")
def in_two_steps(x):
    y = x * 2
    work = dist.all_reduce(y, async_op=True)
    z = x + 1
    work.wait()
    return y + z


@torch.compile(backend="aot_eager", fullgraph=True)
def in_one_graph(x):
    return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (left_neighbours, [[2.0] * 3, [1.0] * 3]),
        (in_two_steps, [[3.0] * 3, [4.0] * 3]),
        (in_one_graph, [[3.0] * 3] * 2),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_compiled_function_communicates(program, expected, world):
    def body():
        return program(torch.full((3,), float(dist.get_rank()))).tolist()

    assert world.run(body, world_size=2) == expected
    assert world.run(body, world_size=2) == expected


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).tanh())


def plain(wrap, net, optimizer):
    wrapped = wrap(net)
    return lambda x: take_a_step(wrapped, optimizer, x)


def wrapped_then_compiled(wrap, net, optimizer):
    wrapped = torch.compile(wrap(net), backend="eager")
    return lambda x: take_a_step(wrapped, optimizer, x)


def compiled_then_wrapped(wrap, net, optimizer):
    wrapped = wrap(torch.compile(net, backend="eager"))
    return lambda x: take_a_step(wrapped, optimizer, x)


def whole_step(wrap, net, optimizer):
    wrapped = wrap(net)
    return torch.compile(lambda x: take_a_step(wrapped, optimizer, x), backend="eager")


def take_a_step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def trained(way, wrap):
    torch.manual_seed(0)
    net = Net()
    step = way(wrap, net, torch.optim.SGD(net.parameters(), 0.1))
    x = torch.arange(12.0).view(3, 4) / 12
    for k in range(3):
        step(x * (1 + k + dist.get_rank()))
    return [value.tolist() for value in net.state_dict().values()]


@pytest.mark.filterwarnings("ignore")  # dynamo imports and inspects names that torch warns about
@pytest.mark.parametrize("wrap", [TorchsDDP, DistributedDataParallel], ids=["torchs", "ours"])
@pytest.mark.parametrize("way", [wrapped_then_compiled, compiled_then_wrapped, whole_step])
def test_compiled_replicas_are_trained_as_others(way, wrap, world):
    expected = world.run(trained, plain, wrap, world_size=2)
    found = world.run(trained, way, wrap, world_size=2)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close([torch.tensor(x) for x in one], [torch.tensor(x) for x in other])


def graphs_of(wrap):
    """Return the number of graphs that Dynamo finds in a wrapped module."""
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    model = torch.compile(wrap(Net()), backend=backend)
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
    return len(graphs)


@pytest.mark.filterwarnings("ignore")
def test_a_wrapped_module_is_compiled_as_in_torchs():
    world = get_world("gloo")
    ours = world.run(graphs_of, DistributedDataParallel, world_size=2)
    assert ours == world.run(graphs_of, TorchsDDP, world_size=2)
    assert min(ours) > 0


def steps_of_a_pipeline(compiled):
    torch.manual_seed(0)
    pipeline = Pipeline(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), nn.MSELoss(), n_microbatches=2)
    step = torch.compile(pipeline.step, backend="eager") if compiled else pipeline.step
    loss = [step(torch.ones(4, 4), torch.zeros(4, 4)).loss for _ in range(2)][-1]
    return None if loss is None else float(loss)


def test_a_compiled_step_of_a_pipeline(world):
    assert world.run(steps_of_a_pipeline, True, world_size=2) == world.run(steps_of_a_pipeline, False, world_size=2)


@torch.compile(backend="aot_eager", fullgraph=True)
def of_another_shape(x):
    return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1


def test_a_collective_in_a_graph_is_told_at_the_user_s_function(world):
    with pytest.raises(CollectiveMismatch) as told:
        world.run(lambda: of_another_shape(torch.ones(3 + dist.get_rank())), world_size=2)
    assert len(re.findall(r"collective 0, at \S*test_compiled\.py:\d+$", str(told.value), re.MULTILINE)) == 2


def test_simulated_ranks_do_not_compile_and_the_controller_does():
    compiled = []

    def backend(module, inputs):
        compiled.append(module)
        return module.forward

    @torch.compile(backend=backend)
    def doubled(x):
        return x * 2

    def body():
        return torch.compile(lambda x: doubled(x) + 1, backend=backend)(torch.ones(2)).tolist()

    world = get_world("sim")
    assert world.run(body, world_size=2) == [[3.0, 3.0]] * 2
    assert not compiled
    assert doubled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert len(compiled) == 1
    assert world.run(body, world_size=2) == [[3.0, 3.0]] * 2
    assert len(compiled) == 1


@pytest.mark.skipif(not hasattr(eval_frame, "_is_in_optimized_module"), reason="this torch notes nothing")
def test_a_rank_that_gives_up_its_turn_in_a_compiled_module_leaves_no_mark():
    """The call of a compiled module is marked for the whole process, and hooks of all modules read the mark."""
    marks = []

    def calls_a_compiled_module():
        dist.barrier()
        marks.append(eval_frame._is_in_optimized_module())
        torch.compile(Communicates(), backend="eager")(torch.ones(2))
        marks.append(eval_frame._is_in_optimized_module())

    for seed in range(4):
        get_world("sim", seed=seed).run(calls_a_compiled_module, world_size=3)
    assert not any(marks)
    assert not eval_frame._is_in_optimized_module()


class Communicates(nn.Module):
    def forward(self, x):
        assert eval_frame._is_in_optimized_module()
        dist.barrier()
        assert eval_frame._is_in_optimized_module()
        return x
