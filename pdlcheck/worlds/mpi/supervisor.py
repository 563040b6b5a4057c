"""The parent of one mpiexec: it ends mpiexec together with its controller and removes all files of mpiexec.

mpiexec removes its files when it is asked to end, but not when it is killed. So they lie in folders of their own. The
program needs only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

__all__ = ["main"]

_END_S = 3.0
_PR_SET_PDEATHSIG = 1


def main(folders: Sequence[str], command: Sequence[str]) -> int:
    """Run ``command`` until it or standard input ends; then remove ``folders``, and return its exit code."""
    for signo in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signo, signal.SIG_IGN)  # the end of standard input is the only way to end
    wake_r, wake_w = socket.socketpair()
    wake_w.setblocking(False)
    signal.set_wakeup_fd(wake_w.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        mpiexec = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent)
        select.select([sys.stdin, wake_r], [], [])
        with contextlib.suppress(ProcessLookupError):
            mpiexec.terminate()
        try:
            return mpiexec.wait(_END_S)
        except subprocess.TimeoutExpired:
            mpiexec.kill()
            return mpiexec.wait()
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _end_with_parent() -> None:
    for signo in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signo, signal.SIG_DFL)
    if sys.platform == "linux":
        # On other systems, mpiexec outlives a supervisor that is killed.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    split = sys.argv.index("--")
    os._exit(main(sys.argv[1:split], sys.argv[split + 1 :]) & 0xFF)
