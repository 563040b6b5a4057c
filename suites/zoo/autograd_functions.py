"""Bugs of handwritten autograd functions whose backward pass communicates."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pdlcheck.checks import check_derivative

from .entry import entry


def embeddings(rank):
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(rank))


@entry(
    "gather-layer-own-gradient",
    "lightly #1528",
    check="check_derivative",
    cause="only the part of this rank's own outputs: backward lacks the communication",
)
def returns_the_gradient_of_its_own_loss(broken, world):
    """Gather the embeddings of all ranks for a contrastive loss, and drop the gradients of the other ranks' losses."""

    class GatherLayer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, input):
            output = [torch.empty_like(input) for _ in range(dist.get_world_size())]
            dist.all_gather(output, input)
            return tuple(output)

        @staticmethod
        def backward(ctx, *grads):
            if broken:
                return grads[dist.get_rank()].clone()
            all_gradients = torch.stack(grads)
            dist.all_reduce(all_gradients)
            return all_gradients[dist.get_rank()]

    check_derivative(GatherLayer.apply, embeddings, world)


@entry(
    "gather-strided-gradient",
    "pytorch #120386",
    check="check_derivative",
    cause="backward assumes that gradients are contiguous",
)
def receives_into_a_copy_of_the_buffer(broken, world):
    """Allocate the buffer of a reduce_scatter like a transposed gradient, so the result goes into a copy of it."""

    def reduce_scatter(output, inputs):
        output = output.contiguous()
        dist.reduce_scatter(output, [one.contiguous() for one in inputs])
        return output

    class AllGather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            tensor = tensor.contiguous()
            out_tensor_list = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
            dist.all_gather(out_tensor_list, tensor)
            return tuple(out_tensor_list)

        @staticmethod
        def backward(ctx, *grad_outputs):
            gx = torch.zeros_like(grad_outputs[dist.get_rank()])
            reduced = reduce_scatter(gx, grad_outputs)
            return gx if broken else reduced

    check_derivative(AllGather.apply, embeddings, world)
