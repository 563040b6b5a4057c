"""Snapshots that syrupy cannot see, because rank processes use them, are not deleted by its option."""

from __future__ import annotations

OPTION = """
def pytest_addoption(parser): parser.addoption("--snapshot-update", action="store_true", dest="update_snapshots")
"""


def test_snapshots_are_updated_on_sim_alone(run, pytester):
    pytester.makeconftest(OPTION)
    source = "@W\ndef test_it(rank): pass\n"
    run(source, "--snapshot-update", world="sim").assert_outcomes(passed=1)
    run(source, world="gloo").assert_outcomes(passed=1)
    result = run(source, "--snapshot-update", world="sim,gloo")
    result.stderr.fnmatch_lines(["*syrupy does not see what ranks in processes compare, *update with --world sim"])
