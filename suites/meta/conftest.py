"""What several files of these tests have in common."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch._dynamo  # noqa: F401 - optimizers import it; what inner runs import they forget, and torch cannot twice

# the inner runs forget the modules that they import: what keeps state must be there before
import pdlcheck.harness.running.processes
import pdlcheck.harness.running.simulated  # noqa: F401

HEAD = """
import logging, os, random, sys, time, warnings
import numpy, pytest, torch, torch.distributed as dist
W = pytest.mark.world_size(2)
"""


@pytest.fixture(autouse=True, scope="session")
def one_server_for_a_session_of_its_own():
    """A program that a test starts has a hash seed: one server forks its ranks, not two. It takes a third less time."""
    start = subprocess.Popen.__init__

    def popen(self, args, *rest, env=None, **more):
        environment = {"PYTHONHASHSEED": "0"} | dict(os.environ if env is None else env)
        start(self, args, *rest, env=environment, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", popen)
        yield


@pytest.fixture
def run(pytester):
    """Write a test file, run it on rank processes in a pytest of its own."""

    def run(source, *options, world="gloo", new_process=False, **files):
        pytester.makepyfile(test_inner=HEAD + source, **files)
        start = pytester.runpytest_subprocess if new_process else pytester.runpytest_inprocess
        # in this process, and where the project is installed in place, pytest finds its files imported already
        quiet = ("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning")
        return start("--world", world, "-p", "no:cacheprovider", *options, *quiet)

    return run


@pytest.fixture
def system(tmp_path):
    """Writes files of a Linux system, by their path from the root, and returns the root."""

    def write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return write


@pytest.fixture
def only_this_file(request, monkeypatch):
    """The other files of these tests, thousands of globals, are not there: they would count as the user's modules."""
    needed = [request.module, *vars(request.module).values()]
    for name, module in list(sys.modules.items()):
        if name.startswith("suites.") and not hasattr(module, "__path__") and module not in needed:
            monkeypatch.delitem(sys.modules, name)
