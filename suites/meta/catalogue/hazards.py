"""Programs that touch the buffers of pending operations too early; each is right when called with ``right=True``.

Marks in the source name the lines that a verdict must give: ``# posts`` and ``# touches``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


def peer() -> int:
    return 1 - dist.get_rank()


# -- the input of a pending operation is written --------------------------------------------------


def isend_then_next_value(right):
    x = torch.ones(3)
    if dist.get_rank() == 1:
        return dist.recv(x, 0)
    work = dist.isend(x, 1)  # posts
    if right:
        work.wait()
    x += 1  # touches
    return work.wait()


def isend_then_write_through_a_view(right):
    x = torch.ones(4, 2)
    if dist.get_rank() == 1:
        return dist.recv(x, 0)
    work = dist.isend(x, 1)  # posts
    if right:
        work.wait()
    x.view(-1)[5].fill_(7)  # touches
    return work.wait()


def one_buffer_for_all_messages(right):
    buffer = torch.empty(2)
    works = []
    for i in range(3):
        if dist.get_rank() == 1:
            dist.recv(buffer, 0)
            continue
        own = torch.empty(2) if right else buffer
        own.copy_(torch.full((2,), float(i)))  # touches
        works.append((dist.isend(own, 1), own))  # posts
    for work, _ in works:
        work.wait()


def root_reuses_what_it_broadcasts(right):
    x = torch.ones(3)
    work = dist.broadcast(x, 0, async_op=True)  # posts
    if right or dist.get_rank() == 1:
        work.wait()
    if dist.get_rank() == 0:
        x.zero_()  # touches
    work.wait()


def reduce_scatter_input_reused(right):
    x, out = torch.ones(4), torch.zeros(2)
    work = dist.reduce_scatter_tensor(out, x, async_op=True)  # posts
    if right:
        work.wait()
    x.mul_(0.5)  # touches
    work.wait()


def all_gather_input_inside_its_output(right):
    out = torch.zeros(4)
    mine = out[2 * dist.get_rank() : 2 * dist.get_rank() + 2]
    mine.fill_(dist.get_rank())
    work = dist.all_gather_into_tensor(out, mine, async_op=True)  # posts
    if right:
        work.wait()
    mine.add_(1)  # touches
    work.wait()
    return out


def batch_overwrites_what_it_sends(right):
    x, y = torch.ones(2), torch.zeros(2)
    ops = [dist.P2POp(dist.isend, x, peer()), dist.P2POp(dist.irecv, y, peer())]
    works = dist.batch_isend_irecv(ops)  # posts
    if right:
        for work in works:
            work.wait()
    x.copy_(torch.zeros(2))  # touches
    for work in works:
        work.wait()


def one_buffer_for_sending_and_receiving(right):
    x = torch.ones(2)
    if dist.get_rank() == 1:
        dist.recv(x, 0)
        return dist.send(x, 0)
    sending = dist.isend(x, 1)  # posts
    receiving = dist.irecv(x.clone() if right else x, 1)  # touches
    sending.wait()
    return receiving.wait()


def weight_is_sent_and_stepped(right):
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.ones(3)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    if dist.get_rank() == 1:
        return dist.recv(torch.zeros(3), 0)
    work = dist.isend(weight.detach(), 1)  # posts
    if right:
        work.wait()
    optimizer.step()  # touches
    return work.wait()


def parameters_are_initialised_on_their_way(right):
    layer = nn.Linear(2, 2)
    work = dist.broadcast(layer.weight.data, 0, async_op=True)  # posts
    if right:
        work.wait()
    nn.init.eye_(layer.weight)  # touches
    work.wait()


# -- the output of a pending operation is read ----------------------------------------------------


def irecv_then_use(right):
    x = torch.ones(3)
    if dist.get_rank() == 0:
        return dist.send(x, 1)
    work = dist.irecv(x, 0)  # posts
    if right:
        work.wait()
    y = x * 2  # touches
    work.wait()
    return y


def irecv_then_tolist(right):
    x = torch.ones(3)
    if dist.get_rank() == 0:
        return dist.send(x, 1)
    work = dist.irecv(x, 0)  # posts
    if right:
        work.wait()
    y = x.tolist()  # touches
    work.wait()
    return y


def irecv_of_indices(right):
    table, index = torch.arange(10.0), torch.zeros(2, dtype=torch.int64)
    if dist.get_rank() == 0:
        return dist.send(index, 1)
    work = dist.irecv(index, 0)  # posts
    if right:
        work.wait()
    rows = table[index]  # touches
    work.wait()
    return rows


def logged_before_it_is_reduced(right):
    loss = torch.tensor(float(dist.get_rank()))
    work = dist.all_reduce(loss, async_op=True)  # posts
    if right:
        work.wait()
    text = f"loss {loss.item()}"  # touches
    work.wait()
    return text


def divided_before_it_is_summed(right):
    gradient = torch.ones(3)
    work = dist.all_reduce(gradient, async_op=True)  # posts
    if right:
        work.wait()
    gradient /= dist.get_world_size()  # touches
    work.wait()


def reduced_again_before_it_is_there(right):
    x = torch.ones(3)
    first = dist.all_reduce(x, async_op=True)  # posts
    if right:
        first.wait()
    second = dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)  # touches
    first.wait()
    second.wait()


def broadcast_used_before_it_arrives(right):
    x = torch.ones(3)
    work = dist.broadcast(x, 0, async_op=True)  # posts
    if right or dist.get_rank() == 0:
        work.wait()
    y = x.sum()  # touches
    work.wait()
    return y


def gathered_views_are_joined_early(right):
    flat = torch.zeros(4)
    work = dist.all_gather(list(flat.split(2)), torch.ones(2), async_op=True)  # posts
    if right:
        work.wait()
    total = flat.sum()  # touches
    work.wait()
    return total


def exchanged_rows_are_read_early(right):
    out = torch.zeros(2, 3)
    work = dist.all_to_all_single(out, torch.ones(2, 3), async_op=True)  # posts
    if right:
        work.wait()
    y = torch.nn.functional.relu(out)  # touches
    work.wait()
    return y


def batch_uses_what_it_receives(right):
    x, y = torch.ones(2), torch.zeros(2)
    ops = [dist.P2POp(dist.isend, x, peer()), dist.P2POp(dist.irecv, y, peer())]
    sending, receiving = dist.batch_isend_irecv(ops)  # posts
    sending.wait()
    if right:
        receiving.wait()
    z = y @ y  # touches
    receiving.wait()
    return z


def coalesced_sums_are_read_early(right):
    a, b = torch.ones(2), torch.ones(3)
    with dist._coalescing_manager(async_ops=True) as manager:  # posts
        dist.all_reduce(a)
        dist.all_reduce(b)
    if right:
        manager.wait()
    y = b + 1  # touches
    manager.wait()
    return y


def step_before_the_gradients_are_there(right):
    """Gradients are reduced in hooks while the backward pass goes on."""
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


def accumulates_into_gradients_under_way(right):
    weight = torch.ones(3, requires_grad=True)
    (weight * 2).sum().backward()
    work = dist.all_reduce(weight.grad, async_op=True)  # posts
    if right:
        work.wait()
    (weight * 3).sum().backward()  # touches
    work.wait()


HAZARDS = [
    ("write", "input", isend_then_next_value),
    ("write", "input", isend_then_write_through_a_view),
    ("write", "input", one_buffer_for_all_messages),
    ("write", "input", root_reuses_what_it_broadcasts),
    ("write", "input", reduce_scatter_input_reused),
    ("write", "output", all_gather_input_inside_its_output),
    ("write", "input", batch_overwrites_what_it_sends),
    ("write", "input", one_buffer_for_sending_and_receiving),
    ("write", "input", weight_is_sent_and_stepped),
    ("write", "", parameters_are_initialised_on_their_way),
    ("read", "output", irecv_then_use),
    ("read", "output", irecv_then_tolist),
    ("read", "output", irecv_of_indices),
    ("read", "output", logged_before_it_is_reduced),
    ("write", "output", divided_before_it_is_summed),
    ("read", "output", reduced_again_before_it_is_there),
    ("read", "output", broadcast_used_before_it_arrives),
    ("read", "output", gathered_views_are_joined_early),
    ("read", "output", exchanged_rows_are_read_early),
    ("read", "output", batch_uses_what_it_receives),
    ("read", "output", coalesced_sums_are_read_early),
    ("read", "output", step_before_the_gradients_are_there),
    ("write", "output", accumulates_into_gradients_under_way),
]


# -- what looks like a hazard and is none ---------------------------------------------------------


def reads_what_it_sends():
    x = torch.ones(3)
    work = dist.isend(x, peer()) if dist.get_rank() == 0 else dist.irecv(torch.zeros(3), 0)
    total = x.sum().item() + len(x.tolist())
    work.wait()
    return total


def root_reads_what_it_broadcasts():
    x = torch.ones(3)
    work = dist.broadcast(x, 0, async_op=True)
    total = x.sum().item() if dist.get_rank() == 0 else 3.0
    work.wait()
    return total


def works_on_other_rows():
    buffer = torch.zeros(4, 3)
    work = dist.all_reduce(buffer[:2], async_op=True)
    buffer[2:] += 1
    total = buffer[2:].sum().item()
    work.wait()
    return total


def works_on_other_columns():
    buffer = torch.zeros(4, 3)
    column = buffer[:, 1]
    work = dist.irecv(column, 0) if dist.get_rank() else dist.isend(column, 1)
    buffer[:, 0] += 1
    buffer[:, 2] += 1
    total = (buffer[:, 0] + buffer[:, 2]).sum().item()
    work.wait()
    return total


def looks_at_shapes_alone():
    x = torch.ones(2, 3)
    work = dist.all_reduce(x, async_op=True)
    views = x.view(-1), x[0], x.t(), x.detach()
    others = torch.empty_like(x), torch.zeros_like(x), x.new_ones(3)
    sizes = x.shape, x.dtype, x.numel(), x.is_contiguous()
    work.wait()
    return len(views) + len(others) + len(sizes)


def asks_until_it_is_complete():
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    return x.tolist()


def waits_for_the_future():
    x = torch.ones(2)
    dist.all_reduce(x, async_op=True).get_future().wait()
    return x.tolist()


def continues_in_a_callback():
    x = torch.ones(2)
    future = dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    return future.wait().tolist()


def waits_in_another_order():
    tensors = [torch.ones(2) for _ in range(4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    return sum(tensor.sum().item() for tensor in tensors)


def waits_twice():
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    x += 1
    work.wait()
    return x.tolist()


def overlaps_two_buffers():
    buffers = [torch.full((2,), float(i)) for i in range(2)]
    works: list[dist.Work | None] = [None, None]
    for i in range(6):
        if works[i % 2] is not None:
            works[i % 2].wait()
        buffers[i % 2] += 1
        works[i % 2] = dist.all_reduce(buffers[i % 2], async_op=True)
    for work in works:
        work.wait()
    return [buffer.tolist() for buffer in buffers]


INNOCENT = [
    (reads_what_it_sends, 6.0),
    (root_reads_what_it_broadcasts, 3.0),
    (works_on_other_rows, 6.0),
    (works_on_other_columns, 8.0),
    (looks_at_shapes_alone, 11),
    (asks_until_it_is_complete, [2.0, 2.0]),
    (waits_for_the_future, [2.0, 2.0]),
    (continues_in_a_callback, [4.0, 4.0]),
    (waits_in_another_order, 16.0),
    (waits_twice, [3.0, 3.0]),
    (overlaps_two_buffers, [[14.0, 14.0], [22.0, 22.0]]),
]
