"""Flags that torch keeps in C++ for the process, and its context managers set: each simulated rank has its own."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize

from pdlcheck.worlds import get_world

FLAGS = {
    "attention": (lambda: sdpa_kernel(SDPBackend.MATH), torch.backends.cuda.flash_sdp_enabled),
    "anomaly": (lambda: torch.autograd.set_detect_anomaly(True, check_nan=False), torch.is_anomaly_check_nan_enabled),
    "mkldnn": (lambda: torch.backends.mkldnn.flags(enabled=False), lambda: torch.backends.mkldnn.enabled),
}


@pytest.fixture
def sim():
    return get_world("sim")


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize(("enter", "read"), FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("who", [{0}, {1}, {0, 1, 2}])
def test_a_context_manager_of_one_rank_is_of_that_rank(sim, enter, read, who):
    """Regression test: the first rank to leave disabled it for the others, and the last one left it set."""
    before = read()

    def program():
        found = []
        if dist.get_rank() in who:
            with enter():
                for _ in range(3):
                    dist.barrier()
                    found.append(read())
        else:
            for _ in range(3):
                dist.barrier()
                found.append(read())
        dist.barrier()
        return found, read()

    for schedule in ("first", "random:1", "random:2"):
        ranks = get_world("sim", schedule=schedule).run(program, world_size=3)
        assert ranks == [([before is not (rank in who)] * 3, before) for rank in range(3)]
        assert read() is before


def test_what_a_rank_sets_and_leaves_is_gone_with_it(sim):
    def program():
        if dist.get_rank():
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.set_float32_matmul_precision("high")
        dist.barrier()
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        return torch.are_deterministic_algorithms_enabled(), warns, torch.get_float32_matmul_precision()

    assert sim.run(program, world_size=2) == [(False, False, "highest"), (True, True, "high")]
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"


def test_ranks_begin_with_the_flags_of_the_controller(sim):
    with sdpa_kernel(SDPBackend.MATH):
        assert sim.run(torch.backends.cuda.flash_sdp_enabled, world_size=2) == [False, False]
    assert sim.run(torch.backends.cuda.flash_sdp_enabled, world_size=2) == [True, True]


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_cached_parametrizations_are_a_ranks_own(sim):
    def program():
        layer = nn.Linear(1, 1, bias=False)
        parametrize.register_parametrization(layer, "weight", Twice())
        if dist.get_rank() == 0:
            with parametrize.cached():
                held = layer.weight
                dist.barrier()
                dist.barrier()
                return layer.weight is held
        dist.barrier()
        held = layer.weight
        same = layer.weight is held
        dist.barrier()
        return same

    assert sim.run(program, world_size=2) == [True, False]


def test_each_rank_sets_the_start_method_of_multiprocessing_once(sim, monkeypatch):
    monkeypatch.setattr("multiprocessing.context._default_context._actual_context", None)  # others may have set it

    def program(method):
        found = [multiprocessing.get_start_method(allow_none=True)]
        multiprocessing.set_start_method(method)
        dist.barrier()
        with pytest.raises(RuntimeError, match="context has already been set"):
            multiprocessing.set_start_method(method)
        return [*found, multiprocessing.get_start_method()]

    for method in ("spawn", "forkserver"):
        assert sim.run(program, method, world_size=3) == [[None, method]] * 3
    assert sim.run(lambda: multiprocessing.get_start_method(allow_none=True), world_size=2) == [None] * 2
    assert multiprocessing.get_start_method(allow_none=True) is None
