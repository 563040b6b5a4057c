"""The loading of checkpoints, on the same number of ranks as saved them or on another number."""

from __future__ import annotations

import copy
import itertools
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.compat.torch.modules import keep_versions
from pdlcheck.errors import CheckpointError
from pdlcheck.primitives.checkpoint.container import FOREIGN, Refused, read
from pdlcheck.primitives.checkpoint.fitting import describe, require_fit, require_stateful, state_of
from pdlcheck.primitives.checkpoint.folder import intact
from pdlcheck.primitives.checkpoint.form import well_formed
from pdlcheck.primitives.checkpoint.ranks import Ranks, ranks_of
from pdlcheck.primitives.checkpoint.streams import derive_streams, restore_streams
from pdlcheck.primitives.checkpoint.tree import Node, Tensors, decode, difference, encode

__all__ = ["latest_checkpoint", "load_checkpoint"]

Reshard = Callable[[list[Any], int, int], Any]


def latest_checkpoint(folder: str | os.PathLike[str], *, group: dist.ProcessGroup | None = None) -> Path | None:
    """Return the checkpoint of the latest step that is intact on every rank. Call it on every rank.

    Every file is read and its digest compared; cut and foreign files are skipped.

    Args:
        folder: the folder to which :func:`save_checkpoint` wrote, or in which each rank has its copy; it may be
            missing.
        group: process group; ``None`` is the default group, or this process alone if there is none.

    Returns:
        The file in this rank's folder, of the same name and contents on every rank; None if no rank finds one.

    Raises:
        CheckpointError: ranks find checkpoints, but none that all of them find. Starting anew would lose them.

    Example:
        >>> print(latest_checkpoint("nothing/here"))
        None

    Source: as :func:`save_checkpoint`.
    """
    who = ranks_of("latest_checkpoint", group)
    told = who.together(lambda: (str(folder), dict(itertools.islice(intact(Path(folder)), 1))))
    everyone = [found for _, found in told]
    name = _common(everyone)
    if name is None:  # the newest files differ between ranks: compare all files
        everyone = who.together(lambda: dict(intact(Path(folder))))
        name = _common(everyone)
    if name is not None:
        return Path(folder) / name
    if any(everyone):
        newest = "; ".join(f"rank {r}: {next(iter(found), 'none')}" for r, found in enumerate(everyone))
        reason = f"no checkpoint in {told[0][0]} is intact on every rank ({newest}); all ranks must see the same files"
        raise CheckpointError(f"latest_checkpoint: {reason}", path=str(folder), reason=reason, previous=None, rank=0)
    return None


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    ignore: Collection[str] = (),
    reshard: Mapping[str, Reshard] | None = None,
    group: dist.ProcessGroup | None = None,
    **objects: Any,
) -> int:
    """Restore the state that :func:`save_checkpoint` wrote, for a bit-for-bit resume. Call it on every rank.

    Either all ranks load everything or nothing changes. The file's digest is compared before it is unpickled.
    Everything is compared with the objects before one of them is changed. Afterwards each object must hold the file's
    content. If one rank finds a problem, all ranks raise the same error and keep their previous state. This costs a
    copy of the state.

    On another number of ranks, each rank loads the state that was equal on all ranks. Rank r takes the random streams
    of rank r. New ranks get streams derived from those of rank 0 and their own number. State that differed between
    ranks, as in the stages of a pipeline and their optimizers, needs a rule in ``reshard``.

    Args:
        path: the file; each rank reads its own copy, of the same contents.
        ignore: names in the file to skip, such as ``["optimizer"]`` for an evaluation; ``"rng"`` is the random streams.
        reshard: for a name, ``rule(states, rank, world_size)`` makes the state of a rank from those of all ranks that
            saved; called if the number of ranks differs. ``lambda states, rank, world_size: states[0]`` takes the state
            of the first rank.
        group: process group; ``None`` is the default group, or this process alone if there is none.
        **objects: the objects to load into, by the names that they were saved under.

    Returns:
        The number of steps taken, as it was given to :func:`save_checkpoint`.

    Raises:
        CheckpointError: on any rank, the file is missing, cut, changed, of another format, or not a checkpoint. The
            text names the file at its place on the first such rank, and the newest earlier one that is intact. The
            field ``previous`` is the copy of that one on this rank.
        ValueError: the file is of another model, optimizer or kind of object, or holds other names; the number of ranks
            differs and the ranks' states differ from each other; after ``load_state_dict``, an object does not hold the
            file's content.
        TypeError: an object has no ``load_state_dict``. The error is the same on every rank, even if only one rank has
            it.

    Example:
        >>> import tempfile
        >>> from pdlcheck.primitives import save_checkpoint
        >>> folder = tempfile.TemporaryDirectory()
        >>> def interrupted():
        ...     model = torch.nn.Linear(1, 1)
        ...     path = save_checkpoint(folder.name, 7, model=model)
        ...     saved, drawn = model.weight.item(), torch.rand(1).item()
        ...     torch.nn.init.zeros_(model.weight)
        ...     step = load_checkpoint(path, model=model)
        ...     return step, model.weight.item() == saved, torch.rand(1).item() == drawn
        >>> world.run(interrupted, world_size=2)
        [(7, True, True), (7, True, True)]
        >>> folder.cleanup()

    Source: as :func:`save_checkpoint`.
    """
    who = ranks_of("load_checkpoint", group)

    def located() -> Path:
        require_stateful("load_checkpoint", objects)
        return Path(path)

    file = who.together(located)[who.rank]
    payload = _read(who, file)
    states: dict[str, tuple[Node, Tensors]] = {}
    streams: list[Any] = []
    own = who.rank if who.rank < payload["world_size"] else 0

    def prepare() -> None:
        states.update(_fitting(who, file, payload, objects, ignore, reshard or {}))
        streams.append(decode(payload["ranks"][own]["rng"], payload["tensors"]))

    who.together(prepare)
    before: dict[str, Any] = {}
    try:
        who.together(lambda: _apply(objects, states, before))
    except Exception as error:
        for name, state in before.items():
            try:
                _put(objects[name], state)
            except Exception as again:  # go on, because the other objects must be restored too
                error.add_note(f"{name} does not take back its own state either: {type(again).__name__}: {again}")
        raise
    if "rng" not in ignore:
        if own == who.rank:
            restore_streams(streams[0])
        else:
            derive_streams(streams[0], who.rank)
    return int(payload["step"])


