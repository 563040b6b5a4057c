"""Distributed checkpoints: the loaded state equals the saved state."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from pdlcheck.errors import Unsupported

from .columns import SEMANTICS
from .entry import WORLD_SIZE, Feature, everywhere
from .models import batch, full, make_adam, make_model, mesh, plain, train


@contextmanager
def shared_folder() -> Iterator[str]:
    """Yield a temporary folder, the same on every rank; remove it after all ranks have left."""
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    try:
        dist.broadcast_object_list(path)
        yield path[0]
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(path[0])


def sharded(where=None):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(make_model(), mesh=where or mesh(WORLD_SIZE))


def other_weights(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    return model


def save_and_load(in_background=False):
    import torch.distributed.checkpoint as dcp

    with shared_folder() as path:
        model = sharded()
        if in_background:
            dcp.async_save({"model": model.state_dict()}, checkpoint_id=path).result()
            dist.barrier()
        else:
            dcp.save({"model": model.state_dict()}, checkpoint_id=path)
        again = other_weights(sharded())
        state = {"model": again.state_dict()}
        dcp.load(state, checkpoint_id=path)
        again.load_state_dict(state["model"])
        return full(again)


def load_on_two_ranks():
    """Save on four ranks, load on ranks 2 and 3."""
    import torch.distributed.checkpoint as dcp

    with shared_folder() as path:
        model = sharded()
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)
        pair = mesh(2, 2)
        if dist.get_rank() < 2:
            return None
        again = other_weights(sharded(pair["shard"]))
        state = {"model": again.state_dict()}
        dcp.load(state, checkpoint_id=path, process_group=pair.get_group("shard"))
        again.load_state_dict(state["model"])
        return full(again)


def saved():
    return everywhere(plain(make_model()))


def resume_with_the_optimizer():
    """Train three steps, save model and Adam, load new ones, train three more steps."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    with shared_folder() as path:
        model = sharded()
        optimizer = make_adam(model.parameters())
        train(model, optimizer)
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)
        again = other_weights(sharded())
        fresh = make_adam(again.parameters())
        weights, states = get_state_dict(again, fresh)
        state = {"model": weights, "optimizer": states}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(again, fresh, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        train(again, fresh)
        return full(again)


def resume_alone():
    model = make_model()
    optimizer = make_adam(model.parameters())
    for _ in range(2):
        train(model, optimizer, batch)
    return everywhere(plain(model))


NO_THREADS = {
    "errors": dict.fromkeys(SEMANTICS, Unsupported),
    "why": "it saves in a thread of its own, which is no simulated rank",
}

FEATURES = [
    Feature("DCP save, load", save_and_load, saved),
    Feature("DCP async_save, load", partial(save_and_load, in_background=True), saved, **NO_THREADS),
    Feature("DCP save on 4 ranks, load on 2", load_on_two_ranks, lambda: [None, None, *saved()[2:]]),
    Feature("DCP of model and optimizer, resume", resume_with_the_optimizer, resume_alone),
]
