"""CUDA code of ranks on the CPU: it runs with ``cuda_as_cpu``; without it and without CUDA, the failure names it."""

from __future__ import annotations

import pytest
import torch

from pdlcheck.errors import Unsupported
from pdlcheck.worlds import get_world
from suites.meta.every_world.cuda_programs import LOUD, QUIET, REFUSED

WORLDS = ("sim", "gloo")


@pytest.fixture(scope="module", params=WORLDS)
def on_cpu(request):
    world = get_world(request.param, cuda_as_cpu=True)
    yield world
    world.close()


@pytest.fixture(scope="module", params=WORLDS)
def without(request):
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA: run this where there is none")
    world = get_world(request.param)
    yield world
    world.close()


def name(program):
    return program.__name__


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("program", [*LOUD, *QUIET], ids=name)
def test_cuda_code_runs_on_the_cpu(on_cpu, program):
    on_cpu.run(program, world_size=2)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true", "ignore:Attempted to get default timeout")
@pytest.mark.parametrize("program", LOUD, ids=name)
def test_without_it_the_failure_names_the_option(without, program):
    with pytest.raises(Exception) as raised:  # noqa: PT011 - each program fails with another error of torch
        without.run(program, world_size=2)
    hints = [note for note in raised.value.__notes__ if "--cuda-as-cpu" in note]
    assert len(hints) == 1, raised.value
    assert "\n" not in hints[0], raised.value
    assert hints[0].startswith("this machine has no CUDA")


@pytest.mark.parametrize("program", REFUSED, ids=name)
def test_what_the_cpu_cannot_do_is_refused_in_one_line(on_cpu, program):
    with pytest.raises(Unsupported, match="no counterpart on the CPU") as raised:
        on_cpu.run(program, world_size=2)
    assert "\n" not in str(raised.value)
