"""Bugs of messages between two ranks, and of buffers that are used before their operation is complete."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_pipeline
from pdlcheck.worlds import get_world

from .entry import entry


@entry(
    "p2p-ring-send-first",
    "NCCL #479; pytorch #108378",
    check="sim",
    cause="blocked in send[\\s\\S]*wait cycle: rank 0 -> rank 1",
)
def sends_to_the_next_rank_before_it_receives(broken, world):
    """All ranks of a ring send their block of keys to the next rank, and then receive."""

    def ring_attention_step(kv):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        received = torch.empty_like(kv)
        send_to, recv_from = (rank + 1) % world_size, (rank - 1) % world_size
        if broken or rank % 2 == 0:
            dist.send(kv, send_to)
            dist.recv(received, recv_from)
        else:
            dist.recv(received, recv_from)
            dist.send(kv, send_to)
        return received

    def main():
        kv = torch.full((2, 4), float(dist.get_rank()))
        for _ in range(dist.get_world_size() - 1):
            kv = ring_attention_step(kv)
        return kv.tolist()

    world.run(main, world_size=4)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.skip, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.embed(x)) + self.skip(x).square())


@entry(
    "p2p-unordered-no-tag",
    "pytorch #63486",
    check="check_pipeline",
    cause="two tensors of one shape are exchanged, tanh and linear in 'skip': two messages without tags are",
)
def receives_two_equal_messages_in_another_order(broken, world):
    """Two equal messages without tags are received in the other order: hidden states and residual are exchanged."""
    names = ("hidden", "residual")
    tags = {"hidden": 0, "residual": 0 if broken else 1}

    def send(tensors):
        for work in [dist.isend(tensors[name].detach(), 1 - dist.get_rank(), tag=tags[name]) for name in names]:
            work.wait()

    def receive(like, order):
        received = {name: torch.empty_like(like) for name in names}
        for work in [dist.irecv(received[name], 1 - dist.get_rank(), tag=tags[name]) for name in order]:
            work.wait()
        return received

    def start(model):
        if dist.get_rank() == 0:
            stage = nn.ModuleDict({"embed": model.embed, "skip": model.skip})
        else:
            stage = nn.ModuleDict({"head": model.head})

        def step(x, y):
            if dist.get_rank() == 0:
                outputs = {"hidden": torch.tanh(stage["embed"](x)), "residual": stage["skip"](x)}
                send(outputs)
                grads = receive(outputs["hidden"], names)
                torch.autograd.backward([outputs[name] for name in names], [grads[name] for name in names])
                return None
            inputs = receive(x.new_empty(len(x), 4), names[::-1])
            for tensor in inputs.values():
                tensor.requires_grad_()
            out = stage["head"](inputs["hidden"] + inputs["residual"].square())
            loss = nn.functional.mse_loss(out, y)
            loss.backward()
            send({name: tensor.grad for name, tensor in inputs.items()})
            return loss.detach(), out.detach()

        return stage, step

    rows = torch.Generator().manual_seed(0)
    batches = [(torch.randn(n, 3, generator=rows), torch.randn(n, 2, generator=rows)) for n in (4, 6, 4)]
    check_pipeline(start, Residual, nn.MSELoss(), batches, world, world_size=2, n_microbatches=1)


@entry(
    "isend-buffer-reused",
    "pytorch tutorials #3009, #3052",
    check="sim",
    cause="writes the input of a pending operation",
)
def fills_the_send_buffer_while_it_is_sent(broken, world):
    """Each activation is copied into the send buffer before the send of the last one is complete."""

    def send_forward(outputs):
        buffer, works = torch.empty(3), []
        for output in outputs:
            if not broken and works:
                works[-1].wait()
            buffer.copy_(output)
            works.append(dist.isend(buffer, 1))
        works[-1].wait()

    def main(num_microbatches=3):
        outputs = [torch.full((3,), float(i)) for i in range(num_microbatches)]
        if dist.get_rank() == 0:
            return send_forward(outputs)
        for output in outputs:
            received = torch.empty(3)
            dist.recv(received, 0)
            assert torch.equal(received, output)
        return None

    world.run(main, world_size=2)


@entry(
    "async-result-read-early",
    "pytorch PR #115710; DeepSpeed #8061",
    check="sim",
    cause="reads the output of a pending operation",
)
def scales_the_gradient_before_the_wait(broken, world):
    """Gradients are averaged from the buffer of an all_reduce that is not complete."""

    def average_tensor(bucket):
        handle = dist.all_reduce(bucket, async_op=True)
        if not broken:
            handle.wait()
        averaged = bucket / dist.get_world_size()
        handle.wait()
        return averaged

    def main():
        model = nn.Linear(3, 1, bias=False)
        model(torch.full((2, 3), float(dist.get_rank()))).sum().backward()
        return average_tensor(model.weight.grad.flatten()).tolist()

    world.run(main, world_size=2)


def exchange(*ops):
    for work in dist.batch_isend_irecv(list(ops)):
        work.wait()


def run_1f1b(broken, world):
    """Train two stages by 1F1B; ``broken``: the last stage posts its receive and its send in two calls."""
    n_microbatches, width, loss = 4, 6, nn.functional.mse_loss

    def send(tensor):
        return dist.P2POp(dist.isend, tensor.detach(), 1 - dist.get_rank())

    def recv(tensor):
        return dist.P2POp(dist.irecv, tensor, 1 - dist.get_rank())

    def first_stage(stage, inputs):
        waiting = None
        for micro in [*inputs.chunk(n_microbatches), None]:
            output = None if micro is None else stage(micro)
            grad = None if waiting is None else torch.empty_like(waiting)
            exchange(*(() if output is None else (send(output),)), *(() if grad is None else (recv(grad),)))
            if grad is not None:
                waiting.backward(grad)
            waiting = output

    def last_stage(stage, targets):
        hidden, outputs, losses = None, [], []
        for target in [*targets.chunk(n_microbatches), None]:
            ops = [] if target is None else [recv(torch.empty(len(target), width, dtype=target.dtype))]
            arriving = ops[0].tensor if ops else None
            if hidden is not None:
                ops.append(send(hidden.grad))
            for batch in [[op] for op in ops] if broken else [ops]:
                exchange(*batch)
            if target is not None:
                hidden = arriving.requires_grad_()
                outputs.append(stage(hidden))
                losses.append(loss(outputs[-1], target) / n_microbatches)
                losses[-1].backward()
        return sum(losses).detach(), torch.cat(outputs).detach()

    def start(model):
        rank = dist.get_rank()
        stage = model[rank]

        def step(inputs, targets):
            return last_stage(stage, targets) if rank else first_stage(stage, inputs)

        return nn.ModuleDict({str(rank): stage}), step

    def make():
        return nn.Sequential(nn.Sequential(nn.Linear(4, width), nn.Tanh()), nn.Linear(width, 2))

    generator = torch.Generator().manual_seed(0)
    batches = [[torch.randn(size, width, generator=generator) for width in (4, 2)] for size in (8, 12, 8)]
    check_pipeline(start, make, loss, batches, world, world_size=2, n_microbatches=n_microbatches)


@entry(
    "p2p-batched-on-one-side",
    "NCCL #1279; NCCL #2130",
    check="check_pipeline",
    judged="missed",
    why="it is right on gloo and MPI, which the default rules allow for, and undefined on nccl; "
    "--semantics nccl shows the bug with both lines",
    also=lambda broken, world: run_1f1b(broken, get_world("sim", semantics="nccl")),
)
def posts_a_batch_and_its_two_operations_one_by_one(broken, world):
    """One stage posts its send and its receive as a batch, and the other its receive, and then its send (1F1B)."""
    run_1f1b(broken, world)
