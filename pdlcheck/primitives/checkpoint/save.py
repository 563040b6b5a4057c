"""The saving of a checkpoint: the state of all ranks in one file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pdlcheck.errors import CheckpointError
from pdlcheck.primitives.arguments import require_at_least
from pdlcheck.primitives.checkpoint.container import pack
from pdlcheck.primitives.checkpoint.digest import new_digest
from pdlcheck.primitives.checkpoint.fitting import describe, require_stateful, state_of
from pdlcheck.primitives.checkpoint.folder import MAX_STEP, add, intact, path_of, remove_stale, tidy
from pdlcheck.primitives.checkpoint.ranks import Ranks, ranks_of
from pdlcheck.primitives.checkpoint.streams import capture_streams
from pdlcheck.primitives.checkpoint.tree import Node, Tensors, encode

__all__ = ["save_checkpoint"]


def save_checkpoint(
    folder: str | os.PathLike[str],
    step: int,
    *,
    keep: int = 3,
    group: dist.ProcessGroup | None = None,
    **objects: Any,
) -> Path:
    """Write the state of all ranks after ``step`` steps into one file. Call it on every rank.

    The first rank writes a temporary file beside the others, flushes it to the disk and renames it. Only then does it
    remove old files. So the previous checkpoint stays unchanged at any moment, even if the process is killed or the
    disk is full. The next call removes temporary files that a killed process left behind.

    A tensor that several ranks hold is stored and sent once. State that differs between ranks (random streams, buffers,
    weights between the rounds of local SGD) is stored for each rank.

    Args:
        folder: the folder of the checkpoints, made if missing; the first rank's argument is used.
        step: number of steps taken; part of the file name. A checkpoint of the same step is replaced.
        keep: how many checkpoints up to this one stay; files that were cut do not count.
        group: process group; ``None`` is the default group, or this process alone if there is none.
        **objects: the objects to save, by name: model, optimizer, scheduler, scaler, sampler, ...: anything with
            ``state_dict`` and ``load_state_dict``, or a ``torch.Generator``. The random streams of torch (CPU and
            CUDA), Python and numpy are always saved, without a name.

    Returns:
        The file, the same on every rank.

    Raises:
        TypeError: an object has no ``state_dict``, or a state that ``weights_only=True`` would not load.
        ValueError: ``step`` is below 0 or has more than 12 digits; ``keep`` is below 1; there is nothing to save; an
            object has the name of an argument of :func:`load_checkpoint`; ranks save different steps or names.
        CheckpointError: the file could not be written. The error is the same on every rank, even if only one rank has
            it.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> def save():
        ...     model = nn.Linear(2, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        ...     return save_checkpoint(folder.name, 10, model=model, optimizer=optimizer).name
        >>> nn = torch.nn
        >>> world.run(save, world_size=2)
        ['step_000000000010.ckpt', 'step_000000000010.ckpt']
        >>> folder.cleanup()

    Source: model, optimizer and scaler in one file as in the recipe "Saving and loading a general checkpoint" of
    PyTorch; write, flush, rename as in T. Pillai et al., "All file systems are not created equal", OSDI 2014.
    """
    caller = "save_checkpoint"
    who = ranks_of(caller, group)
    tensors: Tensors = {}
    nodes: dict[str, Node] = {}
    about: dict[str, Any] = {}

    def collect() -> tuple[int, list[str], list[str], str]:
        require_at_least(caller, "step", step, 0)
        if step > MAX_STEP:
            raise ValueError(f"{caller} needs a step below {MAX_STEP + 1}, which names a file, got step={step}")
        require_at_least(caller, "keep", keep, 1)
        require_stateful(caller, objects)
        streams = capture_streams()  # before a state_dict could draw from them
        nodes.update({name: encode(state_of(held), tensors, name) for name, held in objects.items()})
        nodes["rng"] = encode(streams, tensors, "rng")
        about.update(describe(objects))
        return step, sorted(objects), list(tensors), new_digest(repr(about).encode()).hexdigest()

    told = who.together(collect)
    _require_agreement(who, told)
    missing = set(tensors).difference(*(held for _, _, held, _ in told[: who.rank]))
    alike = told[who.rank][3] == told[0][3]
    everyone = who.gather((nodes, {name: tensors[name] for name in missing}, None if alike else about))

    def store() -> str:
        path = path_of(Path(folder), step)
        payload = {
            "step": step,
            "world_size": who.world_size,
            "about": about,
            "ranks": [nodes for nodes, _, _ in everyone],
            "tensors": {name: held[name] for _, held, _ in everyone for name in sorted(held)},
        }
        others = {rank: theirs for rank, (_, _, theirs) in enumerate(everyone) if theirs is not None}
        if others:  # ranks hold different objects, such as the stages of a pipeline
            payload["others"] = others
        try:
            remove_stale(path.parent)
            add(path, pack(payload))
        except OSError as error:
            raise _not_written(path, error) from error
        tidy(path, keep)
        return str(path)

    return Path(who.together(store, on=0)[0])


def _require_agreement(who: Ranks, told: list[tuple[int, list[str], list[str], str]]) -> None:
    for place, what in enumerate(("step", "objects")):
        for rank, values in enumerate(told):
            if values[place] != told[0][place]:
                raise ValueError(
                    f"{who.caller}: the ranks save different things: {what} is {told[0][place]} on rank 0 and "
                    f"{values[place]} on rank {rank}"
                )


def _not_written(path: Path, error: OSError) -> CheckpointError:
    left = next(intact(path.parent), None)
    previous = None if left is None else str(path.parent / left[0])
    reason = f"{path} could not be written: {error.strerror or error}"
    return CheckpointError(
        f"{reason}; {'there is no earlier one' if previous is None else f'{previous} is as it was'}",
        path=str(path),
        reason=reason,
        previous=previous,
    )
