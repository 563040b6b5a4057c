"""One torchrun job in which workers are killed and restarted, and the analysis of its output."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from training_faults.kills import Kill

ROOT = Path(__file__).parents[2]
SAVE_EVERY, KEEP = 2, 3
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # https://github.com/pytorch/pytorch/issues/135712
_SPARE = 3  # number of restarts beyond the planned kills
_ATTEMPT = re.compile(r"attempt (\d+)$")
_STARTED = re.compile(r"rank (\d+) of \d+ is process (\d+)")
_STEP = re.compile(r"step (\d+) on rank (\d+) of \d+: samples \[.*\], weights ([0-9a-f]+)")
_TRAINED = re.compile(r"trained on rank (\d+) of \d+: ([0-9a-f]+)")


@dataclass
class Attempt:
    """The output of the ranks between two starts."""

    steps: list[tuple[int, int, str]] = field(default_factory=list)
    trained: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """The result of a job.

    Args:
        attempts: one for each start of the workers.
        struck: each delivered kill -> the attempt in which it was delivered.
        left: leftovers that should not be there.
        output: the whole output.
        exit: exit code of torchrun.
    """

    attempts: list[Attempt]
    struck: dict[Kill, int]
    left: list[str]
    output: str
    exit: int | None


@dataclass(frozen=True)
class Verdict:
    """The verdict on one kill: training resumed at the right step with the right weights, and left nothing behind."""

    kill: Kill
    goes_on: bool
    same_bits: bool
    clean: bool
    trouble: str

    @property
    def held(self) -> bool:
        return self.goes_on and self.same_bits and self.clean


def run_job(kills: Sequence[Kill], world_size: int, steps: int, timeout_s: float = 900) -> Job:
    """Train under torchrun; the workers of attempt i suffer kill i."""
    with tempfile.TemporaryDirectory(prefix="pdlcheck-kills-") as name:
        folder, checkpoints = Path(name), Path(name) / "checkpoints"
        (folder / "plan.json").write_text(json.dumps([dataclasses.asdict(kill) for kill in kills]))
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        launch += ["--max-restarts", str(len(kills) + _SPARE), "--log-dir", str(folder / "logs")]
        script = [str(Path(__file__).with_name("killed.py")), str(folder / "plan.json"), str(folder / "struck")]
        train = [str(ROOT / "examples" / "elastic.py"), "--folder", str(checkpoints), "--steps", str(steps)]
        command = [*launch, *script, *train, "--save-every", str(SAVE_EVERY)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **FRESH_STORE, "OMP_NUM_THREADS": "1", "TMPDIR": name}
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except BaseException as error:
            process.terminate()  # torchrun ends its workers, which have their own sessions
            output, _ = process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return Job(_attempts(output), _struck(folder / "struck", kills), ["a job that did not end"], output, None)
        left = _left(checkpoints, output)
        return Job(_attempts(output), _struck(folder / "struck", kills), left, output, process.returncode)


def judge(job: Job, reference: Job) -> list[Verdict]:
    """Return one verdict for each delivered kill."""
    right = {step: weights for step, _, weights in reference.attempts[0].steps}
    final = reference.attempts[0].trained[0]
    ended = job.exit == 0 and bool(job.attempts) and set(job.attempts[-1].trained.values()) == {final}
    verdicts = []
    for kill, attempt in job.struck.items():
        before = [step for one in job.attempts[: attempt + 1] for step, _, _ in one.steps]
        after = next((one.steps for one in job.attempts[attempt + 1 :] if one.steps), [])
        trouble = [] if ended else ["the job did not end with the weights of the run that nobody disturbed"]
        reached, first = max(before, default=-1) + 1, min((step for step, _, _ in after), default=None)
        goes_on = bool(job.attempts[attempt + 1 :]) and (
            reached - first <= SAVE_EVERY if first is not None else bool(job.attempts[-1].trained)
        )
        if not goes_on:
            trouble.append(f"{reached} steps were taken before, and training went on at {first}")
        wrong = [(step, rank) for step, rank, weights in after if weights != right.get(step)]
        if wrong:
            trouble.append(f"after step {wrong[0][0]} rank {wrong[0][1]} holds other weights than if not disturbed")
        trouble += job.left
        verdicts.append(Verdict(kill, goes_on, ended and not wrong, not job.left, "; ".join(trouble)))
    return verdicts


def _attempts(output: str) -> list[Attempt]:
    """Split the output by starts; torchrun ends all workers before it starts them again."""
    attempts: list[Attempt] = []
    for line in output.splitlines():
        if found := _ATTEMPT.match(line):
            while len(attempts) <= int(found[1]):
                attempts.append(Attempt())
        elif found := _STEP.match(line):
            attempts[-1].steps.append((int(found[1]), int(found[2]), found[3]))
        elif found := _TRAINED.match(line):
            attempts[-1].trained[int(found[1])] = found[2]
    return attempts


def _struck(log: Path, kills: Sequence[Kill]) -> dict[Kill, int]:
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    numbers = {int(number): int(attempt) for attempt, number in (line.split() for line in lines)}
    return {kill: numbers[kill.number] for kill in kills if kill.number in numbers}


def _left(checkpoints: Path, output: str) -> list[str]:
    names = os.listdir(checkpoints) if checkpoints.is_dir() else []
    left = [f"file {name}" for name in names if not re.fullmatch(r"step_\d{12}\.ckpt", name)]
    if len(names) - len(left) > KEEP:
        left.append(f"{len(names)} checkpoints")
    pids = {found[2] for found in map(_STARTED.match, output.splitlines()) if found}
    return left + [f"process {pid}" for pid in sorted(pids) if _runs(pid)]


def _runs(pid: str) -> bool:
    try:
        return b"elastic.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
