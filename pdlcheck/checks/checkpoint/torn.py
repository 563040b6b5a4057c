"""The check that every rank refuses a damaged checkpoint and loads nothing from it."""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pdlcheck.checks.checkpoint.runs import Start
from pdlcheck.checks.checkpoint.unsaved_state import first_difference, parts_of, seed_streams, states_of
from pdlcheck.checks.message import case, failure, made_by_start, name_of, takes_world
from pdlcheck.checks.state import differing, digest, state_of
from pdlcheck.errors import Deadlock, Inconclusive, PeerFailed

__all__ = ["check_torn_files"]


@takes_world
def check_torn_files(
    start: Start,
    world: Any,
    *,
    world_size: int = 2,
    saved_after: int = 2,
    count: int = 20,
    seed: int = 0,
) -> list[str]:
    """Check that every rank refuses a damaged checkpoint and keeps its state.

    A damaged checkpoint is a copy of which one file is cut, or has one bit flipped. ``load`` must raise on every rank,
    and the state that it would overwrite must stay as it was.

    Args:
        start: as in :func:`check_resume`; its ``load`` must raise for a damaged checkpoint.
        world: as in :func:`check_resume`.
        world_size: number of ranks.
        saved_after: steps before saving.
        count: number of damages; each cuts a file at a drawn byte, or flips a drawn bit of it.
        seed: determines the damages.

    Returns:
        A text for each damage: the damage, and the error that ``load`` raised on rank 0.

    Raises:
        AssertionError: a rank loaded a damaged checkpoint, or waited for others without end, or refused it but
            overwrote a tensor. The message names the damage and its file, and the rank or the tensor.
        Inconclusive: a rank refuses the intact checkpoint too, or ``save`` wrote nothing.
    """
    __tracebackhide__ = True
    who = name_of(start)
    draw = random.Random(seed)
    told = []
    with tempfile.TemporaryDirectory(prefix="pdlcheck-torn-") as name:
        intact = Path(name) / "intact"
        world.run(_write, start, saved_after, str(intact), seed, world_size=world_size)
        files = _files(intact)
        if not files:
            raise Inconclusive(f"{who}: save wrote nothing below the path that it was given")
        loaded = world.run(_try, start, str(intact), seed, world_size=world_size)
        for rank, attempt in enumerate(loaded):
            if attempt.error is not None:
                raise Inconclusive(f"{who}: rank {rank} refuses the intact file too: {attempt.error}")
        for number in range(count):
            damaged = Path(name) / f"damaged-{number}"
            shutil.copytree(intact, damaged) if intact.is_dir() else shutil.copy(intact, damaged)
            what = _damage(draw.choice(_files(damaged)), draw)
            facts = case(world, world_size, saved_after=saved_after, damage=number, seed=seed)
            try:
                attempts = world.run(_try, start, str(damaged), seed, world_size=world_size)
            except Deadlock as error:
                raise failure(
                    f"{who}: a rank was left waiting where {what}",
                    likely_cause="one rank reads the file and raises, the others wait for what it read",
                    ranks="; ".join(error.ranks),
                    case=facts,
                ) from error
            _require_refused(who, what, attempts, facts)
            told.append(f"{what}: {attempts[0].error}")
    return told


@dataclass(frozen=True)
class Attempt:
    """The error that loading raised, and the names of the states that it changed."""

    error: str | None
    changed: list[str]


def _write(start: Start, steps: int, file: str, seed: int) -> None:
    seed_streams(seed + dist.get_rank())
    _, step, save, _ = made_by_start(start(), "model", "step", "save", "load")
    for i in range(steps):
        step(i)
    save(Path(file))


def _try(start: Start, file: str, seed: int) -> Attempt:
    seed_streams(seed + 7919 + dist.get_rank())
    model, step, save, load = made_by_start(start(), "model", "step", "save", "load")
    before, left = digest(state_of(model)), states_of(parts_of(model, (step, save, load)))
    try:
        load(Path(file))
    except (Deadlock, PeerFailed):
        raise
    except _refusals() as error:
        now = states_of(parts_of(model, (step, save, load)))
        changed = differing([before, digest(state_of(model))])
        return Attempt(
            f"{type(error).__name__}: {error}",
            changed + [name for name in left if first_difference(now.get(name), left[name])],
        )
    return Attempt(None, [])


def _refusals() -> tuple[type[BaseException], ...]:
    """Return the exception types that count as a refusal.

    ``CheckpointException`` of torch.distributed.checkpoint is not an ``Exception``.
    """
    checkpoint = sys.modules.get("torch.distributed.checkpoint.api")
    return (Exception,) if checkpoint is None else (Exception, checkpoint.CheckpointException)


def _files(path: Path) -> list[Path]:
    everything = [path] if path.is_file() else sorted(path.rglob("*"))
    return [file for file in everything if file.is_file() and file.stat().st_size]


def _damage(file: Path, draw: random.Random) -> str:
    """Cut ``file`` or flip one of its bits, often near one of its ends, and return a description."""
    content = bytearray(file.read_bytes())
    edge = min(len(content), 256)
    place = draw.choice([draw.randrange(edge), len(content) - 1 - draw.randrange(edge), draw.randrange(len(content))])
    if draw.random() < 0.4:
        file.write_bytes(content[:place])
        return f"{file.name} was cut at byte {place} of {len(content)}"
    bit = draw.randrange(8)
    content[place] ^= 1 << bit
    file.write_bytes(content)
    return f"bit {bit} of byte {place} of {file.name} ({len(content)} bytes) was flipped"


def _require_refused(who: str, what: str, attempts: Sequence[Attempt], facts: str) -> None:
    __tracebackhide__ = True
    for rank, attempt in enumerate(attempts):
        if attempt.error is None:
            others = [f"rank {r}: {a.error}" for r, a in enumerate(attempts) if a.error is not None]
            raise failure(
                f"{who}: rank {rank} loaded a checkpoint of which {what}",
                others="; ".join(others) or None,
                likely_cause="no digest of the file is compared before it is used"
                if not others
                else "each rank decides alone whether to load",
                case=facts,
            )
        if attempt.changed:
            raise failure(
                f"{who}: rank {rank} refused the checkpoint ({what}), but {attempt.changed[0]} is not as before",
                refused=attempt.error,
                likely_cause="some of the file was loaded before all of it was looked at",
                case=facts,
            )
