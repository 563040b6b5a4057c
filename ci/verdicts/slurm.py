"""A temporary Slurm cluster of a few nodes on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["missing", "slurm_cluster"]

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "scontrol")
START_S = 30
CONFIGURATION = """
ClusterName=pdlcheck
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
MpiDefault=none
PartitionName=all Nodes=ALL Default=YES State=UP
"""
NODE = "NodeName=node{k} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 CoresPerSocket=8 State=UNKNOWN\n"


def missing() -> str:
    """Return what this machine lacks for a cluster, with an install command; empty if nothing."""
    if os.geteuid() == 0 and all(map(shutil.which, PROGRAMS)):
        return ""
    return "needs root and Slurm: apt-get install slurmctld slurmd slurm-client munge"


@contextlib.contextmanager
def slurm_cluster(nodes: int) -> Iterator[dict[str, str]]:
    """Start a cluster, yield the variables that ``srun`` needs to find it, and stop it with all its processes."""
    host = socket.gethostname().partition(".")[0]
    with tempfile.TemporaryDirectory(prefix="pdlcheck-slurm-") as name, contextlib.ExitStack() as running:
        folder, ports = Path(name), _free_ports(1 + nodes)
        configuration = CONFIGURATION.format(host=host, ports=ports, folder=folder)
        for k in range(nodes):
            configuration += NODE.format(k=k, host=host, port=ports[1 + k])
        (folder / "slurm.conf").write_text(configuration)
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)
        (folder / "state").mkdir()
        variables = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        own = [f"--{what}={folder}/munge.{what.partition('-')[0]}" for what in ("socket", "pid-file", "seed-file")]
        log = f"--log-file={folder}/munge.log"
        _start(running, folder, ["munged", "--foreground", "--force", f"--key-file={folder}/key", *own, log], variables)
        _await((folder / "munge.socket").exists, folder)
        _start(running, folder, ["slurmctld", "-D"], variables)
        for k in range(nodes):
            _start(running, folder, ["slurmd", "-D", "-N", f"node{k}"], variables)
        _await(lambda: _told(["sinfo", "--noheader", "--format=%t %D"], variables) == f"idle {nodes}", folder)
        yield {"SLURM_CONF": variables["SLURM_CONF"]}


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _start(running: contextlib.ExitStack, folder: Path, command: list[str], variables: dict[str, str]) -> None:
    output = running.enter_context((folder / "output").open("a"))
    process = subprocess.Popen(
        command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    running.callback(_stop, process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _await(condition: Callable[[], bool], folder: Path) -> None:
    until = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > until:
            logs = "".join(f"\n{path.name}:\n{path.read_text()[-1000:]}" for path in sorted(folder.glob("*.log")))
            raise TimeoutError(f"Slurm has not started within {START_S} s{logs}")
        time.sleep(0.1)


def _told(command: list[str], variables: dict[str, str]) -> str:
    return subprocess.run(command, env=variables, capture_output=True, text=True).stdout.strip()
