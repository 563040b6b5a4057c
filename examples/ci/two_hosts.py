"""Run a Python module under torchrun on two simulated hosts of this machine, connected at a given rate.

    sudo python two_hosts.py --rate 1gbit 4 -m pytest test_step.py
    sudo python two_hosts.py --rate 10gbit 2 -m pdlcheck bench comm --ranks 2 --json bench.json

A host is a network namespace. The cable between the hosts is a pair of veth devices; tc limits its rate in both
directions. The first half of the ranks runs on the first host. The script needs root, iproute2 (``ip`` and ``tc``)
and Linux. The namespaces have no names and end with their processes, so they leave nothing behind. The exit code is
that of the first host.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import secrets
import subprocess
import sys

_ADDRESSES = ("10.213.7.1", "10.213.7.2")
_PORT = 29_512
_CLONE_NEWNET = 0x40000000


def main() -> int:
    """Run the module on both hosts; return the exit code of the first host."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", help="of the cable in each direction, such as 1gbit; default: no limit")
    parser.add_argument("ranks", type=int, help="on both hosts together")
    parser.add_argument("module", nargs=argparse.REMAINDER, help="what each rank runs: -m MODULE ARGUMENT ...")
    arguments = parser.parse_args()
    if arguments.ranks < 2 or not arguments.module:
        parser.error(f"needs 2 ranks or more and a module, got {arguments.ranks} and {arguments.module}")
    os.environ.setdefault("PDLCHECK_LAUNCH_KEY", secrets.token_hex(16))
    _enter_a_network()
    here = (arguments.ranks + 1) // 2
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        _enter_a_network()
        os.write(ready[1], b".")
        os.read(go[0], 1)
        os.close(go[1])
        _plug_in("there", _ADDRESSES[1], arguments.rate)
        os._exit(_torchrun(1, arguments.ranks - here, arguments.module).wait())
    os.read(ready[0], 1)
    _run("ip", "link", "add", "name", "here", "type", "veth", "peer", "name", "there", "netns", str(pid))
    _plug_in("here", _ADDRESSES[0], arguments.rate)
    os.write(go[1], b".")
    exitcode = _torchrun(0, here, arguments.module).wait()
    os.waitpid(pid, 0)
    return exitcode


def _enter_a_network() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "a network of its own needs root")
    _run("ip", "link", "set", "lo", "up")


def _plug_in(name: str, address: str, rate: str | None) -> None:
    """Give this end of the cable its address and rate, and make the ranks' libraries use it."""
    if rate is not None:
        _run("tc", "qdisc", "add", "dev", name, "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
    _run("ip", "addr", "add", f"{address}/24", "dev", name)
    _run("ip", "link", "set", name, "up")
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name


def _run(*words: str) -> None:
    subprocess.run(words, check=True)


def _torchrun(node: int, processes: int, module: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)]
    command += ["--nproc-per-node", str(processes), "--master-addr", _ADDRESSES[0], "--master-port", str(_PORT)]
    return subprocess.Popen([*command, *module])


if __name__ == "__main__":
    sys.exit(main())
