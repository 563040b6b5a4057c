"""The option ``--cuda-as-cpu``, its ini value, and the hint that names it when it is missing."""

from __future__ import annotations

import pytest
import torch

SOURCE = """
from torch.cuda import set_device

@W
def test_on_ranks(rank, world_size, device):
    set_device(rank)
    assert torch.ones(2).cuda().device == torch.device("cuda", rank)
    assert torch.cuda.device_count() == world_size
    print("the device", device)

def test_called(world):
    assert world.run(lambda: torch.ones(2).to("cuda").is_cuda, world_size=2) == [True, True]

def test_in_the_controller():
    assert set_device is torch.cuda.set_device and set_device.__module__ == "torch.cuda"
    assert torch.cuda.device_count() == HERE
""".replace("HERE", str(torch.cuda.device_count()))
WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


@pytest.mark.parametrize("world", ["sim", "gloo"])
@pytest.mark.parametrize("option", ["--cuda-as-cpu", "--pdl-cuda-as-cpu"])
def test_with_the_option_cuda_code_runs(run, world, option):
    run(SOURCE, option, world=world).assert_outcomes(passed=3)


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_with_the_ini_value_cuda_code_runs(run, pytester, world):
    pytester.makeini("[pytest]\npdlcheck_cuda_as_cpu = true")
    run(SOURCE, world=world).assert_outcomes(passed=3)


@WITHOUT_CUDA
@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_without_it_the_failure_names_it_in_one_line(run, world):
    result = run(SOURCE, world=world)
    result.assert_outcomes(passed=1, failed=2)
    hint = "E  *this machine has no CUDA (*); --cuda-as-cpu, or get_world(*, cuda_as_cpu=True), runs the CUDA code*"
    result.stdout.fnmatch_lines([hint])
    hints = [line for line in result.outlines if "this machine has no CUDA" in line and line.startswith("E")]
    assert len(hints) == 2, hints  # one for each failure


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_failure_of_other_code_names_no_option(run, world):
    result = run("@W\ndef test_f(rank): raise RuntimeError('the loss is not finite')", world=world)
    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("*cuda-as-cpu*")


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_the_fixture_names_a_device_of_its_own_where_that_is_asked_for(run, world):
    source = """
@W
def test_f(rank, device):
    assert device == torch.device("cuda", rank) and torch.cuda.current_device() == rank
    assert torch.ones(2, device=device).device == device
"""
    run(source, "--cuda-as-cpu", "--rank-device", "cuda", world=world).assert_outcomes(passed=1)


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_what_the_cpu_cannot_do_is_refused_and_replayed_with_the_option(run, world):
    result = run("@W\ndef test_f(rank): torch.cuda.CUDAGraph()", "--cuda-as-cpu", world=world)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E  *Unsupported: torch.cuda.CUDAGraph has no counterpart on the CPU, *; call the function without a graph",
            "pytest * --cuda-as-cpu",
        ]
    )


@WITHOUT_CUDA
def test_what_it_does_not_cover_says_so(run):
    result = run("@W\ndef test_f(rank): torch.cuda.get_sync_debug_mode()", "--cuda-as-cpu", world="sim")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E  *--cuda-as-cpu does not cover this call; docs/cuda-as-cpu.md lists *"])


def test_ranks_of_nccl_need_devices(run):
    result = run("@W\ndef test_f(rank): pass", "--cuda-as-cpu", "-rs", world="nccl")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*--world gloo --cuda-as-cpu*"])


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_fixtures_of_ranks_run_cuda_code(run, world):
    source = """
@pytest.fixture
def model(rank):
    torch.cuda.set_device(rank)
    yield torch.nn.Linear(2, 2).cuda()
    assert torch.cuda.is_available() and torch.cuda.current_device() == rank

@W
def test_f(rank, model):
    assert model.weight.device == torch.device("cuda", rank) == torch.ones(1, device="cuda").device
"""
    run(source, "--cuda-as-cpu", world=world).assert_outcomes(passed=1)
