"""The leftovers that a pytest run must not have: processes, listening ports, shared memory, files."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LIVES_ON", "SHARED_MEMORY", "Before", "descendants", "lives_on", "open_files", "state_of"]

_PATIENCE_S = 2.0  # the kernel ends a killed process a moment after the kill
# torch creates the first when torch._dynamo is imported, and keeps it by design; the second is torchrun's log folder
_TORCHS_OWN = ("torchinductor_", "torchelastic_")
SHARED_MEMORY = Path("/dev/shm")
LIVES_ON = "FAULTS_LIVES_ON"  # set for a process that may live as long as its rank
_LISTENING = "0A"


@dataclass(frozen=True)
class Before:
    """The state of the machine before a run.

    Args:
        token: a text in the environment of the run and of every process that it starts.
        folder: the run's folder for temporary files.
        shared: the folder that the run uses as /dev/shm.
    """

    token: str
    folder: Path
    shared: Path
    sockets: frozenset[str]
    memory: frozenset[str]

    @classmethod
    def look(cls, token: str, folder: Path, shared: Path) -> Before:
        """Record the state of the machine."""
        return cls(token, folder, shared, frozenset(_listening()), frozenset(_shared_memory(shared)))

    def left(self) -> list[str]:
        """Return descriptions of everything that appeared and stays; empty if nothing does."""
        until = time.monotonic() + _PATIENCE_S
        while True:
            found = [*self._processes(), *self._ports(), *self._memory(), *self._files()]
            if not found or time.monotonic() > until:
                return found
            time.sleep(0.02)

    def processes(self) -> list[int]:
        """Return the live processes of the run."""
        return [pid for pid in _pids() if self.token in _environment(pid) and state_of(pid) not in "ZX"]

    def _processes(self) -> list[str]:
        return [f"process {pid} ({_command(pid)})" for pid in self.processes()]

    def _ports(self) -> list[str]:
        """Return new listening sockets whose owner is a process of the run, or hides its environment."""
        new = {inode: port for inode, port in _listening().items() if inode not in self.sockets}
        left = []
        for pid in _pids() if new else []:
            environment = _environment(pid)
            if self.token in environment or not environment:
                inodes = [target.removeprefix("socket:[").removesuffix("]") for target in _targets(pid)]
                left += [f"listening port {new[inode]}" for inode in inodes if inode in new]
        return left

    def _memory(self) -> list[str]:
        """Return new files of shared memory, except those in a common /dev/shm that a foreign process holds."""
        new = _shared_memory(self.shared) - self.memory
        if new and self.shared == SHARED_MEMORY:
            for pid in _pids():
                if self.token not in _environment(pid):
                    held = _text(f"/proc/{pid}/maps") + " ".join(_targets(pid))
                    new = {name for name in new if f"/dev/shm/{name}" not in held}
        return [f"/dev/shm/{name}" for name in sorted(new)]

    def _files(self) -> list[str]:
        return [f"file {path.name}" for path in self.folder.iterdir() if not path.name.startswith(_TORCHS_OWN)]


def descendants(pid: int) -> dict[int, str]:
    """Return the live descendants of ``pid``, with their names."""
    parents = {}
    for other in _pids():
        fields = _stat(other)
        if fields and fields[1] not in "ZX":
            parents[other] = (int(fields[2]), fields[0])
    found: dict[int, str] = {}
    todo = [pid]
    while todo:
        above = todo.pop()
        for other, (parent, name) in parents.items():
            if parent == above:
                found[other] = name
                todo.append(other)
    return found


def lives_on(pid: int) -> bool:
    """Return whether a rank started the process on purpose and may keep it."""
    return f"{LIVES_ON}=" in _environment(pid)


def open_files() -> list[str]:
    """Return the targets of the descriptors of this process."""
    return sorted(_targets(os.getpid()))


def state_of(pid: int) -> str:
    """Return the state letter of a process as ps shows it; X if there is no such process."""
    return (_stat(pid) or ["", "X"])[1]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> list[str]:
    """Return name, state and parent of a process; empty if there is no such process."""
    head, _, tail = _text(f"/proc/{pid}/stat").rpartition(")")
    return [head.partition("(")[2], *tail.split()[:2]] if tail else []


def _environment(pid: int) -> str:
    return _text(f"/proc/{pid}/environ")


def _command(pid: int) -> str:
    return _text(f"/proc/{pid}/cmdline").replace("\0", " ")[:100]


def _targets(pid: int) -> list[str]:
    found = []
    try:
        fds = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # the process has ended, or belongs to another user
        return []
    for fd in fds:
        with contextlib.suppress(OSError):  # closed meanwhile
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _listening() -> dict[str, str]:
    """Map the inode of every listening TCP socket to its port."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in _text(f"/proc/net/{name}").splitlines()[1:]]
    return {row[9]: str(int(row[1].rpartition(":")[2], 16)) for row in rows if row[3] == _LISTENING}


def _shared_memory(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()
