"""The catalogue of faulty programs: each fault is found with its lines, and correct programs raise no alarm."""

from __future__ import annotations

import inspect
import re

import pytest

from pdlcheck.errors import BufferHazard, Unsupported
from pdlcheck.worlds import get_world
from pdlcheck.worlds.semantics import PROFILES

from ..clone import ROOT
from . import FAULTS, INNOCENT, KINDS
from .entry import lines_named_by

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

SEEDS = 3
PAGE = ROOT / "docs" / "catalogue.md"
every_profile = pytest.mark.parametrize("profile", sorted(PROFILES))


def run(program, *args, world_size, profile, seed):
    return get_world("sim", seed=seed, semantics=profile).run(program, *args, world_size=world_size)


def first_error(fault, profile):
    """Return the error of the faulty program under the first schedule that fails, if one does."""
    for seed in range(fault.schedules):
        try:
            run(fault.program, False, world_size=fault.world_size, profile=profile, seed=seed)
        except Exception as error:
            return error
    return None


@every_profile
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found_with_its_lines(fault, profile):
    error, verdict = first_error(fault, profile), fault.verdict_under(profile)
    assert type(error) is (type(None) if verdict is None else verdict)
    if verdict in (None, Unsupported):
        return
    if profile in fault.under or profile == "buffered":  # a sender may have continued before the verdict
        assert lines_named_by(error)
        assert lines_named_by(error) <= fault.lines()
        return
    assert lines_named_by(error) == fault.lines()
    assert {name: getattr(error, name) for name in fault.fields} == fault.fields
    assert re.search(fault.says, str(error))
    if verdict is BufferHazard:
        assert {error.posted.rpartition("/")[2]} == fault.lines("posts")
        assert {error.touched.rpartition("/")[2]} == fault.lines("touches")
        assert error.operation in str(error)


@every_profile
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_right_twin_is_silent(fault, profile):
    if fault.under.get(profile) is Unsupported:
        pytest.skip(f"the twin is refused there too: {fault.why}")
    for seed in range(SEEDS):
        world = get_world("sim", seed=seed, semantics=profile)
        if verdict := fault.twin_under.get(profile):
            with pytest.raises(verdict):
                world.run(fault.program, True, world_size=fault.world_size)
            continue
        world.run(fault.program, True, world_size=fault.world_size)
        if "store" not in inspect.getsource(fault.program):
            assert world.traffic.messages(), f"the twin of {fault.name} sends nothing: of course it is silent"


@every_profile
@pytest.mark.parametrize(("program", "expected"), INNOCENT, ids=lambda value: getattr(value, "__name__", ""))
def test_what_only_looks_faulty_is_silent(program, expected, profile):
    for seed in range(SEEDS):
        assert run(program, world_size=2, profile=profile, seed=seed) == [expected] * 2


@pytest.fixture(scope="module")
def gloo():
    world = get_world("gloo")
    yield world
    world.close()


@pytest.mark.parametrize(("program", "expected"), INNOCENT, ids=lambda value: getattr(value, "__name__", ""))
def test_what_only_looks_faulty_is_silent_on_watched_gloo(gloo, program, expected):
    assert gloo.run(program, world_size=2) == [expected] * 2


def test_the_catalogue_is_whole():
    found = [fault for fault in FAULTS if fault.verdict_under("rendezvous") is not None]
    assert len(found) >= 100
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {fault.file for fault in FAULTS} == {f"{module.__name__.rpartition('.')[2]}.py" for module in KINDS}
    for fault in FAULTS:
        assert fault.what, f"{fault.name} needs a docstring"
        assert fault.lines(), f"{fault.name} needs marked lines"
        assert bool(fault.under) == bool(fault.why), f"{fault.name}: say why a profile differs"


@pytest.mark.skipif(not PAGE.exists(), reason="needs docs/catalogue.md: run the suites in a clone of the repository")
def test_the_page_lists_every_program_with_its_verdict():
    rows = [re.split(r" (?<!\\)\| ", line) for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    told = {row[0].strip("| `"): (row[1].replace("\\|", "|"), row[3]) for row in rows}
    expected = {
        fault.name: (fault.what, getattr(fault.verdict_under("rendezvous"), "__name__", "no fault")) for fault in FAULTS
    }
    assert len(rows) == len(FAULTS)
    assert told == expected, "run `python ci/catalogue.py --write`"
