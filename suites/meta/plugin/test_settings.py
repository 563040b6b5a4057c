"""Settings of torch, numpy and decimal in files and wider fixtures hold on every rank in every test."""

from __future__ import annotations

import pytest

from ..conftest import HEAD

LOOK = """
import decimal

def found():
    try:
        numpy.float64(1) / numpy.float64(0)
        raises = False
    except FloatingPointError:
        raises = True
    return str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.ones(1).device.type, raises, str(
        decimal.Decimal(1) / 3
    )
"""
BODIES = """
@W
def test_first(rank): assert found() == SET

@W
def test_second(rank, tmp_path): assert found() == SET

def test_function(world): assert world.run(found, world_size=2)[0][:2] == SET[:2]

def test_plain(): assert found() == SET

@W
def test_third(rank):
    dist.barrier()
    assert found() == SET
"""
SET = "SET = 'torch.float64', False, 'meta', True, '0.33333'"
SETS = """torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    numpy.seterr(divide="raise")
    decimal.getcontext().prec = 5
"""
TAKES_BACK = """torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_default_device(None)
    numpy.seterr(divide="ignore")
    decimal.getcontext().prec = 28
"""


@pytest.fixture(autouse=True)
def as_before():
    """Restore the settings, because the inner runs share this process."""
    import decimal

    import numpy
    import torch

    before = torch.get_default_dtype(), torch.is_grad_enabled(), numpy.geterr(), decimal.getcontext().prec
    yield
    torch.set_default_dtype(before[0])
    torch.set_grad_enabled(before[1])
    torch.set_default_device(None)
    numpy.seterr(**before[2])
    decimal.getcontext().prec = before[3]


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_what_conftest_files_set_holds_in_every_test(run, pytester, world):
    """Regression test: they held in no test on simulated ranks, and on processes only in the first."""
    pytester.makeconftest("import decimal, numpy, torch\n" + SETS.replace("\n    ", "\n"))
    source = f"{LOOK}\n{SET}\n{BODIES}"
    result = run(source, world=world, test_more=HEAD + source)
    result.assert_outcomes(passed=10)


@pytest.mark.parametrize("scope", ["module", "session"])
@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_what_wider_fixtures_set_holds_until_they_end(run, world, scope):
    source = f"""
{LOOK}
SET = {"('torch.float64', False, 'meta', True, '0.33333')"}
UNSET = ("torch.float32", True, "cpu", False, "0.3333333333333333333333333333")

@W
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_before(rank): assert found() == UNSET

@pytest.fixture(scope="{scope}")
def settings():
    {SETS}
    yield
    {TAKES_BACK}

@W
def test_first(rank, settings): assert found() == SET

@W
def test_second(rank): assert found() == SET

@W
def test_third(rank, settings, tmp_path):
    dist.barrier()
    assert found() == SET
"""
    after = f"""
import numpy, pytest, torch
W = pytest.mark.world_size(2)
{LOOK}
@W
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_after(rank): assert (found()[0] == "torch.float32") is {scope == "module"}
"""
    run(source, world=world, test_later=after).assert_outcomes(passed=5)


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_what_a_test_sets_is_forgotten(run, world):
    result = run(
        f"""
{LOOK}
{SET}
UNSET = ("torch.float32", True, "cpu", False, "0.3333333333333333333333333333")
numpy.seterr(divide="ignore")

def change():
    {SETS}

@W
def test_sets(rank):
    change()
    dist.barrier()
    assert found() == SET

@W
def test_next(rank): assert found() == UNSET

@pytest.fixture
def narrow():
    change()
    torch.set_default_dtype(torch.bfloat16)

@W
def test_fixture(rank, narrow): assert found() == ("torch.bfloat16", *SET[1:])

@W
def test_after_a_fixture(rank): assert found() == UNSET

def change_one():
    if dist.get_rank():
        change()
    dist.barrier()
    return found()

def test_functions(world):
    assert world.run(change_one, world_size=2) == [UNSET, SET]
    assert world.run(found, world_size=2) == [UNSET] * 2

@W
def test_last(rank): assert found() == UNSET

def test_plain(): assert found() == UNSET
""",
        world=world,
    )
    result.assert_outcomes(passed=7)
