"""``pdlcheck verify --subject`` requires the contract of a user's function, and nothing more."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

RIGHT = """
import torch
import torch.distributed as dist


def all_gather(tensor, group=None):
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


def reduce_scatter(tensor, group=None):
    parts = [part.contiguous() for part in tensor.tensor_split(dist.get_world_size(group))]
    own = torch.empty_like(parts[dist.get_rank(group)])
    dist.reduce_scatter(own, parts, group=group)
    return own


def broadcast_parameters(module, src=0, group=None):
    for tensor in [*module.parameters(), *module.buffers()]:
        sent = tensor.detach().contiguous()
        dist.broadcast(sent, src, group=group)
        tensor.detach().copy_(sent)


def average_parameters(module, group=None):
    for tensor in [*module.parameters(), *module.buffers()]:
        total = tensor.detach().contiguous().clone()
        dist.all_reduce(total, group=group)
        tensor.detach().copy_(total / dist.get_world_size(group))


def sync_gradients(model):
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
"""
WRONG = """
import torch
import torch.distributed as dist


def all_reduce(tensor, group=None):
    dist.reduce(tensor, dist.get_global_rank(group or dist.group.WORLD, 0), group=group)


def broadcast(tensor, src=0, group=None):
    dist.all_reduce(tensor, group=group)


def all_gather(tensor, group=None):
    return [tensor.clone() for _ in range(dist.get_world_size(group))]


def reduce_scatter(tensor, group=None):
    return tensor.tensor_split(dist.get_world_size(group))[dist.get_rank(group)].clone()


def broadcast_parameters(module, src=0, group=None):
    for tensor in module.parameters():
        dist.broadcast(tensor.detach(), src, group=group)


def average_parameters(module, group=None):
    for tensor in module.parameters():
        dist.all_reduce(tensor.detach(), group=group)


def sync_gradients(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
"""
OF_TORCH = {
    "ring_all_reduce": "torch.distributed:all_reduce",
    "star_broadcast": "torch.distributed:broadcast",
    "tree_broadcast": "torch.distributed:broadcast",
    "clip_grad_norm": "torch.nn.utils:clip_grad_norm_",
    "fp16_compress": "torch.distributed.algorithms.ddp_comm_hooks.default_hooks:fp16_compress_hook",
}
OF_TORCH_BY_HAND = {
    "ring_all_gather": "right:all_gather",
    "ring_reduce_scatter": "right:reduce_scatter",
    "broadcast_parameters": "right:broadcast_parameters",
    "average_parameters": "right:average_parameters",
    "sync_gradients": "right:sync_gradients",
}
WRAPPER = {"DistributedDataParallel": "torch.nn.parallel:DistributedDataParallel"}
BROKEN = {
    "ring_all_reduce": "wrong:all_reduce",
    "tree_broadcast": "wrong:broadcast",
    "ring_all_gather": "wrong:all_gather",
    "ring_reduce_scatter": "wrong:reduce_scatter",
    "broadcast_parameters": "wrong:broadcast_parameters",
    "average_parameters": "wrong:average_parameters",
    "sync_gradients": "wrong:sync_gradients",
}


@pytest.fixture
def verify(tmp_path):
    """Return a function that runs the command in a folder with both modules; subjects are named by their primitive."""
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)

    def verify(subjects, world):
        command = [sys.executable, "-m", "pdlcheck", "verify", "--world", world, "--examples", "2"]
        command += [part for name, target in subjects.items() for part in ("--subject", f"{name}={target}")]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    return verify


def verdicts(output, world):
    """Map each primitive to the verdict in its row of the table."""
    return dict(re.findall(rf"^(\w+) +{world} +\d+ propert.*? s  (\w+)", output, re.M))


@pytest.mark.slow
@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_right_functions_of_torch_hold(verify, world):
    subjects = OF_TORCH | OF_TORCH_BY_HAND | WRAPPER  # 600 tests, slower on processes
    if world == "gloo":
        subjects = {name: subjects[name] for name in ("ring_all_reduce", "broadcast_parameters", "sync_gradients")}
    found = verify(subjects, world)
    assert found.returncode == 0, found.stdout + found.stderr
    assert verdicts(found.stdout, world) == dict.fromkeys(subjects, "holds")
    told = " ".join(found.stdout.split())
    assert "beyond the contract of ring_all_reduce: error messages; not asked of torch.distributed:all_reduce" in told
    assert "not in the contract of sync_gradients: parameter weight, which right:sync_gradients does not have" in told


@pytest.mark.slow
def test_broken_functions_fail_each_on_its_own_and_what_is_not_tested_does_not_hold(verify):
    found = verify(BROKEN | {"parse_schedule": "right:sync_gradients"}, "sim")
    assert found.returncode == 1
    assert verdicts(found.stdout, "sim") == dict.fromkeys(BROKEN, "FAILS")
    words = "every test was skipped: nothing is known of parse_schedule=right:sync_gradients"
    assert words in " ".join(found.stdout.split())
