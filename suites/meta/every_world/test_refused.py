"""Operations that gloo refuses are refused on every world by the calling rank, with the reason and the cure."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.errors import CollectiveMismatch
from pdlcheck.worlds import get_world

from ..needs_mpi import needs_mpi

pytestmark = pytest.mark.filterwarnings("ignore")  # torch renames functions from release to release


def _all_to_all_in_place():
    x = torch.ones(4)
    dist.all_to_all_single(x, x)


CALLS = {
    "all_to_all would write what comes from rank ": _all_to_all_in_place,
    "broadcast got src -1: src is a rank from 0 to 1, group_src a place in the group from 0 to 1": (
        lambda: dist.broadcast(torch.ones(1), -1)
    ),
    "reduce got dst 2: dst is a rank from 0 to 1": lambda: dist.reduce(torch.ones(1), group_dst=2),
    "send got dst -1": lambda: dist.send(torch.ones(1), -1),
    "recv got src -1": lambda: dist.recv(torch.ones(1), -1),
    "recv got tag -1: a tag is a number from 0 to 2147483647": lambda: dist.recv(torch.ones(1), tag=-1),
    "send: input tensor has to be contiguous, got shape (3,), strides (2,); call .contiguous() first": (
        lambda: dist.send(torch.ones(3, 2)[:, 0], 1 - dist.get_rank())
    ),
    "recv: input tensor has to be contiguous, got shape (3,), strides (2,); receive a contiguous one": (
        lambda: dist.recv(torch.ones(3, 2)[:, 0], 1 - dist.get_rank())
    ),
    "all_to_all_single: Tensors must be contiguous, got an input of shape (2, 2), strides (1, 2); call .contiguous()": (
        lambda: dist.all_to_all_single(torch.ones(2, 2), torch.ones(2, 2).t())
    ),
    "a leaf Variable that requires grad is being used in an in-place operation: all_gather would write to it; call it "
    "under torch.no_grad(), or give it .detach()": (
        lambda: dist.all_gather([nn.Parameter(torch.zeros(1)) for _ in range(2)], torch.ones(1))
    ),
    "a view of a leaf Variable that requires grad": (
        lambda: dist.reduce_scatter_tensor(nn.Parameter(torch.zeros(2))[:1], torch.ones(2))
    ),
    "all_to_all_single without split sizes deals a tensor out evenly: 3 elements, shape (3,)": (
        lambda: dist.all_to_all_single(torch.zeros(3), torch.ones(3))
    ),
    "all_gather needs tensors of one shape, got an input of (2,) and outputs of (2,), (3,); pad tensors whose sizes "
    "differ between ranks, and cut them after it": (
        lambda: dist.all_gather([torch.zeros(2), torch.zeros(3)], torch.ones(2))
    ),
    "reduce_scatter needs tensors of one shape, got an input of (3,) and an output of (2,)": (
        lambda: dist.reduce_scatter(torch.zeros(2), [torch.ones(3), torch.ones(3)])
    ),
    "all_gather_into_tensor on 2 ranks needs an output of 2 times as many elements, got an input of (2,) and an output "
    "of (3,)": lambda: dist.all_gather_into_tensor(torch.zeros(3), torch.ones(2)),
    "reduce_scatter_tensor on 2 ranks needs an input of 2 times as many elements, got an input of (3,) and an output "
    "of (2,)": lambda: dist.reduce_scatter_tensor(torch.zeros(2), torch.ones(3)),
    "ReduceOp.AVG needs a floating-point tensor, got torch.int64; use SUM": (
        lambda: dist.all_reduce(torch.ones(2).long(), dist.ReduceOp.AVG)
    ),
    "split sizes are a list of integers, not a tensor; call .tolist()": (
        lambda: dist.all_to_all_single(torch.zeros(2), torch.ones(2), torch.tensor([1, 1]), torch.tensor([1, 1]))
    ),
    "allreduce(): incompatible function arguments: it takes (tensors, opts) or (tensors, op, timeout) or (tensor, op, "
    "timeout), got (Tensor, root=int)": lambda: dist.group.WORLD.allreduce(torch.ones(1), root=1),
}


@pytest.fixture(scope="module", params=["sim", "gloo", pytest.param("mpi", marks=needs_mpi)])
def world_of_two(request):
    world = get_world(request.param)
    yield world
    world.close()


def _told(calls):
    told = []
    for call in calls:
        try:
            call()
        except (RuntimeError, TypeError, ValueError) as error:
            told.append(str(error))
    dist.barrier()
    return told


def test_each_rank_is_told_when_it_calls(world_of_two):
    for told in world_of_two.run(_told, list(CALLS.values()), world_size=2):
        for words, said in zip(CALLS, told, strict=True):
            assert said.startswith(words)


def test_all_to_all_is_told_of_memory_that_it_reads_and_writes(world_of_two):
    def program():
        x, y = torch.arange(4.0) + 10 * dist.get_rank(), torch.arange(6.0)
        told = _told([lambda: dist.all_to_all_single(x, x), lambda: dist.all_to_all_single(y[:4], y[2:])])
        dist.all_to_all_single(y[:2], y[2:4])
        dist.all_to_all_single(y[4:], y[2:4], [1, 1], [1, 1])
        return told, x.tolist(), y.tolist()

    cure = "give it an output of its own, such as torch.empty_like(input)"
    head = "all_to_all would write what comes from rank {} to memory from which it reads what goes to rank {}; " + cure
    first, second = world_of_two.run(program, world_size=2)
    assert first == ([head.format(1, 1), head.format(1, 0)], [0, 1, 2, 3], [2, 2, 2, 3, 2, 2])
    assert second == ([head.format(0, 0), head.format(1, 0)], [10, 11, 12, 13], [3, 3, 2, 3, 3, 3])


def test_scatter_is_told_of_an_output_that_goes_to_another_rank(world_of_two):
    def program(place):
        parts, root = [torch.full((2,), float(r)) for r in range(2)], dist.get_rank() == 1
        out = parts[place] if root else torch.zeros(2)
        dist.scatter(out, parts if root else None, 1)
        return out.tolist()

    assert world_of_two.run(program, 1, world_size=2) == [[0, 0], [1, 1]]
    with pytest.raises(RuntimeError, match=r"scatter would write what comes from rank 1 to memory from .* rank 0"):
        world_of_two.run(program, 0, world_size=2)


def test_what_stays_on_its_rank_may_stay_in_its_memory():
    def program():
        kept, sent, taken = torch.full((1,), 7.0), torch.full((1,), float(dist.get_rank())), torch.zeros(1)
        order = slice(None, None, -1 if dist.get_rank() else 1)
        dist.all_to_all([kept, taken][order], [kept, sent][order])
        return kept.item(), taken.item()

    assert get_world("sim").run(program, world_size=2) == [(7, 1), (7, 0)]


def _gathered(sizes):
    own = torch.ones(2 + dist.get_rank())
    dist.all_gather([torch.zeros(size) for size in sizes or [len(own)] * 2], own)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        pytest.param((2, 3), r"an input of \((2|3),\) and outputs of \(2,\), \(3,\); pad", id="room_for_each_size"),
        pytest.param((2, 2), r"an input of \(3,\) and outputs of \(2,\); pad", id="room_for_one_size"),
    ],
)
def test_a_rank_is_told_of_sizes_that_differ_before_ranks_are_compared(world_of_two, sizes, message):
    with pytest.raises(RuntimeError, match=f"all_gather needs tensors of one shape, got {message}"):
        world_of_two.run(_gathered, sizes, world_size=2)
    with pytest.raises(CollectiveMismatch, match="differ in the shape"):  # outputs of the rank's own size
        world_of_two.run(_gathered, None, world_size=2)


def test_ranks_of_a_group_are_named(world_of_two):
    def program():
        group = dist.new_group([0, 2])
        return (
            _told([lambda: dist.broadcast(torch.ones(1), group_src=2, group=group)])
            if dist.get_rank() != 1
            else _told([])
        )

    told = world_of_two.run(program, world_size=3)
    assert told[0] == ["broadcast got src 2: src is one of the ranks 0, 2, group_src a place in the group from 0 to 1"]
    assert told == [told[0], [], told[0]]


@pytest.mark.parametrize("backend", ["no_such", "cpu:no_such"])
def test_a_backend_that_torch_does_not_know(world_of_two, backend):
    def adopting():
        dist.init_process_group(backend)

    def making():
        dist.new_group(backend=backend)

    for program in (adopting, making):
        with pytest.raises(Exception, match=r"Unknown (c10d )?backend type (no_such|NO_SUCH)"):
            world_of_two.run(program, world_size=2)


def test_backends_that_torch_has_or_was_given():
    def program():
        dist.Backend.register_backend("given", lambda *args: None, devices=["cpu"])
        made = [
            dist.new_group(backend=name) for name in ("nccl", "GLOO", "cpu:gloo,cuda:nccl", "given", "cpu:given", None)
        ]
        dist.init_process_group("cpu:gloo,cuda:nccl")
        return len(made)

    try:
        assert get_world("sim").run(program, world_size=2) == [6, 6]
    finally:
        dist.Backend.backend_list.remove("given")
        del dist.Backend._plugins["GIVEN"]


def test_under_nccls_semantics_outputs_may_require_grad():
    def program():
        total = nn.Parameter(torch.zeros(1))
        dist.reduce_scatter_tensor(total, torch.ones(2))
        return total.item()

    assert get_world("sim", semantics="nccl").run(program, world_size=2) == [2, 2]


def test_a_group_below_autograd_is_left_alone():
    """C++ code calls the group like this."""

    def program():
        outputs = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
        with torch._C._AutoDispatchBelowAutograd():
            dist.group.WORLD.allgather([outputs], [torch.ones(1)]).wait()
        return [output.item() for output in outputs]

    assert get_world("sim").run(program, world_size=2) == [[1, 1], [1, 1]]
