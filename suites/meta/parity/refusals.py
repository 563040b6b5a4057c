"""Calls that torch itself refuses: the same exception on every rank of both worlds."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel


def _refused(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "accepted"


def complex_numbers_that_are_not_added():
    told = []
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        x = torch.ones(4, dtype=torch.complex64)
        told.append(_refused(lambda x=x, op=op: dist.all_reduce(x, op)))
        told.append(_refused(lambda x=x, op=op: dist.reduce(x, 1, op)))
    return told


def unsigned_integers_of_several_bytes():
    dtypes = (torch.uint16, torch.uint32, torch.uint64)
    return [_refused(lambda dtype=dtype: dist.all_reduce(torch.ones(2, dtype=dtype))) for dtype in dtypes]


def sums_of_floats_of_eight_bits():
    x = torch.ones(4).to(torch.float8_e4m3fn)
    return _refused(lambda: dist.all_reduce(x)), _refused(lambda: dist.reduce_scatter(x[:1], list(x.split(1))))


def message_to_a_rank_that_is_not_there():
    return _refused(lambda: dist.send(torch.ones(1), 9))


def root_that_is_not_there():
    return _refused(lambda: dist.broadcast(torch.ones(1), 7)), _refused(lambda: dist.reduce(torch.ones(1), 7))


def roots_and_peers_below_zero():
    x, group = torch.ones(1), dist.group.WORLD
    return [
        _refused(lambda: dist.broadcast(x, -1)),
        _refused(lambda: dist.broadcast(x, group_src=5)),
        _refused(lambda: dist.reduce(x, -1)),
        _refused(lambda: dist.gather(x, None, -2)),
        _refused(lambda: dist.scatter(x, None, -1)),
        _refused(lambda: dist.send(x, -1)),
        _refused(lambda: dist.irecv(x, group_src=-1)),
        _refused(lambda: dist.broadcast_object_list([1], -1)),
        _refused(lambda: group.broadcast(x, 4)),
        _refused(lambda: group.recv([x], -1, 0)),
    ]


def tags_that_are_none():
    x, right = torch.ones(1), (dist.get_rank() + 1) % 4
    return [
        _refused(lambda: dist.send(x, right, tag=-1)),
        _refused(lambda: dist.recv(x, right, tag=-1)),
        _refused(lambda: dist.recv(x, tag=-1)),
        _refused(lambda: dist.send(x, right, tag=2**31)),
    ]


def strided_messages():
    x, right = torch.ones(4, 4), (dist.get_rank() + 1) % 4
    images = torch.ones(1, 2, 3, 3).contiguous(memory_format=torch.channels_last)
    return [
        *[_refused(lambda x=x: dist.isend(x, right)) for x in (x[:, 0], x[:, 1:].t(), images)],
        *[_refused(lambda x=x: dist.irecv(x, right)) for x in (x[:, 0], x[:, 1:].t(), images)],
        *[_refused(lambda x=x: dist.all_to_all_single(torch.ones(4), x)) for x in (x[:, 0], torch.ones(1).expand(4))],
        _refused(lambda: dist.all_to_all_single(torch.ones(4, 4), x.view(2, 8)[:, ::2].t(), [1] * 4, [1] * 4)),
    ]


def outputs_that_require_grad():
    def parameters(n=2):
        return [torch.nn.Parameter(torch.zeros(n)) for _ in range(4)]

    group, x = dist.group.WORLD, torch.ones(2)
    return [
        _refused(lambda: dist.all_gather(parameters(), x)),
        _refused(lambda: dist.all_gather([p[:2] for p in parameters(3)], x)),
        _refused(lambda: dist.all_gather_into_tensor(parameters(8)[0], x)),
        _refused(lambda: dist.all_gather_into_tensor(2 * parameters(8)[0], x)),
        _refused(lambda: dist.reduce_scatter(parameters()[0], [x] * 4)),
        _refused(lambda: dist.reduce_scatter_tensor(parameters()[0], torch.ones(8))),
        _refused(lambda: group.allreduce_coalesced(parameters()).wait()),
    ]


def split_sizes_that_are_none():
    x = torch.ones(4)
    return [
        _refused(lambda: dist.all_to_all_single(torch.zeros(4), x, torch.ones(4).int(), torch.ones(4).int())),
        _refused(lambda: dist.all_to_all_single(torch.zeros(4), x, [1.0] * 4, [1.0] * 4)),
    ]


def elements_that_cannot_be_dealt_out():
    return [_refused(lambda x=x: dist.all_to_all_single(torch.zeros_like(x), x)) for x in map(torch.ones, ((), 1, 6))]


def arguments_that_fit_no_form():
    group, x = dist.group.WORLD, torch.ones(1)
    return [
        _refused(lambda: group.allreduce(x, 3)),
        _refused(lambda: group.allreduce(x, dist.ReduceOp.SUM, op=dist.ReduceOp.SUM)),
        _refused(lambda: group.allreduce(x, root=1)),
        _refused(lambda: group.broadcast(x)),
        _refused(lambda: group.broadcast([x], 1)),
        _refused(lambda: group.allgather([x] * 4, [x])),
        _refused(lambda: group.gather([x] * 4, x)),
        _refused(lambda: group.reduce_scatter([x], [[x] * 4], dist.ReduceOp.MAX)),
        _refused(lambda: group.alltoall_base(x, x)),
        _refused(lambda: group.send([x], 1)),
    ]


def backend_that_is_not_there():
    return [_refused(lambda name=name: dist.new_group(backend=name)) for name in ("no_such", "cpu:no_such")]


def root_outside_the_group():
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return None
    return _refused(lambda: dist.broadcast(torch.ones(1), 0, group=group)), _refused(
        lambda: dist.scatter(torch.ones(1), None, src=2, group=group)
    )


def list_of_the_wrong_length():
    short = [torch.zeros(1) for _ in range(3)]
    return _refused(lambda: dist.all_gather(short, torch.ones(1))), _refused(
        lambda: dist.reduce_scatter(torch.zeros(1), short)
    )


def all_to_all_of_lists_of_the_wrong_length():
    short = [torch.zeros(1) for _ in range(3)]
    return _refused(lambda: dist.all_to_all(short, [torch.zeros(1) for _ in range(3)]))


def flat_tensor_of_the_wrong_length():
    return _refused(lambda: dist.all_gather_into_tensor(torch.zeros(3), torch.ones(1))), _refused(
        lambda: dist.reduce_scatter_tensor(torch.zeros(1), torch.ones(3))
    )


def splits_that_do_not_add_up():
    x = torch.ones(4)
    return _refused(lambda: dist.all_to_all_single(torch.zeros(4), x, [1, 1, 1, 2], [1] * 4)), _refused(
        lambda: dist.all_to_all_single(torch.zeros(4), x, [1, 1, 1, 1], [1] * 3)
    )


def uneven_without_splits():
    return _refused(lambda: dist.all_to_all_single(torch.zeros(5), torch.ones(5)))


def missing_lists():
    return _refused(lambda: dist.scatter(torch.zeros(1), [torch.ones(1)], src=(dist.get_rank() + 1) % 4)), _refused(
        lambda: dist.gather(torch.ones(1), [torch.zeros(1)] * 4, dst=(dist.get_rank() + 1) % 4)
    )


def tensors_of_two_dtypes():
    mixed = [torch.zeros(1) for _ in range(3)] + [torch.zeros(1, dtype=torch.int64)]
    return _refused(lambda: dist.all_gather(mixed, torch.ones(1))), _refused(
        lambda: dist.all_gather_into_tensor(torch.zeros(4), torch.ones(1, dtype=torch.int64))
    )


def what_is_no_tensor():
    return _refused(lambda: dist.all_reduce([1.0])), _refused(lambda: dist.broadcast("x", 0))


def empty_batch():
    return _refused(lambda: dist.batch_isend_irecv([])), _refused(lambda: dist.batch_isend_irecv([1]))


def group_with_a_rank_that_is_not_there():
    return _refused(lambda: dist.new_group([0, 9]))


def group_with_a_rank_twice():
    return _refused(lambda: dist.new_group([0, 0]))


def subgroups_that_do_not_fit():
    return _refused(lambda: dist.new_subgroups(3)), _refused(lambda: dist.new_subgroups(5))


def rank_that_is_not_in_the_group():
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return None
    return _refused(lambda: dist.get_group_rank(group, 3)), _refused(lambda: dist.get_global_rank(group, 2))


def mesh_larger_than_the_world():
    return _refused(lambda: dist.device_mesh.init_device_mesh("cpu", (5,)))


def message_to_oneself():
    return _refused(lambda: dist.send(torch.ones(1), dist.get_rank()))


def objects_from_any_source():
    return _refused(lambda: dist.recv_object_list([None]))


def averages_of_integers():
    return _refused(lambda: dist.all_reduce(torch.ones(1, dtype=torch.int64), op=dist.ReduceOp.AVG))


def bits_of_floats():
    ops = dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR
    return [_refused(lambda op=op: dist.all_reduce(torch.ones(1), op=op)) for op in ops]


def products_of_complex_numbers():
    return _refused(lambda: dist.all_reduce(torch.ones(1, dtype=torch.complex64), op=dist.ReduceOp.PRODUCT))


def outputs_of_another_shape():
    wrong = [torch.zeros(3) for _ in range(4)]
    return _refused(lambda: dist.all_gather(wrong, torch.ones(1))), _refused(
        lambda: dist.reduce_scatter(torch.zeros(1), wrong)
    )


def outputs_for_sizes_that_differ_between_ranks():
    room = [torch.zeros(1 + r) for r in range(4)]
    return _refused(lambda: dist.all_gather(room, torch.ones(1 + dist.get_rank())))


def split_of_a_group_without_a_device():
    return _refused(lambda: dist.split_group(split_ranks=[[0, 1], [2, 3]]))


def bf16_hook_without_nccl():
    ddp = DistributedDataParallel(torch.nn.Linear(1, 1))
    return _refused(lambda: ddp.register_comm_hook(None, default_hooks.bf16_compress_hook))


def sparse_tensors():
    def sparse(rows=2):
        return torch.eye(2).repeat(rows // 2, 1).to_sparse()

    each = [sparse() for _ in range(4)]
    return [
        _refused(lambda: dist.all_gather(each, sparse())),
        _refused(lambda: dist.all_gather_into_tensor(sparse(8), sparse())),
        _refused(lambda: dist.all_reduce(torch.eye(2).to_sparse_csr())),
        _refused(lambda: dist.all_to_all(each, each)),
        _refused(lambda: dist.broadcast(sparse(), 0)),
        _refused(lambda: dist.reduce(sparse(), 0)),
        _refused(lambda: dist.reduce_scatter(sparse(), each)),
        _refused(lambda: dist.send(sparse(), (dist.get_rank() + 1) % 4)),
    ]
