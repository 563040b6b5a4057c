"""A peer in its own process, which may take too long, ask for too much memory, or die."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from ranking.peer import Peer

__all__ = ["PeerProcess"]

START_S = 600  # imports on a busy machine; this time does not count as the peer's
FOLDER = Path(__file__).resolve().parents[1]


class PeerProcess:
    """A process that starts with its first request; ``over`` is the reason for its end, if it has ended."""

    def __init__(self, peer: Peer, *, memory_limit: int = 0, threads: int | None = None) -> None:
        self.peer, self.over = peer, ""
        self._memory_limit, self._threads = memory_limit, threads
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, do: str, *, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Return the reply, or ``{"failed": why}`` if the peer raised, died or took longer than ``timeout_s``."""
        if self._process is None:
            self._process = self._start()
            if self._read(START_S) is None:
                return self._end("did not start")
        process = self._process
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return self._end("died")
        line = self._read(timeout_s)
        if not line:
            return self._end(f"over {timeout_s:g} s" if line is None else "died")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _read(self, timeout_s: float) -> bytes | None:
        """Return a line, an empty one if the process has ended, or None if nothing came in time."""
        assert self._process is not None
        assert self._process.stdout is not None
        stream = self._process.stdout
        return stream.readline() if select.select([stream], [], [], timeout_s)[0] else None

    def close(self) -> None:
        if self._process is not None:
            self._end("")

    def _start(self) -> subprocess.Popen[bytes]:
        environment = dict(os.environ)
        if self._threads:
            environment["OMP_NUM_THREADS"] = str(self._threads)
        return subprocess.Popen(
            [sys.executable, "-m", "ranking.child", self.peer.name, str(self._memory_limit)],
            cwd=FOLDER,
            env=environment | {"PYTHONPATH": os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def _end(self, why: str) -> dict[str, Any]:
        process, self._process, self.over = self._process, None, why
        assert process is not None
        process.kill()
        code = process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        return {"failed": f"{why}, exit code {code}" if why == "died" else why}
