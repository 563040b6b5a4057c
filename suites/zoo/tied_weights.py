"""Bugs of tied weights: two copies that train apart, and gradients that are added at other places."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from pdlcheck.checks import check_pipeline, check_same_trajectory

from .entry import entry

VOCABULARY, WIDTH = 8, 4


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.block = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.tie_weights()

    def tie_weights(self):
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.block(self.embed(tokens)).tanh())


def texts(step, size=4):
    tokens = torch.randint(0, VOCABULARY, (size, 6), generator=torch.Generator().manual_seed(step))
    return tokens, tokens.roll(-1, 1)


def token_loss(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_steps(model, steps, size=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        tokens, targets = texts(step, size)
        optimizer.zero_grad()
        token_loss(model(tokens), targets).backward()
        optimizer.step()


class Stage(nn.Module):
    """A stage: the first has the embedding and the block, the last has its own copy of the embedding."""

    def __init__(self, model, is_first):
        super().__init__()
        self.is_first = is_first
        for name in ("embed", "block") if is_first else ("head",):
            self.add_module(name, getattr(model, name))

    @property
    def shared_weight(self):
        return self.embed.weight if self.is_first else self.head.weight

    def forward_backward(self, tokens, targets, peer, share=1.0):
        if self.is_first:
            hidden = self.block(self.embed(tokens)).tanh()
            dist.send(hidden.detach(), peer)
            grad = torch.empty_like(hidden)
            dist.recv(grad, peer)
            hidden.backward(grad)
            return None
        hidden = torch.empty(*tokens.shape, WIDTH, dtype=self.head.weight.dtype)
        dist.recv(hidden, peer)
        loss = token_loss(self.head(hidden.requires_grad_()), targets)
        (loss * share).backward()
        dist.send(hidden.grad, peer)
        return loss.detach()


@entry(
    "tp-embedding-tied-pp",
    "piper #13",
    check="check_pipeline",
    cause="gradients of the tied copies were not added",
)
def leaves_out_the_embedding_group(broken, world):
    """Both the first and the last stage train their own copy of the tied embedding."""

    def start(model):
        rank = dist.get_rank()
        stage = Stage(model, is_first=rank == 0)

        def train_step(tokens, targets):
            micro = list(zip(tokens.chunk(2), targets.chunk(2), strict=True))
            losses = [stage.forward_backward(*one, 1 - rank, 1 / len(micro)) for one in micro]
            if not broken:
                dist.all_reduce(stage.shared_weight.grad)
            return (sum(losses) / len(micro), None) if rank else None

        return stage, train_step

    batches = [texts(step, size) for step, size in enumerate((4, 4, 6))]
    check_pipeline(start, LanguageModel, token_loss, batches, world, world_size=2, n_microbatches=2)


class DistributedOptimizer:
    """Momentum on this rank's slice of the flat gradients of a stage."""

    def __init__(self, stage, group):
        self.parameters, self.group = list(stage.parameters()), group
        self.ranks = dist.get_world_size(group)
        self.main = nn.Parameter(self.own(self.flat()).clone())
        self.inner = torch.optim.SGD([self.main], lr=0.1, momentum=0.9)

    def flat(self, of=lambda parameter: parameter.detach()):
        flat = torch.cat([of(parameter).flatten() for parameter in self.parameters])
        return functional.pad(flat, (0, -len(flat) % self.ranks))

    def own(self, flat):
        return flat.chunk(self.ranks)[dist.get_rank(self.group)]

    def reduce_scatter(self):
        """Leave the mean in this rank's slice of the gradients, and the local gradient elsewhere."""
        buffer = self.flat(lambda parameter: parameter.grad)
        mean = torch.empty_like(self.own(buffer))
        dist.reduce_scatter_tensor(mean, buffer / self.ranks, group=self.group)
        self.own(buffer).copy_(mean)
        self.scatter(buffer, lambda parameter: parameter.grad)

    def step(self):
        self.main.grad = self.own(self.flat(lambda parameter: parameter.grad)).clone()
        self.inner.step()
        gathered = self.main.new_empty(len(self.main) * self.ranks)
        dist.all_gather_into_tensor(gathered, self.main.detach(), group=self.group)
        self.scatter(gathered, lambda parameter: parameter.detach())

    def scatter(self, flat, to):
        at = 0
        for parameter in self.parameters:
            to(parameter).copy_(flat[at : at + parameter.numel()].view_as(parameter))
            at += parameter.numel()


