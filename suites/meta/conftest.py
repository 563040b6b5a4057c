"""Fixtures that several files of these tests share."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch._dynamo  # noqa: F401 - optimizers import it; inner runs forget imports, and torch fails on a second

# Inner runs forget the modules that they import, so modules with state must be imported before.
import pdlcheck.item_runners.processes.items
import pdlcheck.item_runners.simulated.items  # noqa: F401

HEAD = """
import logging, os, random, sys, time, warnings
import numpy, pytest, torch, torch.distributed as dist
W = pytest.mark.world_size(2)
"""


@pytest.fixture(autouse=True, scope="session")
def one_server_for_a_session_of_its_own():
    """Give each program that a test starts a hash seed, so one server forks its ranks, not two: a third less time."""
    start = subprocess.Popen.__init__

    def popen(self, args, *rest, env=None, **more):
        environment = {"PYTHONHASHSEED": "0"} | dict(os.environ if env is None else env)
        start(self, args, *rest, env=environment, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", popen)
        yield


@pytest.fixture
def run(pytester):
    """Return a function that writes a test file and runs it on rank processes in its own pytest session."""

    def run(source, *options, world="gloo", new_process=False, **files):
        pytester.makepyfile(test_inner=HEAD + source, **files)
        start = pytester.runpytest_subprocess if new_process else pytester.runpytest_inprocess
        # an inner run in this process finds the files of a project that is installed in place already imported
        quiet = ("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning")
        return start("--world", world, "-p", "no:cacheprovider", *options, *quiet)

    return run


@pytest.fixture
def system(tmp_path):
    """Return a function that writes files of a Linux system, by path from the root, and returns the root."""

    def write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return write


@pytest.fixture
def only_this_file(request, monkeypatch):
    """Remove the other files of these tests with thousands of globals, which would count as the user's modules."""
    needed = [request.module, *vars(request.module).values()]
    for name, module in list(sys.modules.items()):
        if name.startswith("suites.") and not hasattr(module, "__path__") and module not in needed:
            monkeypatch.delitem(sys.modules, name)
