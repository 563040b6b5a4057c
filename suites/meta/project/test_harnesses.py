"""The page that compares harnesses claims only what a test shows about pdlcheck."""

from __future__ import annotations

import ast
import re
import socket

import pytest
import torch
import torch.distributed as dist

from pdlcheck.worlds import get_world

from ..clone import ROOT

PAGE = ROOT / "docs" / "harnesses.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="needs docs/: run the suites in a clone of the repository")


def _table(head):
    """Return the rows under the table head that begins with this text, as lists of cells."""
    lines = PAGE.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(head)) + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" |")])
    return rows


def _ours():
    """Map each feature to (mark, tests) of our column."""
    marks = {row[0]: row[1] for row in _table("| feature | ours")}
    tests = {row[0]: (row[1], re.findall(r"`(suites/\S+?\.py)::(\w+)`", row[2])) for row in _table("| feature | what")}
    assert list(marks) == list(tests), "both tables list the same features in the same order"
    return {feature: (marks[feature], *tests[feature]) for feature in marks}


def _defined(path):
    return {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_cell_of_ours_names_tests_that_exist():
    for feature, (mark, words, tests) in _ours().items():
        if mark == "-":
            assert words.startswith("open: "), f"{feature}: say what is open"
            assert not tests, f"{feature}: tests back it, so the mark is not '-'"
            continue
        assert tests, f"{feature}: marked {mark}, and no test backs it"
        for path, name in tests:
            assert (ROOT / path).exists(), f"{feature}: there is no {path}"
            assert name in _defined(path), f"{feature}: {path} has no {name}"


def test_every_row_has_a_mark_for_every_harness():
    columns = len(_table("| column | harness")) + 1
    for row in _table("| feature | ours"):
        assert len(row) == columns, f"{row[0]}: {len(row) - 1} marks for {columns - 1} harnesses"
        assert set(row[1:]) <= {"Y", "p", "-", "n/a"}, f"{row[0]}: an unknown mark"


def _sum_over_ranks(value):
    total = torch.tensor([value])
    dist.all_reduce(total)
    return total.item()


def test_pools_side_by_side_do_not_meet_nor_mind_a_taken_port(monkeypatch):
    one, other = get_world("gloo"), get_world("gloo")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        try:
            with one.open(2) as mine, other.open(2) as theirs:
                assert mine.run(_sum_over_ranks, 1) == [2, 2]
                assert theirs.run(_sum_over_ranks, 10) == [20, 20]
                assert not set(mine.pids) & set(theirs.pids)
        finally:
            one.close()
            other.close()
