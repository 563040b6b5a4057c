"""A pytest plugin for the runs of the campaign: it sends the outside signals and records the reports of pytest.

It runs in the controller. It records the reports that pytest itself shows, and the processes and descriptors that exist
besides the ranks that the session needs.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from fault_campaign.faults import PATIENT_S
from fault_campaign.leftovers import descendants, lives_on, open_files, state_of
from pdlcheck.harness.collection import cases
from pdlcheck.worlds import registry
from pdlcheck.worlds.processes.controller import forkserver

_STRAY_S = 1.0


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faults")
    group.addoption("--faults-record", metavar="FILE")
    group.addoption("--faults-moments", metavar="FOLDER")
    group.addoption("--faults-watch", type=int, default=1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "strike(number, when, *, kind, rank, signo, after_s, size): signal from outside")
    config.addinivalue_line("markers", "limit(seconds): the ranks' time limit in this test")
    if any(os.environ.get(name, "0") != "0" for name in ("RANK", "OMPI_COMM_WORLD_RANK")):
        return  # rank 0 of a launch runs the session
    if config.getoption("faults_record") and not config.stash.get(cases.IN_RANK, False):
        config.pluginmanager.register(_Recorder(config))


class _Recorder:
    def __init__(self, config: pytest.Config) -> None:
        self._file = Path(config.getoption("faults_record"))
        self._moments = Path(config.getoption("faults_moments"))
        self._worlds: list[Any] = []  # each world at most once
        self._files = 0
        # the other processes of a launch wait until these have ended
        self._links = 4 * int(os.environ.get("WORLD_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", "0")))
        name = config.getoption("--pdl-world")
        own = {} if name == "sim" else {"watch": bool(config.getoption("faults_watch"))}
        honest = registry.WORLDS[name]

        def make(**options: Any) -> Any:
            self._worlds.append(honest(**options | own | {"timeout_s": PATIENT_S}))
            return self._worlds[-1]

        registry.WORLDS[name] = make

    def pytest_sessionstart(self) -> None:
        self._files = len(open_files())
        self._write(event="start")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        self._write(event="test", test=item.name)
        limit = item.get_closest_marker("limit")
        for world in self._worlds:
            world.timeout_s = limit.args[0] if limit else PATIENT_S
        for mark in item.iter_markers("strike"):
            if mark.args[1] == "between_tests":
                self._strike(mark)
                time.sleep(mark.kwargs["after_s"] / 10)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        marks = [mark for mark in item.iter_markers("strike") if mark.args[1] == "in_call"]
        for mark in marks:
            self._worlds[0].pids(mark.kwargs["size"])  # a test of the controller has no ranks yet
        timers = [threading.Timer(mark.kwargs["after_s"] + 0.02, self._strike, [mark]) for mark in marks]
        for timer in timers:
            timer.start()
        try:
            return (yield)
        finally:
            for timer in timers:
                timer.cancel()
                timer.join()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        at = time.monotonic()
        strays = self._strays() if report.when == "teardown" else []
        name = report.nodeid.rpartition("::")[2].partition("[")[0]
        self._write(
            event="report",
            test=name,
            when=report.when,
            outcome=report.outcome,
            at=at,
            text="\n".join([report.longreprtext, *(said for _, said in report.sections)]),
            said=report.capstderr,
            strays=strays,
        )

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        forkserver.stop()  # as at the end of the process
        files = open_files()
        are_more = len(files) > self._files + self._links + 2
        self._write(event="end", files=files if are_more else [], threads=threading.active_count())

    # -- inside ------------------------------------------------------------------------------------

    def _all_pools(self) -> list[dict[int, Any]]:
        return [getattr(world, "_pools", {}) for world in self._worlds]  # simulated ranks have no pools

    def _pools(self) -> dict[int, Any]:
        return {size: pool for pools in self._all_pools() for size, pool in pools.items() if pool.is_usable}

    def _strike(self, mark: pytest.Mark) -> None:
        number, rank, size = mark.args[0], mark.kwargs["rank"], mark.kwargs["size"]
        if mark.kwargs["kind"] == "stop-server":
            for server in forkserver._running.pids:  # type: ignore[union-attr]
                os.kill(server, signal.SIGSTOP)
        pid = self._server() if mark.kwargs["kind"] == "kill-server" else self._pools()[size].pids[rank]
        (self._moments / str(number)).write_text(repr(time.monotonic()))
        os.kill(pid, getattr(signal, mark.kwargs["signo"]))
        while mark.kwargs["signo"] == "SIGSTOP" and state_of(pid) not in "TZX":
            time.sleep(0.001)  # the server's threads may still answer until then

    def _server(self) -> int:
        return forkserver._running.pid  # type: ignore[union-attr]

    def _strays(self) -> list[str]:
        """Return processes that the session started and does not need; a killed process may take a moment to end."""
        until = time.monotonic() + _STRAY_S
        while True:
            needed = {pid for pool in self._pools().values() for pid in (*pool.pids, *_mpiexec(pool))}
            if forkserver._running is not None:
                needed.update(forkserver._running.pids)
            others = {pid: name for pid, name in descendants(os.getpid()).items() if pid not in needed}
            strays = [f"process {pid} ({name})" for pid, name in others.items() if not lives_on(pid)]
            if not strays or time.monotonic() > until:
                return strays
            time.sleep(0.01)

    def _write(self, **record: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(record) + "\n")


def _mpiexec(pool: Any) -> list[int]:
    """Return the processes of the mpiexec run that the ranks belong to; empty without MPI."""
    shared = getattr(pool._placement, "_job", None)
    if shared is None:
        return []
    supervisor = shared._job.pid
    return [supervisor, *descendants(supervisor)]
