"""Sessions on sim and gloo, and what their reports say where worlds differ."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

# the inner runs forget the modules that they import: what keeps state must be there before
import pdlcheck.harness.running.processes
import pdlcheck.harness.running.simulated
import pdlcheck.worlds.simulated.own_globals.cause  # noqa: F401

from ..simulated import shared_globals

SECTION = re.compile(r"^-+ worlds differ -+$\n((?:.|\n)*?)(?=^[-_=]{5,}|\Z)", re.MULTILINE)
REPORT = re.compile(r"^_+ (\S.*?) _+$\n((?:.|\n)*?)(?=^_{5,} \S.* _{5,}$|^={5,})", re.MULTILINE)


@pytest.fixture
def run_on_both(pytester):
    """Write a test file beside the programs, run it on both worlds, return the result and the sections by test."""

    def run(source, *options, worlds="sim,gloo"):
        shutil.copy(Path(shared_globals.__file__), pytester.path / "train.py")
        (pytester.path / "train_late.py").write_text("NAME = 'late'\nuses = 0\n")
        pytester.makepyfile("import numpy, pytest, threading, torch, torch.distributed as dist, train\n" + source)
        pytester.syspathinsert()
        result = pytester.runpytest_inprocess("--world", worlds, "-p", "no:cacheprovider", *options)
        sections = {}
        for test, report in REPORT.findall(result.stdout.str()):
            for text in SECTION.findall(report):
                sections[test] = text.rstrip()
        return result, sections

    return run
