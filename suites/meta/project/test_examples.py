"""The examples run as their first lines state: under torchrun, on two nodes, under mpiexec, and alone."""

from __future__ import annotations

import itertools
import os
import re
import socket
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pdlcheck.primitives import ShardSampler, shard_digest
from pdlcheck.primitives.digits import digits

from ..clone import ROOT
from ..launched.test_launched import outside
from ..mpi.test_mpi import mpiexec
from ..needs_mpi import needs_mpi

EXAMPLES = ROOT / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

if not EXAMPLES.is_dir():
    pytest.skip("the examples are not installed: run this in a clone of the repository", allow_module_level=True)


def environment():
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return outside() | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def start(command, folder):
    return subprocess.Popen(
        [*map(str, command)],
        cwd=folder,
        env=environment() | {"TMPDIR": str(folder.parent)},  # torchrun leaves a folder there
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def finish(process):
    try:
        text, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, text
    return text


def alone(folder, name, *options):
    return finish(start([sys.executable, EXAMPLES / name, *options], folder))


def torchrun(folder, ranks, name, *options):
    return finish(start([*TORCHRUN, "--standalone", "--nproc-per-node", ranks, EXAMPLES / name, *options], folder))


def two_nodes(folder, name, *options):
    """Run two launchers of one rank each, as on two machines; return the output of rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = ["--nnodes", 2, "--nproc-per-node", 1, "--master-addr", "127.0.0.1", "--master-port"]
        meeting.append(free.getsockname()[1])
    nodes = [start([*TORCHRUN, *meeting, "--node-rank", node, EXAMPLES / name, *options], folder) for node in range(2)]
    texts = [finish(node) for node in nodes]
    assert "%" not in texts[1]  # only rank 0 prints
    return texts[0]


def test_an_example_is_read_in_one_sitting():
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 80, f"{path.name} is too long for an example"


def test_ring_pass_under_torchrun(tmp_path):
    assert torchrun(tmp_path, 2, "ring_pass.py").endswith("rank 0 holds 2, home again\nrank 1 holds 2\n")


@pytest.mark.slow
def test_pagerank(tmp_path):
    lines = alone(tmp_path, "pagerank.py", "--top", 2).splitlines()
    assert lines[0].startswith("63664 packages, 275976 dependencies")
    assert [line.split()[:2] for line in lines[2:]] == [["1", "libc6"], ["2", "libgcc-s1"]]


@pytest.mark.slow
def test_pagerank_over_ranks(tmp_path):
    lines = torchrun(tmp_path, 2, "pagerank_over_ranks.py", "--top", 2).splitlines()
    dealt = [re.search(r"rank \d: (\d+) packages, (\d+) dependencies, reads [1-9]\d* scores", line) for line in lines]
    assert [sum(int(found[column]) for found in dealt if found) for column in (1, 2)] == [63664, 275976]
    assert [line.split()[:2] for line in lines[-2:]] == [["1", "libc6"], ["2", "libgcc-s1"]]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install 'pdlcheck[data]'")
    return alone(tmp_path_factory.mktemp("alone"), "synchronous_sgd.py", "--epochs", 2)


def test_synchronous_sgd_alone(one_process):
    first, second = (float(loss) for loss in re.findall(r"loss ([\d.]+)", one_process))
    assert second < first
    assert re.search(r"[\d.]+% of 360 digits that it has not seen are read right", one_process)


@pytest.mark.slow
@needs_mpi
def test_synchronous_sgd_under_mpiexec_prints_what_one_process_prints(one_process, tmp_path):
    done = mpiexec(3, tmp_path, str(EXAMPLES / "synchronous_sgd.py"), "--epochs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == one_process


@pytest.mark.slow
def test_synchronous_sgd_under_torchrun_prints_what_one_process_prints(one_process, tmp_path):
    assert torchrun(tmp_path, 2, "synchronous_sgd.py", "--epochs", 2).endswith(one_process)


def digests_of_loaders(epoch, after=0):
    """Return a line of the table: the digests of both ranks' loaders in an epoch, after this many batches."""
    data, digests = TensorDataset(*digits()), []
    for rank in range(2):
        sampler = ShardSampler(data, 2, rank)
        sampler.set_epoch(epoch)
        batches = list(DataLoader(data, 50, sampler=sampler, generator=torch.Generator()))
        digests.append(shard_digest(batches[after:])[:12])
    return f"epoch {epoch}  {digests[0]}  {digests[1]}"


def table(text):
    """Return the digests that an example printed side by side."""
    lines = text.splitlines()
    header = lines.index("         rank 0        rank 1")
    return list(itertools.takewhile(lambda line: line.startswith("epoch"), lines[header + 1 :]))


@pytest.mark.slow
def test_convnet_on_two_nodes_goes_on_exactly_where_one_node_stopped(tmp_path):
    """The stop is in the middle of an epoch; the final weights are those of an undisturbed run, bit for bit."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install 'pdlcheck[data]'")
    command = ["convnet_ddp.py", "--epochs", 2, "--half", "float16"]  # float16 has a scaler on a CPU too
    straight = torchrun(tmp_path, 2, *command, "--checkpoints", "straight")
    stopped = torchrun(tmp_path, 2, *command, "--checkpoints", "stopped", "--stop", 20)
    resumed = two_nodes(tmp_path, *command, "--checkpoints", "stopped")
    assert table(straight) == [digests_of_loaders(0), digests_of_loaders(1)]
    assert table(stopped)[0] == table(straight)[0]
    assert table(stopped)[1] != table(straight)[1]
    assert table(resumed) == [digests_of_loaders(1, after=5)]
    assert "epoch 0" not in resumed
    assert "epoch 1, step 9: loss" in resumed
    assert "epoch 1, step 10" not in resumed
    assert set(re.findall(r"scale (\d+)", straight)) == {"65536"}
    accuracy, weights = re.search(r"([\d.]+)% read right, weights (\w+)", straight).groups()
    assert float(accuracy) > 88
    assert re.search(r"weights (\w+)", resumed)[1] == weights
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stopped", "straight"]


GRIDS = {
    "1f1b": ("4 micro-batches, 10 steps", "rank 1   .  F0  B0  F1  B1  F2  B2  F3  B3   ."),
    "interleaved": ("4 micro-batches, ", "stage 3: layers 6, rank 1"),
    "pipedream": ("12 micro-batches, ", "rank 1   .  F0  B0  F1  B1  F2  B2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", GRIDS)
def test_the_pipeline_prints_its_grid_and_learns(tmp_path, schedule):
    more = ["--microbatches", 12] if schedule == "pipedream" else []
    epochs = 25 if schedule == "1f1b" else 5  # tests of the primitives show which schedules learn
    text = torchrun(tmp_path, 2, "pipeline.py", "--epochs", epochs, "--schedule", schedule, *more)
    counts, row = GRIDS[schedule]
    stages = 4 if schedule == "interleaved" else 2
    title = "interleaved 1f1b" if schedule == "interleaved" else schedule
    assert f"{title}: {stages} stages on 2 ranks, {counts}" in text
    assert f"\n{row}" in text
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", text)]
    assert len(losses) == epochs / 5
    assert epochs == 5 or losses[-1] < 0.7 * losses[0]
