"""The programs that end alike on simulated ranks and on gloo also do so on ranks of MPI."""

from __future__ import annotations

import pytest

from pdlcheck.worlds import get_world

from ..needs_mpi import needs_mpi
from . import NOT_ON_MPI, ONLY_SIM, REFUSALS, SAME, TRAINING
from .comparing import name, of_this_torch, on_both, refuses, same_weights

pytestmark = [needs_mpi, pytest.mark.filterwarnings("ignore")]  # torch renames functions from release to release

# where gloo differs, MPI behaves like simulated ranks
AS_SIMULATED = [program for program in (*SAME, *ONLY_SIM) if program not in NOT_ON_MPI]


@pytest.fixture(scope="module")
def worlds():
    both = get_world("sim"), get_world("mpi", isolation="reinit")
    yield both
    for world in both:
        world.close()


@pytest.mark.parametrize("program", of_this_torch(AS_SIMULATED), ids=name)
def test_a_program_returns_the_same_bits_on_mpi(worlds, program):
    simulated, real = on_both(worlds, program)
    assert simulated == real


@pytest.mark.parametrize("program", of_this_torch(REFUSALS), ids=name)
def test_what_torch_refuses_is_refused_on_every_rank_of_mpi(worlds, program):
    simulated, real = on_both(worlds, program)
    assert simulated == real
    assert "accepted" not in str(real)


@pytest.mark.parametrize("program", [program for program in TRAINING if program not in NOT_ON_MPI], ids=name)
def test_training_ends_with_the_same_weights_on_mpi(worlds, program):
    same_weights(program, *(world.run(program, world_size=4) for world in worlds))


@pytest.mark.parametrize(("program", "refusal"), NOT_ON_MPI.items(), ids=name)
def test_what_mpi_does_not_do(worlds, program, refusal):
    sim, mpi = worlds
    assert sim.run(program, world_size=4)
    refuses(mpi, program, refusal)
