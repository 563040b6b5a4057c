"""A session on sim and gloo: the report names a wide fixture that simulated ranks share if the worlds differ by it."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("only_this_file")

SHARED = "simulated ranks share fixtures of wider than function scope, each process sets up its own."
WIDE = """
import random
pytestmark = pytest.mark.world_size(2)

@pytest.fixture(scope="module")
def settings():
    return {"depth": 1}

@pytest.fixture(scope="class")
def seen(settings):
    return []

@pytest.fixture(scope="session")
def name():
    return random.SystemRandom().random()

@pytest.fixture(scope="module")
def together():
    dist.barrier()

@pytest.fixture(scope="module")
def counter():
    return [0]

@pytest.fixture(scope="module")
def once():
    assert threading.current_thread() not in once_in, "set up twice"
    once_in.append(threading.current_thread())

once_in = []
"""


def test_a_wider_fixture_that_ranks_share_is_named(run_on_both):
    result, sections = run_on_both(
        WIDE
        + """
def test_changed_by_ranks(settings, seen, rank):
    seen.append(rank)
    dist.barrier()
    assert seen == [rank] and settings["depth"] == 1

def test_drawn_by_each_process(name):
    of_all = [None, None]
    dist.all_gather_object(of_all, name)
    assert of_all[0] == of_all[1]

def test_ranks_wait_in_it(together, settings):
    pass

class TestSetUp:
    @classmethod
    def setup_class(cls):
        dist.barrier()

    def test_in_a_class(self):
        pass
"""
    )
    result.assert_outcomes(failed=2, errors=2, passed=4)
    file = "test_a_wider_fixture_that_ranks_share_is_named.py"
    own = "A fixture of function scope is each rank's own in every world."
    of_sim = f"fails on sim, passes on gloo: {SHARED}\nWith one of its own for each rank it passes on sim too"
    drawn = sections.pop("test_drawn_by_each_process[gloo-2]").splitlines()
    assert sections == {
        "test_changed_by_ranks[sim-2]": f"{of_sim}\n  seen  scope class, {file}:10\n{own}",
        "ERROR at setup of test_ranks_wait_in_it[sim-2]": f"{of_sim}\n  together  scope module, {file}:18\n{own}",
        "ERROR at setup of TestSetUp.test_in_a_class[sim-2]": f"{of_sim}\n  setup_class  scope class\n{own}",
    }
    assert drawn[0] == f"passes on sim, fails on gloo: {SHARED}"
    assert drawn[1].startswith("With one of its own for each rank it fails on sim too: assert 0.")
    assert drawn[2:3] == [f"  name  scope session, {file}:14"]
    assert drawn[3].startswith("On processes let rank 0 make what all ranks are to have and broadcast it")


def test_a_wider_fixture_is_not_blamed_for_a_difference_of_another_kind(run_on_both):
    result, sections = run_on_both(
        WIDE
        + """
def test_needs_threads(once, settings):
    if threading.current_thread() is threading.main_thread():
        raise OSError("no thread")

def test_first(counter):
    counter[0] += 1

def test_counts_on_the_test_before(counter):
    counter[0] += 1
    assert counter[0] == 2
"""
    )
    result.assert_outcomes(failed=2, passed=4)
    other = sections["test_needs_threads[gloo-2]"].splitlines()
    assert other[0] == (
        "passes on sim, fails on gloo, and not because simulated ranks share globals of your modules or fixtures of "
        "wider scope, as far as those can be told apart."
    )
    assert sections["test_counts_on_the_test_before[sim-2]"].splitlines()[:2] == [
        "fails on sim, passes on gloo: simulated ranks share fixtures of wider than function scope that tests before "
        "it have used, too.",
        "Whether that is the reason was not found out, as a test runs again without those before it.",
    ]
