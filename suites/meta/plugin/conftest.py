"""Sessions on sim and gloo, and the sections of their reports where worlds differ."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

# Inner runs forget the modules that they import, so modules with state must be imported before.
import pdlcheck.item_runners.processes.items
import pdlcheck.item_runners.simulated.items
import pdlcheck.worlds.simulated.module_globals.cause  # noqa: F401

from ..simulated import shared_globals

SECTION = re.compile(r"^-+ worlds differ -+$\n((?:.|\n)*?)(?=^[-_=]{5,}|^pdlcheck: |\Z)", re.MULTILINE)
REPORT = re.compile(r"^_+ (\S.*?) _+$\n((?:.|\n)*?)(?=^_{5,} \S.* _{5,}$|^={5,})", re.MULTILINE)


@pytest.fixture
def run_on_both(pytester):
    """Return a function that runs a test file on both worlds, and returns the result and the sections by test."""

    def run(source, *options, worlds="sim,gloo", fresh=False):
        shutil.copy(Path(shared_globals.__file__), pytester.path / "train.py")
        (pytester.path / "train_late.py").write_text("NAME = 'late'\nuses = 0\n")
        pytester.makepyfile("import numpy, pytest, threading, torch, torch.distributed as dist, train\n" + source)
        pytester.syspathinsert()
        run_pytest = pytester.runpytest_subprocess if fresh else pytester.runpytest_inprocess
        result = run_pytest("--world", worlds, "-p", "no:cacheprovider", *options)
        sections = {}
        for test, report in REPORT.findall(result.stdout.str()):
            for text in SECTION.findall(report):
                sections[test] = text.rstrip()
        return result, sections

    return run
