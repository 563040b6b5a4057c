"""Checkpoints that are cut, changed or exchanged, and the check that nothing of them is loaded."""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.errors import CheckpointError
from pdlcheck.primitives import broadcast_parameters, latest_checkpoint, load_checkpoint, save_checkpoint, shard_digest

DAMAGES = {
    "cut": "cut at a drawn byte",
    "cut in the header": "cut in its first lines",
    "bit": "one bit flipped anywhere",
    "bit in the header": "one bit flipped in its first lines",
    "zeros": "up to 512 bytes in a row are zero, as after a power failure",
    "longer": "bytes of an older file at its end",
    "exchanged": "two stretches of equal length exchanged",
}
_HEADER = 100  # number of bytes of the first lines


@dataclass(frozen=True)
class Torn:
    """The outcome of one damaged file."""

    number: int
    kind: str
    refused: bool
    untouched: bool
    previous: bool
    said: str

    @property
    def held(self) -> bool:
        return self.refused and self.untouched and self.previous


def damage(content: bytes, kind: str, draw: random.Random) -> bytes:
    """Return damaged bytes that differ from ``content``."""
    damaged = bytearray(content)
    if kind.startswith("cut"):
        return content[: draw.randrange(_HEADER if "header" in kind else len(content))]
    if kind.startswith("bit"):
        damaged[draw.randrange(_HEADER if "header" in kind else len(content))] ^= 1 << draw.randrange(8)
    elif kind == "longer":
        damaged += content[: draw.randint(1, 600)]
    while bytes(damaged) == content:
        nbytes = draw.randint(1, 512)
        first = draw.randrange(len(content) - 2 * nbytes)
        second = draw.randrange(first + nbytes, len(content) - nbytes)
        if kind == "zeros":
            damaged[first : first + nbytes] = bytes(nbytes)
        else:
            damaged[first : first + nbytes], damaged[second : second + nbytes] = (
                content[second : second + nbytes],
                content[first : first + nbytes],
            )
    return bytes(damaged)


def tear(number: int, seed: int, world: Any, world_size: int) -> Torn:
    """Damage the newer of two checkpoints, and load it on every rank."""
    draw = random.Random(f"{seed} {number}")
    kind = list(DAMAGES)[number % len(DAMAGES)]
    with tempfile.TemporaryDirectory(prefix="pdlcheck-torn-") as name:
        folder = Path(name)
        saved = world.run(_write, folder, number, world_size=world_size)
        torn = folder / "step_000000000002.ckpt"
        torn.write_bytes(damage(torn.read_bytes(), kind, draw))
        ranks = world.run(_read, folder, torn, world_size=world_size)
    said = {said for said, *_ in ranks}
    refused = len(said) == 1 and all(said) and not any(loaded for _, loaded, *_ in ranks)
    intact = all(found == torn.with_name("step_000000000001.ckpt").name for *_, found, _ in ranks)
    same = [weights for *_, weights in ranks] == saved
    return Torn(number, kind, refused, all(held for _, _, held, *_ in ranks), intact and same, "; ".join(said))


def _parts(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    broadcast_parameters(model)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1)}


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of everything that loading could change."""
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return shard_digest([*model.state_dict().values(), *moments, torch.get_rng_state()])


def _write(folder: Path, seed: int) -> str:
    parts = _parts(seed)
    held = []
    for step in (1, 2):
        parts["optimizer"].zero_grad()
        parts["model"](torch.randn(4, 4)).square().mean().backward()
        parts["optimizer"].step()
        save_checkpoint(folder, step, **parts)
        held.append(_held(**parts))
    return held[0]


def _read(folder: Path, torn: Path) -> tuple[str, bool, bool, str | None, str]:
    """Load the damaged checkpoint and then the latest one; return what happened.

    Returns:
        The error message, whether the damaged one was loaded, whether all is unchanged, the name of the latest one, and
        the digest after loading that.
    """
    parts = _parts(7 + dist.get_rank())
    before, said, loaded = _held(**parts), "", False
    try:
        load_checkpoint(torn, **parts)
        loaded = True
    except CheckpointError as error:
        said = str(error) if error.previous is not None else ""
    untouched = _held(**parts) == before
    latest = latest_checkpoint(folder)
    if latest is not None:
        load_checkpoint(latest, **parts)
    return said, loaded, untouched, latest and latest.name, _held(**parts)
