"""Under torchrun's elastic restart, training resumes from its last checkpoint, on as many workers or on fewer."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pdlcheck.primitives import shard_indices
from pdlcheck.worlds import get_world

from ..clone import ROOT

EXAMPLE = ROOT / "examples" / "elastic.py"
COMMAND = ROOT / "ci" / "inject_training_faults.py"
STEPS = 14
pytestmark = [
    pytest.mark.skipif(not EXAMPLE.exists(), reason="needs examples/: run the suites in a clone of the repository"),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc: run it on Linux"),
]


class Agent:
    """A torchrun that trains, and the output of it and its workers."""

    def __init__(self, folder: Path, name: str, *options: str, pause: float) -> None:
        self.log = folder / f"{name}.log"
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", *options]
        train = [str(EXAMPLE), "--folder", str(folder / "checkpoints"), "--steps", str(STEPS), "--pause", str(pause)]
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
        with self.log.open("w") as out:
            self.process = subprocess.Popen([*launch, *train], env=environment, stdout=out, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_for(self, pattern: str, timeout_s: float = 120) -> re.Match[str]:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if found := re.search(pattern, self.output):
                return found
            assert self.process.poll() is None, self.output
            time.sleep(0.02)
        raise AssertionError(f"{pattern!r} was not printed:\n{self.output}")

    def workers(self) -> list[tuple[int, int]]:
        """Return rank and process id of every worker that was ever started."""
        return [(int(rank), int(pid)) for rank, pid in re.findall(r"rank (\d+) of \d+ is process (\d+)", self.output)]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)
        for _, pid in self.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def agent(tmp_path):
    """Yield a function that starts agents; end them with all their workers."""
    agents = []

    def start(name, *options, pause=0.1):
        agents.append(Agent(tmp_path, name, *options, pause=pause))
        return agents[-1]

    yield start
    for one in agents:
        one.end()


def undisturbed(folder):
    """Return the weights after each step of the same training on two simulated ranks, which no kill disturbs."""
    spec = importlib.util.spec_from_file_location("elastic_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = {}

    def note(text, **_):
        if step := re.match(r"step (\d+) on rank \d of 2: .*weights (\w+)", text):
            found[step[1]] = step[2]

    module.print = note
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as torchrun's workers; with more threads, a product may be summed in another order
    try:
        get_world("sim").run(lambda: module.train(str(folder), STEPS, 4, 0.0), world_size=2)
    finally:
        torch.set_num_threads(threads)
    return found


def steps_of(output):
    """Return (step, rank, world_size, samples, weights) of every step that was taken, in order."""
    lines = re.findall(r"step (\d+) on rank (\d+) of (\d+): samples \[([\d, ]*)\], weights (\w+)", output)
    return [(int(s), int(r), int(w), [int(i) for i in found.split(",")], digest) for s, r, w, found, digest in lines]


@pytest.mark.slow
def test_when_a_machine_is_lost_the_others_go_on_with_all_of_the_data(agent):
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    options = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "job"]
    options += ["--local-addr", "127.0.0.1", "--max-restarts", "3"]
    soon = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=2"
    second = agent("second", *options, "--rdzv-conf", f"{soon},is_host=0")
    first = agent("first", *options, "--rdzv-conf", f"{soon},is_host=1")  # it hosts the rendezvous
    second.wait_for(r"step 6 on rank \d of 2")
    second.process.kill()
    os.kill(second.workers()[-1][1], signal.SIGKILL)
    assert first.process.wait(150) == 0, first.output
    assert "trained on rank 0 of 1" in first.output

    batches = {}
    for step, rank, world_size, samples, _ in steps_of(first.output) + steps_of(second.output):
        batches.setdefault((step, world_size), {})[rank] = samples
    assert {world_size for _, world_size in batches} == {1, 2}
    assert [step for step, world_size in batches if world_size == 1][-6:] == list(range(8, STEPS))
    for (step, world_size), shards in batches.items():
        order = shard_indices(60, rank=0, world_size=1, epoch=step // 5)[step % 5 * 12 : step % 5 * 12 + 12]
        if len(shards) == world_size:  # the killed worker may not have printed its last step
            assert sorted(i for shard in shards.values() for i in shard) == sorted(order.tolist())


@pytest.mark.slow
def test_a_sample_of_the_campaign_holds(tmp_path):
    if not COMMAND.exists():
        pytest.skip("needs ci/inject_training_faults.py: run the suites in a clone of the repository")
    command = [sys.executable, str(COMMAND), "--kills", "1", "--torn", "5", "--seed", "3", "--world-sizes", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--steps", "8"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 of 5 damaged checkpoints refused" in done.stdout
    assert "1 of 1 kills: training went on and ended with the same bits" in done.stdout


def test_the_campaign_sees_a_training_that_does_not_go_on_as_it_was(tmp_path, monkeypatch):
    """The judge gets jobs whose training starts from scratch, resumes with other weights, or leaves files."""
    if not COMMAND.exists():
        pytest.skip("needs ci/: run the suites in a clone of the repository")
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    from training_faults.jobs import Attempt, Job, judge
    from training_faults.kills import draw

    right = [(step, 0, f"w{step}") for step in range(6)]
    kill = draw(0, 0, 2)

    def verdict(after, trained="end", left=(), exit=0):
        job = Job([Attempt(right[:5]), Attempt(after, {0: trained})], {kill: 0}, list(left), "", exit)
        (found,) = judge(job, Job([Attempt(right, {0: "end"})], {}, [], "", 0))
        return found

    assert verdict(right[4:]).held
    assert not verdict(right).goes_on
    assert not verdict([(4, 0, "w4"), (5, 0, "other")]).same_bits
    assert not verdict(right[4:], trained="other").same_bits
    assert not verdict(right[4:], exit=1).same_bits
    assert not verdict(right[4:], left=["file x.tmp"]).clean
