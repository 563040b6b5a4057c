"""Run one file of thirty tests in every world and under every launcher; each test's name states its verdict.

    python ci/same_verdicts.py [--only TEXT]

Prints one line for each way to run the file. Two hosts (examples/ci/two_hosts.py) need root and iproute2. For srun a
Slurm cluster is started, which needs root and Slurm. A way that this machine cannot run is reported, and is no failure.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from verdicts import slurm

HERE = Path(__file__).parent
TESTS = HERE / "verdicts" / "test_thirty.py"
DYING = HERE / "verdicts" / "test_dying.py"
PYTHON = sys.executable
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-o", "addopts=", "--color=no"]
TWO_HOSTS = HERE.parent / "examples" / "ci" / "two_hosts.py"
LIMIT_S = 300
EXPECTED_EXIT = 1  # some tests fail on purpose


@dataclass(frozen=True)
class Way:
    """One way to run the file; ``run`` takes pytest's arguments and returns exit codes and text."""

    name: str
    run: Callable[[list[str]], tuple[list[int], str]]
    arguments: list[str]
    missing: str = ""


def command(*words: str, **variables: str) -> Callable[[list[str]], tuple[list[int], str]]:
    """Return a function that runs one command with pytest's arguments at its end."""

    def run(arguments: list[str]) -> tuple[list[int], str]:
        done = subprocess.run(
            [*words, *PYTEST, *arguments],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
        )
        return [done.returncode], done.stdout + done.stderr

    return run


def torchrun(*options: str) -> list[str]:
    return [PYTHON, "-m", "torch.distributed.run", *options]


def srun(*options: str) -> Callable[[list[str]], tuple[list[int], str]]:
    """Return a function that runs the file on a Slurm cluster whose two nodes are both this machine."""

    def run(arguments: list[str]) -> tuple[list[int], str]:
        with slurm.slurm_cluster(nodes=2) as variables:
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29578"} if "--nodes=2" in options else {}
            return command("srun", *options, PYTHON, **variables, **place)(arguments)

    return run


def on_ray(arguments: list[str]) -> tuple[list[int], str]:
    """Run the file on a Ray cluster whose two nodes are both this machine."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=2)
        return command(PYTHON, RAY_ADDRESS=cluster.address)(arguments)
    finally:
        cluster.shutdown()


def ways() -> list[Way]:
    scripts = f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}"
    mpiexec = shutil.which("mpiexec", path=scripts)
    no_mpi = "" if mpiexec and importlib.util.find_spec("mpi4py") else "needs MPI: pip install 'pdlcheck[mpi]'"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    no_ray = "" if importlib.util.find_spec("ray") else "needs Ray: pip install 'pdlcheck[ray]'"
    no_xdist = "" if importlib.util.find_spec("xdist") else "needs pytest-xdist"
    no_hosts = "" if os.geteuid() == 0 and shutil.which("ip") else "needs root and iproute2"
    return [
        Way("--world sim", command(PYTHON), ["--world", "sim"]),
        Way("--world gloo", command(PYTHON), ["--world", "gloo"]),
        Way("--world mpi", command(PYTHON, **root), ["--world", "mpi"], no_mpi),
        Way("--world ray, two nodes", on_ray, ["--world", "ray"], no_ray),
        Way("-n 2 --world gloo", command(PYTHON), ["-n", "2", "--world", "gloo"], no_xdist),
        Way("torchrun --nproc-per-node 4", command(*torchrun("--nproc-per-node=4")), []),
        Way("mpiexec -n 4", command(mpiexec or "", "-n", "4", "--oversubscribe", PYTHON, **root), [], no_mpi),
        Way("torchrun on two hosts, 2 + 2", command(PYTHON, str(TWO_HOSTS), "4"), [], no_hosts),
        Way("srun -n 4", srun("-n", "4", "--nodes=1"), [], slurm.missing()),
        Way("srun on two nodes, 3 + 1", srun("-n", "4", "--nodes=2", "--mpi=pmi2"), [], slurm.missing()),
    ]


def verdicts(path: Path) -> dict[str, str]:
    """Map each test name without its world to its verdict in the JUnit file; a repeated test is an error."""
    found: dict[str, str] = {}
    for case in ET.parse(path).getroot().iter("testcase"):
        name = (
            (case.get("name") or "")
            .replace("[sim", "[")
            .replace("[gloo", "[")
            .replace("[mpi", "[")
            .replace("[ray", "[")
        )
        verdict = "passed"
        for child in case:
            if child.tag in ("failure", "error"):
                verdict = "failed" if child.tag == "failure" else "error"
            elif child.tag == "skipped":
                verdict = "xfailed" if child.get("type") == "pytest.xfail" else "skipped"
        found[name] = verdict if name not in found else "reported twice"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="ways whose name contains TEXT")
    only = parser.parse_args().only
    wrong = 0
    for way in ways():
        if only not in way.name:
            continue
        print(f"{way.name:30}", end="", flush=True)
        if way.missing:
            print(way.missing)
            continue
        wrong += judge(way)
    print("all verdicts are the expected ones" if not wrong else f"{wrong} ways differ")
    return 1 if wrong else 0


def judge(way: Way) -> int:
    """Run the file one way, print differences, and return 1 if there are any."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        files = [str(TESTS)] if "sim" in way.name else [str(TESTS), str(DYING)]
        start = time.perf_counter()
        codes, text = way.run([*way.arguments, f"--junitxml={report}", *files])
        seconds = time.perf_counter() - start
        found = verdicts(report) if report.exists() else {}
    differing = [f"{name}: {verdict}" for name, verdict in found.items() if name.split("_")[1] != verdict]
    if len(found) < 30 or any(code != EXPECTED_EXIT for code in codes):
        differing.append(f"{len(found)} tests reported, exit codes {codes}; the run ended with\n{text[-2000:]}")
    print(f"{len(found)} verdicts, exit codes {codes}, {seconds:.0f} s{'' if not differing else ': DIFFERS'}")
    for line in differing:
        print(f"    {line}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