def _common(everyone: list[dict[str, str]]) -> str | None:
    """Return the newest name that every rank found with the same digest."""
    return next((name for name, digest in everyone[0].items() if all(r.get(name) == digest for r in everyone)), None)


def _read(who: Ranks, path: Path) -> dict[str, Any]:
    """Return the payload if all ranks read the same one; otherwise raise CheckpointError on every rank."""
    payload: dict[str, Any] = {}

    def attempt() -> tuple[Path, str | None, str | None]:
        try:
            digest, found = read(path)
            if not well_formed(found):
                raise Refused(FOREIGN)
        except Refused as refused:
            return path, None, str(refused)
        payload.update(found)
        return path, digest, None

    told = who.together(attempt)
    refused = {rank: why for rank, (_, _, why) in enumerate(told) if why is not None}
    digests = [digest for _, digest, _ in told]
    if not refused and len(set(digests)) == 1:
        return payload
    if refused:
        rank, reason = next(iter(refused.items()))
        if len(refused) < who.world_size:
            reason += f" (on rank {', '.join(map(str, refused))} of {who.world_size})"
    else:
        rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        reason = f"is not the same file on rank 0 and rank {rank}"
    name = _common(who.together(lambda: dict(intact(path.parent, before=path))))
    wrong = told[rank][0]  # every rank names this path, although its own copy may be in another folder
    raise CheckpointError(
        f"load_checkpoint: {wrong} {reason}; nothing was loaded; "
        + ("there is no earlier one" if name is None else f"{wrong.parent / name} is intact: load that"),
        path=str(path),
        reason=reason,
        previous=None if name is None else str(path.parent / name),
        rank=rank,
    )


def _fitting(
    who: Ranks,
    path: Path,
    payload: dict[str, Any],
    objects: Mapping[str, Any],
    ignore: Collection[str],
    reshard: Mapping[str, Reshard],
) -> dict[str, tuple[Node, Tensors]]:
    """Return the state for each object after checking that it fits. No object is changed."""
    saved = payload["about"]
    holds = ", ".join(map(repr, sorted(saved)))
    for name in objects:
        if name not in saved:
            raise ValueError(f"{path} holds no {name!r}; it holds {holds}")
    for name in [*ignore, *reshard]:
        if name not in saved and name != "rng":
            raise ValueError(f"ignore or reshard names {name!r}, which {path} does not hold; it holds {holds}")
    for name in saved:
        if name not in objects and name not in ignore:
            raise ValueError(f"{path} also holds {name!r}: pass {name}=..., or ignore=[{name!r}] to do without")
    about = describe(objects)
    states = {}
    again = len(payload["ranks"]) == who.world_size
    mine = payload.get("others", {}).get(who.rank, saved) if again else saved
    for name, held in objects.items():
        node, tensors = states[name] = _state_for(who, path, payload, name, reshard.get(name))
        kind, groups = mine[name]
        # The parameters in a state made by a rule are unknown, so they are not compared.
        require_fit(name, held, about[name], [kind, groups if again or name not in reshard else None], node, tensors)
    return states


def _state_for(
    who: Ranks, path: Path, payload: dict[str, Any], name: str, rule: Reshard | None
) -> tuple[Node, Tensors]:
    """Return the state that this rank is to hold as ``name``."""
    nodes, tensors = [nodes[name] for nodes in payload["ranks"]], payload["tensors"]
    if len(nodes) == who.world_size:
        return nodes[who.rank], tensors
    if rule is not None:
        made: Tensors = {}
        state = rule([decode(node, tensors) for node in nodes], who.rank, who.world_size)
        return encode(state, made, name), made
    for rank, node in enumerate(nodes):
        differs = difference(node, nodes[0], name)
        if differs:
            raise ValueError(
                f"{path} was written by {len(nodes)} ranks that differ in {name} (on rank {rank}, {differs} if it were "
                f"rank 0's); it cannot be re-sharded to {who.world_size}: resume on {len(nodes)} ranks, or pass "
                f"reshard={{{name!r}: rule}}"
            )
    return nodes[0], tensors


def _apply(objects: Mapping[str, Any], states: dict[str, tuple[Node, Tensors]], before: dict[str, Any]) -> None:
    """Load every object and check that it then holds the given state. Put the previous states into ``before``."""
    for name, (node, tensors) in states.items():
        held = objects[name]
        before[name] = copy.deepcopy(state_of(held))
        state = decode(node, tensors)
        if isinstance(held, nn.Module):
            state = OrderedDict(state)
            keep_versions(state, before[name])  # the model is the same
        try:
            _put(held, state)
        except Exception as error:
            raise ValueError(f"{name} does not take its state: {type(error).__name__}: {error}") from error
    for name, (node, tensors) in states.items():
        differs = difference(encode(state_of(objects[name]), dict(tensors), name, node), node, name)
        if differs:
            raise ValueError(f"{name} does not hold what the checkpoint holds after load_state_dict: {differs}")


def _put(held: Any, state: Any) -> None:
    if isinstance(held, torch.Generator):
        held.set_state(state["stream"])
    else:
        held.load_state_dict(state)
