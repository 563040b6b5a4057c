"""Accesses to buffers of pending operations.

The programs wait for a message only once, because gloo's second wait for one hangs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.errors import BufferHazard

from .entry import fault


def peer() -> int:
    return 1 - dist.get_rank()


# -- the input of a pending operation is written --------------------------------------------------


@fault(BufferHazard, fields={"access": "write", "buffer": "input"}, source="pytorch tutorials #3009, #3052")
def isend_then_next_value(right):
    """A buffer is changed while it is being sent."""
    x = torch.ones(3)
    if dist.get_rank() == 1:
        dist.recv(x, 0)
        return x.tolist()
    work = dist.isend(x, 1)  # posts
    if right:
        work.wait()
    x += 1  # touches
    return None if right else work.wait()


@fault(BufferHazard, fields={"access": "write", "buffer": "input"})
def isend_then_write_through_a_view(right):
    """The same through a view of the buffer."""
    x = torch.ones(4, 2)
    if dist.get_rank() == 1:
        dist.recv(x, 0)
        return x.tolist()
    work = dist.isend(x, 1)  # posts
    if right:
        work.wait()
    x.view(-1)[5].fill_(7)  # touches
    return None if right else work.wait()


@fault(BufferHazard, fields={"access": "write", "buffer": "input"}, source="pytorch tutorials #3009")
def one_buffer_for_all_messages(right):
    """One buffer serves several messages that are all under way."""
    buffer = torch.empty(2)
    works, received = [], []
    for i in range(3):
        if dist.get_rank() == 1:
            dist.recv(buffer, 0)
            received.append(buffer.tolist())
            continue
        own = torch.empty(2) if right else buffer
        own.copy_(torch.full((2,), float(i)))  # touches
        works.append((dist.isend(own, 1), own))  # posts
    for work, _ in works:
        work.wait()
    return received


@fault(BufferHazard, fields={"access": "write", "buffer": "input"})
def root_reuses_what_it_broadcasts(right):
    """The root clears what it broadcasts."""
    x = torch.ones(3)
    work = dist.broadcast(x, 0, async_op=True)  # posts
    if right or dist.get_rank() == 1:
        work.wait()
    if dist.get_rank() == 0:
        x.zero_()  # touches
    work.wait()
    return x.tolist() if dist.get_rank() else None


@fault(BufferHazard, fields={"access": "write", "buffer": "input"})
def reduce_scatter_input_reused(right):
    """The input of a reduce_scatter is scaled for its next use."""
    x, out = torch.ones(4), torch.zeros(2)
    work = dist.reduce_scatter_tensor(out, x, async_op=True)  # posts
    if right:
        work.wait()
    x.mul_(0.5)  # touches
    work.wait()
    return out.tolist()


@fault(BufferHazard, fields={"access": "write", "buffer": "output"})
def all_gather_input_inside_its_output(right):
    """The input of an all_gather, a part of its output, is changed."""
    out = torch.zeros(4)
    mine = out[2 * dist.get_rank() : 2 * dist.get_rank() + 2]
    mine.fill_(dist.get_rank())
    work = dist.all_gather_into_tensor(out, mine, async_op=True)  # posts
    if right:
        work.wait()
    mine.add_(1)  # touches
    work.wait()
    return out


@fault(BufferHazard, fields={"access": "write", "buffer": "input"})
def batch_overwrites_what_it_sends(right):
    """A buffer of a batch of messages is cleared."""
    x, y = torch.ones(2), torch.zeros(2)
    ops = [dist.P2POp(dist.isend, x, peer()), dist.P2POp(dist.irecv, y, peer())]
    works = dist.batch_isend_irecv(ops)  # posts
    if right:
        for work in works:
            work.wait()
    x.copy_(torch.zeros(2))  # touches
    if not right:
        for work in works:
            work.wait()
    return y.tolist()


@fault(BufferHazard, fields={"access": "write", "buffer": "input"})
def one_buffer_for_sending_and_receiving(right):
    """A message is received into the buffer of another that is being sent."""
    x = torch.ones(2)
    if dist.get_rank() == 1:
        dist.recv(x, 0)
        return dist.send(x, 0)
    sending = dist.isend(x, 1)  # posts
    receiving = dist.irecv(x.clone() if right else x, 1)  # touches
    sending.wait()
    return receiving.wait()


@fault(BufferHazard, fields={"access": "write", "buffer": "input"})
def weight_is_sent_and_stepped(right):
    """An optimizer steps a weight that is being sent."""
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.ones(3)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    if dist.get_rank() == 1:
        received = torch.zeros(3)
        dist.recv(received, 0)
        return received.tolist()
    work = dist.isend(weight.detach(), 1)  # posts
    if right:
        work.wait()
    optimizer.step()  # touches
    return None if right else work.wait()


@fault(BufferHazard, fields={"access": "write"})
def parameters_are_initialised_on_their_way(right):
    """A parameter is initialised while it is broadcast."""
    layer = nn.Linear(2, 2)
    work = dist.broadcast(layer.weight.data, 0, async_op=True)  # posts
    if right:
        work.wait()
    nn.init.eye_(layer.weight)  # touches
    work.wait()


# -- the output of a pending operation is read ----------------------------------------------------


@fault(BufferHazard, fields={"access": "read", "buffer": "output"})
def irecv_then_use(right):
    """A message is used before it has arrived."""
    x = torch.ones(3)
    if dist.get_rank() == 0:
        return dist.send(x, 1)
    work = dist.irecv(x, 0)  # posts
    if right:
        work.wait()
    y = x * 2  # touches
    if not right:
        work.wait()
    return y


@fault(BufferHazard, fields={"access": "read", "buffer": "output"})
def irecv_then_tolist(right):
    """A message is turned into a list before it has arrived."""
    x = torch.ones(3)
    if dist.get_rank() == 0:
        return dist.send(x, 1)
    work = dist.irecv(x, 0)  # posts
    if right:
        work.wait()
    y = x.tolist()  # touches
    if not right:
        work.wait()
    return y


@fault(BufferHazard, fields={"access": "read", "buffer": "output"})
def irecv_of_indices(right):
    """Indices are used before they have arrived."""
    table, index = torch.arange(10.0), torch.zeros(2, dtype=torch.int64)
    if dist.get_rank() == 0:
        return dist.send(index, 1)
    work = dist.irecv(index, 0)  # posts
    if right:
        work.wait()
    rows = table[index]  # touches
    if not right:
        work.wait()
    return rows


@fault(BufferHazard, fields={"access": "read", "buffer": "output"}, source="pytorch PR #115710")
def logged_before_it_is_reduced(right):
    """A loss is logged before its sum is there."""
    loss = torch.tensor(float(dist.get_rank()))
    work = dist.all_reduce(loss, async_op=True)  # posts
    if right:
        work.wait()
    text = f"loss {loss.item()}"  # touches
    work.wait()
    return text


@fault(BufferHazard, fields={"access": "write", "buffer": "output"})
def divided_before_it_is_summed(right):
    """A gradient is divided while it is summed."""
    gradient = torch.ones(3)
    work = dist.all_reduce(gradient, async_op=True)  # posts
    if right:
        work.wait()
    gradient /= dist.get_world_size()  # touches
    work.wait()
    return gradient.tolist()


@fault(BufferHazard, fields={"access": "read", "buffer": "output"})
def reduced_again_before_it_is_there(right):
    """A second reduction takes the result of a first that is under way."""
    x = torch.ones(3)
    first = dist.all_reduce(x, async_op=True)  # posts
    if right:
        first.wait()
    second = dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)  # touches
    first.wait()
    second.wait()
    return x.tolist()


@fault(BufferHazard, fields={"access": "read", "buffer": "output"})
def broadcast_used_before_it_arrives(right):
    """A broadcast tensor is used before it has arrived."""
    x = torch.ones(3)
    work = dist.broadcast(x, 0, async_op=True)  # posts
    if right or dist.get_rank() == 0:
        work.wait()
    y = x.sum()  # touches
    work.wait()
    return y


@fault(BufferHazard, fields={"access": "read", "buffer": "output"})
def gathered_views_are_joined_early(right):
    """The tensor whose parts are gathered is summed too early."""
    flat = torch.zeros(4)
    work = dist.all_gather(list(flat.split(2)), torch.ones(2), async_op=True)  # posts
    if right:
        work.wait()
    total = flat.sum()  # touches
    work.wait()
    return total


@fault(BufferHazard, fields={"access": "read", "buffer": "output"})
def exchanged_rows_are_read_early(right):
    """Rows of an all_to_all are used before they have arrived."""
    out = torch.zeros(2, 3)
    work = dist.all_to_all_single(out, torch.ones(2, 3), async_op=True)  # posts
    if right:
        work.wait()
    y = torch.nn.functional.relu(out)  # touches
    work.wait()
    return y


@fault(BufferHazard, fields={"access": "read", "buffer": "output"})
def batch_uses_what_it_receives(right):
    """What a batch of messages receives is used too early."""
    x, y = torch.ones(2), torch.zeros(2)
    ops = [dist.P2POp(dist.isend, x, peer()), dist.P2POp(dist.irecv, y, peer())]
    sending, receiving = dist.batch_isend_irecv(ops)  # posts
    sending.wait()
    if right:
        receiving.wait()
    z = y @ y  # touches
    if not right:
        receiving.wait()
    return z


@fault(BufferHazard, fields={"access": "read", "buffer": "output"})
def coalesced_sums_are_read_early(right):
    """Coalesced sums are used before the manager has waited."""
    a, b = torch.ones(2), torch.ones(3)
    with dist._coalescing_manager(async_ops=True) as manager:  # posts
        dist.all_reduce(a)
        dist.all_reduce(b)
    if right:
        manager.wait()
    y = b + 1  # touches
    manager.wait()
    return y


@fault(BufferHazard, fields={"access": "read", "buffer": "output"}, source="DeepSpeed #8061")
def step_before_the_gradients_are_there(right):
    """The optimizer steps before the gradients that hooks reduce are there."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    works = []

    def reduce(parameter):
        works.append(dist.all_reduce(parameter.grad, async_op=True))  # posts

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    model(torch.ones(2, 3)).sum().backward()
    if right:
        for work in works:
            work.wait()
    optimizer.step()  # touches
    for work in works:
        work.wait()
    return [parameter.tolist() for parameter in model.parameters()]


@fault(BufferHazard, fields={"access": "write", "buffer": "output"}, source="horovod PR #1116")
def accumulates_into_gradients_under_way(right):
    """A second backward pass accumulates into gradients that are being reduced."""
    weight = torch.ones(3, requires_grad=True)
    (weight * 2).sum().backward()
    work = dist.all_reduce(weight.grad, async_op=True)  # posts
    if right:
        work.wait()
    (weight * 3).sum().backward()  # touches
    work.wait()
    return weight.grad.tolist()