@entry(
    "tied-dist-opt-order",
    "Megatron-LM #844",
    check="check_same_trajectory",
    cause="ranks went apart: a gradient was not synchronised",
    judged="partial",
    why="it does not say that the sum over stages took unlike slices",
)
def adds_the_embeddings_after_the_reduce_scatter(broken, world):
    """Tied embeddings are added after the reduce-scatter, when the stages hold unlike slices."""

    def train(model, steps):
        rank = dist.get_rank()
        data_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        embedding_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        stage_rank, data_rank = divmod(rank, 2)
        stage = Stage(model, is_first=stage_rank == 0)
        optimizer = DistributedOptimizer(stage, data_groups[stage_rank])
        for step in range(steps):
            stage.zero_grad()
            tokens, targets = texts(step)
            stage.forward_backward(tokens[data_rank::2], targets[data_rank::2], peer=(rank + 2) % 4)
            if broken:
                optimizer.reduce_scatter()
            dist.all_reduce(stage.shared_weight.grad, group=embedding_groups[data_rank])
            if not broken:
                optimizer.reduce_scatter()
            optimizer.step()
        for parameter in model.block.parameters():  # as for a checkpoint of the whole model
            dist.broadcast(parameter.detach(), 0)

    check_same_trajectory(train, plain_steps, LanguageModel, world, world_size=4)


@entry(
    "tied-broken-by-to-empty",
    "accelerate #3154",
    check="check_same_trajectory",
    cause="embed.weight and head.weight are one tensor in plain_steps, and are no longer tied",
)
def materialises_each_module_alone(broken, world):
    """Materialisation from the meta device, module by module, does not tie the weights again."""

    def load_deferred(model):
        checkpoint = model.state_dict()
        model.to("meta")
        for module in model.modules():
            module.to_empty(device="cpu", recurse=False)
        if not broken:
            model.tie_weights()
        model.load_state_dict(checkpoint)

    def train(model, steps):
        load_deferred(model)
        ddp = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        for step in range(steps):
            tokens, targets = texts(step)
            own = slice(dist.get_rank(), None, dist.get_world_size())
            optimizer.zero_grad()
            token_loss(ddp(tokens[own]), targets[own]).backward()
            optimizer.step()

    check_same_trajectory(train, plain_steps, LanguageModel, world)


class Unshard(torch.autograd.Function):
    """The whole weight in the forward pass, and the mean of its gradient on this rank's rows in the backward pass."""

    @staticmethod
    def forward(ctx, shard, padded):
        ctx.rows, ctx.padded_rows = len(shard), len(padded)
        return gather_rows(padded)[:VOCABULARY]

    @staticmethod
    def backward(ctx, grad):
        ranks = dist.get_world_size()
        own = grad.new_empty(ctx.padded_rows, WIDTH)
        padding = ctx.padded_rows * ranks - VOCABULARY
        dist.reduce_scatter_tensor(own, functional.pad(grad, (0, 0, 0, padding)) / ranks)
        return own[: ctx.rows], None


def gather_rows(padded):
    whole = padded.new_empty(len(padded) * dist.get_world_size(), WIDTH)
    dist.all_gather_into_tensor(whole, padded)
    return whole


@entry(
    "tied-shard-padded-twice",
    "pytorch fully_shard",
    check="check_same_trajectory",
    cause="ranks agree, and 8 elements keep their start, .*, as where one copy is updated and another one is read",
    judged="partial",
    why="two copies are one of three possibilities, and the buffer is not named",
)
def gathers_an_old_copy_of_the_padded_shard(broken, world):
    """Each of two tied modules pads the short shard into a buffer of its own, and only the last one is trained."""
    world_size = 3

    def padded_buffer(shard, rows):
        padded = None if broken else getattr(shard, "padded", None)
        if padded is None and len(shard) < rows:
            padded = shard.new_zeros(rows, WIDTH)
            padded[: len(shard)] = shard.data
            shard.data, shard.padded = padded[: len(shard)], padded
        return shard.data if padded is None else padded

    def train(model, steps):
        chunks = model.embed.weight.detach().chunk(world_size)
        shard = nn.Parameter(chunks[dist.get_rank()].clone())
        embed_rows, head_rows = (padded_buffer(shard, len(chunks[0])) for _ in range(2))
        optimizer = torch.optim.SGD([shard, *model.block.parameters()], lr=0.1, momentum=0.9)
        for step in range(steps):
            tokens, targets = (part.chunk(world_size)[dist.get_rank()] for part in texts(step, 6))
            optimizer.zero_grad()
            hidden = model.block(functional.embedding(tokens, Unshard.apply(shard, embed_rows))).tanh()
            token_loss(hidden @ Unshard.apply(shard, head_rows).T, targets).backward()
            for parameter in model.block.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
            optimizer.step()
        model.embed.weight.data.copy_(gather_rows(embed_rows)[:VOCABULARY])

    check_same_trajectory(train, partial(plain_steps, size=6), LanguageModel, world, world_size=world_size)
