"""Bugs of weights: gradients of ranks and terms of a loss that enter a sum with a wrong factor."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_gather
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import check_gradients_equal_single_process, check_same_trajectory

from .accumulation import IGNORED, VOCABULARY, own_texts, texts
from .entry import entry


def shards(*sizes):
    """Return inputs and targets of ranks with these numbers of samples."""
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(size, 3, generator=generator), torch.randn(size, 1, generator=generator)) for size in sizes]


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


@entry(
    "sum-without-divide",
    "pytorch #37359, apex #696",
    check="check_gradients_equal_single_process",
    cause=r"world_size = 2 times too large: summed, not averaged",
)
def adds_gradients_without_a_division(broken, world):
    """Add gradients of mean losses over ranks, without a division by world_size."""

    def average_gradients(model, num_samples):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            if not broken:
                parameter.grad /= dist.get_world_size()

    check_gradients_equal_single_process(net, nn.MSELoss(), shards(4, 4), average_gradients, world)


@entry(
    "uneven-local-batch-unweighted",
    "pytorch #67253, mlx-lm PR #1413",
    check="check_gradients_equal_single_process",
    cause=r"plain mean over ranks: shards are uneven, weight them",
)
def averages_ranks_with_unlike_batches(broken, world):
    """Average the gradients of ranks with equal weights, although rank 0 has 3 samples and rank 1 has 1."""

    def average_gradients(model, num_samples):
        total = torch.tensor(num_samples)
        dist.all_reduce(total)
        weight = 1 / dist.get_world_size() if broken else num_samples / int(total)
        for parameter in model.parameters():
            parameter.grad *= weight
            dist.all_reduce(parameter.grad)

    check_gradients_equal_single_process(net, nn.MSELoss(), shards(3, 1), average_gradients, world)


@entry(
    "scale-in-step-not-backward",
    "DeepSpeed PR #7839",
    check="check_same_trajectory",
    cause="a loss scale of 65536 is removed and never multiplied the loss",
)
def divides_out_a_scale_that_backward_does_not_apply(broken, world):
    """Divide gradients by the loss scale in step(), although backward() does not multiply the loss by it."""

    class Engine:
        def __init__(self, model, cur_scale=65536.0):
            self.module = DistributedDataParallel(model)
            self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            self.cur_scale = cur_scale

        def backward(self, loss):
            if not broken:
                loss = loss * self.cur_scale
            loss.backward()

        def step(self):
            for parameter in self.module.parameters():
                parameter.grad /= self.cur_scale
            self.optimizer.step()
            self.optimizer.zero_grad()

    def train(model, steps):
        engine = Engine(model)
        for batch in batches(steps):
            share = batch.chunk(dist.get_world_size())[dist.get_rank()]
            engine.backward(functional.mse_loss(engine.module(share[:, :3]), share[:, 3:]))
            engine.step()

    def batches(steps):
        return torch.randn(steps, 8, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def plainly(model, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for batch in batches(steps):
            optimizer.zero_grad()
            functional.mse_loss(model(batch[:, :3]), batch[:, 3:]).backward()
            optimizer.step()

    check_same_trajectory(train, plainly, net, world)


@entry(
    "allgather-no-grad",
    "DeCLUTR PR #212, lightly #1977",
    check="check_gradients_equal_single_process",
    cause=r"2 times too small.*a gather in the loss cuts the way back to the outputs of other ranks",
)
def gathers_embeddings_without_their_gradients(broken, world):
    """Gather the embeddings of all ranks by dist.all_gather, which returns no gradients to the other ranks."""

    def all_gather_embeddings(own):
        if not broken:
            return torch.cat(all_gather(own.contiguous()))
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own.detach().contiguous())
        gathered[dist.get_rank()] = own
        return torch.cat(gathered)

    def nt_xent_loss(embeddings, _, temperature=0.5):
        if dist.is_initialized():
            embeddings = all_gather_embeddings(embeddings)
        anchors, positives = embeddings.unbind(1)
        logits = functional.normalize(anchors, dim=-1) @ functional.normalize(positives, dim=-1).T
        return functional.cross_entropy(logits / temperature, torch.arange(len(logits)))

    def average_gradients(model, num_samples):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    pairs = torch.randn(2, 4, 2, 3, generator=torch.Generator().manual_seed(5))
    unused = torch.zeros(4)
    parts = [(part, unused) for part in pairs]
    check_gradients_equal_single_process(lambda: nn.Linear(3, 3), nt_xent_loss, parts, average_gradients, world)


class MultiTokenModel(nn.Module):
    """A language model with a second head for the token after the next."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.heads = nn.ModuleList(nn.Linear(6, VOCABULARY) for _ in range(2))

    def forward(self, tokens):
        hidden = torch.tanh(self.embed(tokens))
        return [head(hidden).flatten(0, 1) for head in self.heads]


