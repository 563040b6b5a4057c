"""Runs a Python module under torchrun on two hosts: two network namespaces of this machine, and a cable between them.

Usage: python two_hosts.py WORLD_SIZE -m MODULE ...

Needs root and `ip`. The namespaces have no names and end with their processes.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import subprocess
import sys

_ADDRESSES = ("10.213.7.1", "10.213.7.2")
_PORT = 29_512
_CLONE_NEWNET = 0x40000000


def main() -> int:
    """Run it; return the exit code of the first host."""
    size, module = int(sys.argv[1]), sys.argv[2:]
    _enter_a_network()
    here = (size + 1) // 2
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        _enter_a_network()
        os.write(ready[1], b".")
        os.read(go[0], 1)
        os.close(go[1])
        _name_the_end("there", _ADDRESSES[1])
        os._exit(_torchrun(1, max(size - here, 1), module).wait())
    os.read(ready[0], 1)
    _ip("link", "add", "here", "type", "veth", "peer", "name", "there", "netns", str(pid))
    _name_the_end("here", _ADDRESSES[0])
    os.write(go[1], b".")
    exitcode = _torchrun(0, here, module).wait()
    os.waitpid(pid, 0)
    return exitcode


def _enter_a_network() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "a network of its own needs root")
    _ip("link", "set", "lo", "up")


def _name_the_end(name: str, address: str) -> None:
    _ip("addr", "add", f"{address}/24", "dev", name)
    _ip("link", "set", name, "up")
    os.environ["GLOO_SOCKET_IFNAME"] = name


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _torchrun(node: int, processes: int, module: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)]
    command += ["--nproc-per-node", str(processes), "--master-addr", _ADDRESSES[0], "--master-port", str(_PORT)]
    command += module
    return subprocess.Popen(command)


if __name__ == "__main__":
    os.environ.setdefault("PDLCHECK_LAUNCH_KEY", secrets.token_hex(16))
    sys.exit(main())
