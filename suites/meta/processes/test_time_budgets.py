"""All times that worlds and the harness wait stand in one file, each with its purpose."""

from __future__ import annotations

import ast
from pathlib import Path

import pdlcheck
from pdlcheck import time_budgets

PACKAGE = Path(pdlcheck.__file__).parent
STANDARD_LIBRARY_ONLY = {"worlds/mpi/seat.py", "worlds/mpi/supervisor.py"}
BUDGETS = "time_budgets.py"


def constants(source: str) -> list[str]:
    """Return the names that end in ``_S`` and get a number at the top of a file."""
    found = []
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [
            name.id for target in targets if target is not None for name in ast.walk(target) if hasattr(name, "id")
        ]
        found += [name for name in names if name.endswith("_S")]
    return found


def test_no_other_file_has_a_time_of_its_own():
    files = {
        path.relative_to(PACKAGE).as_posix(): path
        for room in ("harness", "item_runners", "launch", "worlds")
        for path in (PACKAGE / room).rglob("*.py")
    }
    assert {name for name, path in files.items() if constants(path.read_text())} == STANDARD_LIBRARY_ONLY


def test_a_time_in_another_file_is_seen():
    assert constants("_GRACE_S = 0.3\n_A_S, B_S = 1.0, 2.0\nC_S: float = 1.0\nTIMES = 3") == [
        "_GRACE_S",
        "_A_S",
        "B_S",
        "C_S",
    ]


def test_each_time_has_a_purpose_and_a_use():
    lines = (PACKAGE / BUDGETS).read_text().splitlines()
    code = "".join(path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "time_budgets.py")
    for name in time_budgets.__all__:
        place = next(number for number, line in enumerate(lines) if line.startswith(f"{name} = "))
        assert lines[place - 1].startswith("# "), f"{name} has no purpose"
        assert name in code, f"nothing uses {name}"
        assert getattr(time_budgets, name) > 0