@entry(
    "local-token-count-in-branch",
    "Megatron-LM #7452",
    check="check_same_trajectory",
    cause="in parameter 'heads.1.weight' and 1 more, ranks have wrong weights: .* which ignores the numbers of samples",
)
def divides_one_loss_by_the_tokens_of_the_rank(broken, world):
    """Divide the multi-token loss by the tokens of the rank, and the main loss by those of all ranks."""

    def total_tokens(targets):
        total = (targets != IGNORED).sum()
        dist.all_reduce(total)
        return total / dist.get_world_size()  # DDP averages

    def summed(logits, targets):
        return functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")

    def next_targets(targets):
        return functional.pad(targets[:, 1:], (0, 1), value=IGNORED)

    def loss_func(model, tokens, targets, mtp_loss_scaling_factor=0.3):
        main, mtp = model(tokens)
        mtp_targets = next_targets(targets)
        mtp_tokens = (mtp_targets != IGNORED).sum() if broken else total_tokens(mtp_targets)
        loss = summed(main, targets) / total_tokens(targets)
        return loss + mtp_loss_scaling_factor * summed(mtp, mtp_targets) / mtp_tokens

    def train(model, steps):
        model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            optimizer.zero_grad()
            loss_func(model, *own_texts(step)).backward()
            optimizer.step()

    def plainly(model, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            tokens, targets = texts(step)
            mtp_targets = next_targets(targets)
            optimizer.zero_grad()
            main, mtp = model(tokens)
            loss = summed(main, targets) / (targets != IGNORED).sum()
            (loss + 0.3 * summed(mtp, mtp_targets) / (mtp_targets != IGNORED).sum()).backward()
            optimizer.step()

    check_same_trajectory(train, plainly, MultiTokenModel, world)


@entry(
    "hsdp-divide-factor",
    "pytorch fully_shard, set_gradient_divide_factor",
    check="check_same_trajectory",
    cause="the gradients are 2 times too small: divided by .* once too often, or by the 2 ranks of a group, as along",
    judged="partial",
    why="the group is one of three possibilities, and it is not named",
)
def averages_over_replicas_after_the_own_factor(broken, world):
    """Divide the sum over shards by the user's factor, and still take the mean over the replicas of a 2-D mesh."""
    batch_size = 16
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(4, batch_size, 3, generator=generator, dtype=torch.float64)
    targets = inputs.square().sum(2, keepdim=True)

    def reduce_gradient(grad, mesh, divide_factor):
        shard_group, replicate_group = mesh.get_group("shard"), mesh.get_group("replicate")
        shards = dist.get_world_size(shard_group)
        flat = functional.pad(grad.flatten(), (0, -grad.numel() % shards))
        shard = flat.new_empty(len(flat) // shards)
        dist.reduce_scatter_tensor(shard, flat, group=shard_group)
        shard /= divide_factor
        dist.all_reduce(shard, group=replicate_group)
        if broken:
            shard /= dist.get_world_size(replicate_group)
        dist.all_gather_into_tensor(flat, shard, group=shard_group)
        grad.copy_(flat[: grad.numel()].view_as(grad))

    def fit(model, steps, own, reduction, reduce):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for x, y in zip(inputs[:steps], targets[:steps], strict=True):
            optimizer.zero_grad()
            functional.mse_loss(model(x[own]), y[own], reduction=reduction).backward()
            reduce(model)
            optimizer.step()

    def train(model, steps):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

        def reduce(model):
            for parameter in model.parameters():
                reduce_gradient(parameter.grad, mesh, divide_factor=batch_size)

        fit(model, steps, slice(dist.get_rank(), None, dist.get_world_size()), "sum", reduce)

    def plain(model, steps):
        fit(model, steps, slice(None), "mean", lambda model: None)

    check_same_trajectory(train, plain, net, world, world_size=4)
