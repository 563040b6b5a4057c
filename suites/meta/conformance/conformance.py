"""Tests of torch's own distributed backends pass on the ranks of every world.

These tests change torch's flags and debug level for all later tests, so pytest collects them only by name:
``pytest suites/meta/conformance/conformance.py --world sim``. ``test_conformance.py`` does so, in separate processes.
Only ``--world mpi`` runs them on MPI, because the backend of their import determines what they test.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress

import pytest

from pdlcheck.errors import Inconclusive
from pdlcheck.faults import Corrupt
from pdlcheck.worlds import get_world

from .torchs_tests import call, names

_AT_ONCE = r"no rank can go on: 1 of \d are blocked"  # raised at once; torch's test would wait
_GROUPS = r"make different groups: new_group\(\d\) and new_group\(\d\)"  # see docs/findings/subgroups_of_a_group.md
_NAMES = r"'(sim|pdlcheck_mpi)' != '(gloo|mpi)'"
_PROCESSES = r"Expected \d but got 1"  # the test counts processes

# world -> test -> expected error
DIFFERENT = {
    "sim": {
        "test_barrier_timeout_full_group": _AT_ONCE,
        "test_barrier_timeout_group": _AT_ONCE,
        "test_ddp_logging_data_cpu": _NAMES,
        "test_get_rank": _PROCESSES,
        "test_new_subgroups_with_group_param": _GROUPS,
    },
    "gloo": {"test_barrier_timeout_full_group": _AT_ONCE, "test_new_subgroups_with_group_param": _GROUPS},
    "mpi": {"test_get_backend": _NAMES, "test_new_subgroups_with_group_param": _GROUPS},
}


def pytest_generate_tests(metafunc):
    if "torchs" in metafunc.fixturenames:
        metafunc.parametrize("torchs", names(_backend(metafunc.config)))


def _backend(config):
    return "mpi" if config.getoption("--pdl-world") == "mpi" else "gloo"


@pytest.mark.isolation("reinit")  # some tests break the default group
@pytest.mark.filterwarnings("ignore")  # torch's tests use names that torch has renamed
def test_a_test_of_torchs(world, torchs, request, tmp_path):
    (tmp_path / "test_dir").mkdir()
    name = world.name
    backend = _backend(request.config)
    if name == "mpi" != backend:
        pytest.skip("torch's tests are of one backend: pytest --world mpi, alone")
    says = DIFFERENT.get(name, DIFFERENT[backend]).get(torchs)  # a world of another package is like its backend
    with nullcontext() if says is None else pytest.raises(Exception, match=says):
        world.run(call, torchs, backend, str(tmp_path), world_size=8 if name == "sim" else 4)


# tests of torch that check nothing on rank 1; see docs/findings/tests_that_see_nothing.md
BLIND = [
    *(f"test_all_reduce_{how}" for how in ("max", "min", "product", "sum", "sum_async", "sum_complex")),
    *(f"test_all_reduce_full_group_{how}" for how in ("max", "min", "product", "sum")),
    "test_batch_isend_irecv_gloo",
    "test_batch_isend_irecv_gloo_tags",
]


@pytest.fixture
def of_gloo(request):
    if _backend(request.config) != "gloo":
        pytest.skip("torch's tests were imported for another backend")


def seen_by(torchs, folder):
    """Return rank 1's operations whose results the test notices when they become NaN, and those that it misses."""
    noticed, missed = [], []
    for number in range(1, 6):  # 0 makes our own group
        ranks = get_world("sim", faults=[Corrupt(1, number)])
        with suppress(Inconclusive):  # the operation writes nothing, or the test has fewer operations
            try:
                ranks.run(call, torchs, "gloo", folder, world_size=4)
            except AssertionError:
                noticed.append(number)
            else:
                missed.append(number)
    return noticed, missed


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_output_fails_a_test_of_torchs(of_gloo, tmp_path):
    assert seen_by("test_all_gather", str(tmp_path)) == ([1, 2, 3, 4], [])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("blind", BLIND)
def test_but_not_all_of_them(of_gloo, blind, tmp_path):
    noticed, missed = seen_by(blind, str(tmp_path))
    assert not noticed
    assert missed
