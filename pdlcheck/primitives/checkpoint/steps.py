"""A training loop that continues from the last checkpoint, however often it is killed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pdlcheck.errors import CheckpointError
from pdlcheck.primitives.arguments import require_at_least
from pdlcheck.primitives.checkpoint.container import Refused, verify
from pdlcheck.primitives.checkpoint.fitting import require_stateful
from pdlcheck.primitives.checkpoint.folder import stored, tidy
from pdlcheck.primitives.checkpoint.load import Reshard, latest_checkpoint, load_checkpoint
from pdlcheck.primitives.checkpoint.ranks import Ranks, ranks_of
from pdlcheck.primitives.checkpoint.save import save_checkpoint

__all__ = ["resumable_steps"]


def resumable_steps(
    folder: str | os.PathLike[str],
    *,
    steps: int,
    save_every: int,
    keep: int = 3,
    reshard: Mapping[str, Reshard] | None = None,
    group: dist.ProcessGroup | None = None,
    **objects: Any,
) -> Iterator[int]:
    """Return the numbers of the remaining steps, from the newest checkpoint that all ranks can read.

    The iterator loads the checkpoint before the first number. It saves after every ``save_every``-th step and after the
    last one. A process that is killed and started again, by torchrun or by hand, takes the same steps as one that is
    not: the same bits on the same number of ranks. Seed the random streams before the call, because there is no
    checkpoint at first. Give a DataLoader its own ``generator``: each ``iter(loader)`` draws a number, otherwise from
    torch's stream, and only a resumed run calls it in the middle of an epoch.

    Args:
        folder: the folder of the checkpoints; a relative path is relative to the working directory at the call.
        steps: total number of steps to take.
        save_every: steps between checkpoints.
        keep: as in :func:`save_checkpoint`.
        reshard: as in :func:`load_checkpoint`.
        group: as in :func:`save_checkpoint`.
        **objects: as in :func:`save_checkpoint`.

    Returns:
        An iterator of ints; the body of the loop takes that step on every rank.

    Raises:
        ValueError: ``steps`` is below 0 or ``save_every`` below 1, or they differ between ranks; also the errors of
            :func:`load_checkpoint`.
        CheckpointError: there are checkpoints, but none that is intact on every rank.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> def train(until):
        ...     model, taken = torch.nn.Linear(1, 1), []
        ...     for step in resumable_steps(folder.name, steps=6, save_every=2, model=model):
        ...         if step == until:
        ...             break                        # killed
        ...         taken.append(step)
        ...     return taken
        >>> world.run(train, 3, world_size=2), world.run(train, None, world_size=2)
        ([[0, 1, 2], [0, 1, 2]], [[2, 3, 4, 5], [2, 3, 4, 5]])
        >>> folder.cleanup()

    Source: torchrun's elastic restarts; "on failures, the workers resume from the last checkpoint".
    """
    who = ranks_of("resumable_steps", group)

    def checked() -> dict[str, int]:
        require_at_least(who.caller, "steps", steps, 0)
        require_at_least(who.caller, "save_every", save_every, 1)
        require_at_least(who.caller, "keep", keep, 1)
        require_stateful(who.caller, objects)
        return {"steps": steps, "save_every": save_every}

    _require_same(who, who.together(checked))
    place = Path(folder).absolute()  # the body may change the working directory

    def remaining() -> Iterator[int]:
        path = latest_checkpoint(place, group=group)
        if path is None:
            who.together(lambda: _require_empty(place))
        start = 0 if path is None else load_checkpoint(path, reshard=reshard, group=group, **objects)
        if path is not None:  # a killed writer may have left old files behind
            found = path
            who.together(lambda: tidy(found, keep), on=0)
        for step in range(start, steps):
            yield step
            if (step + 1) % save_every == 0 or step + 1 == steps:
                save_checkpoint(place, step + 1, keep=keep, group=group, **objects)

    return remaining()


def _require_same(who: Ranks, told: list[dict[str, int]]) -> None:
    for name, first in told[0].items():
        for rank, theirs in enumerate(told):
            if theirs[name] != first:
                raise ValueError(
                    f"{who.caller} needs the same {name} on every rank, got {first} on rank 0 and {theirs[name]} on "
                    f"rank {rank}"
                )


def _require_empty(folder: Path) -> None:
    """Raise CheckpointError if ``folder`` holds damaged checkpoints: a new start must not ignore repairable files."""
    for path in stored(folder):
        try:
            verify(path)
        except Refused as refused:
            reason = f"{path} {refused}, and no other checkpoint is intact; move them away to start anew"
            raise CheckpointError(reason, path=str(path), reason=reason, previous=None) from None
