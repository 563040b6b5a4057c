"""Modules whose globals each simulated rank has for itself, as a process has; ``own_globals`` of a world names them.

Code that keeps its groups there, such as Megatron's ``parallel_state`` and similar modules, can then run on simulated
ranks. The modules hold the controller's contents while no rank runs (``mutable_state.py``). When a rank gets its turn,
its differences are put there, and they are taken away when the turn ends. Finding the differences takes time in
proportion to the contents of the modules, about 50 ns a name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from operator import is_
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor

from pdlcheck.compat.torch.pytree import tree_map
from pdlcheck.worlds.simulated.module_globals.mutable_state import (
    MutableState,
    find_holders,
    identical,
    own_leaves,
    user_modules,
)
from pdlcheck.worlds.simulated.module_globals.own_draws import OwnDraws, modules_that_draw
from pdlcheck.worlds.simulated.scheduling.rank_state import RankState

__all__ = ["KNOWN", "RankLocalModules", "known_own_globals"]

# modules in which public libraries keep what a process has once (rank, groups or configuration), and little else
KNOWN = (
    "accelerate.state",
    "deepspeed.comm.comm",
    "deepspeed.comm.torch",
    "deepspeed.compression.basic_layer",
    "deepspeed.module_inject.layers",
    "deepspeed.module_inject.tp_shard",
    "deepspeed.runtime.activation_checkpointing",
    "deepspeed.runtime.pipe.p2p",
    "deepspeed.runtime.sequence_parallel.parallel_state_sp",
    "deepspeed.runtime.tensor_parallel.init_utils",
    "deepspeed.runtime.torch_autocast",
    "deepspeed.runtime.zero",
    "deepspeed.utils.groups",
    "hydra.core.singleton",
    "ignite.distributed.utils",
    "lightning_utilities.core.rank_zero",
    "megatron.core.config",
    "megatron.core.num_microbatches_calculator",
    "megatron.core.parallel_state",
    "megatron.core.rerun_state_machine",
    "megatron.core.tensor_parallel.random",
    "megatron.training.global_vars",
    "picotron.process_group_manager",
)

_ABSENT: Any = object()
_NOT_COPIED = (FunctionType, ModuleType, Tensor, type)


def known_own_globals() -> tuple[str, ...]:
    """Return the imported modules of public libraries whose globals each rank has for itself by default."""
    return tuple(name for name in KNOWN if name in sys.modules)


class RankLocalModules:
    """The globals that ranks have of their own. They start with the controller's, and each rank has its own tensors.

    Args:
        names: names of modules and packages, which are imported. A package stands for its modules that are imported.

    Raises:
        ValueError: a module cannot be imported.
    """

    def __init__(self, names: Sequence[str]) -> None:
        for name in names:
            _import(name)
        self.names = names
        self._pieces = _Pieces([])
        self._draws = OwnDraws({})
        self._imported = 0

    def open(self, ranks: Iterable[RankState], seed: int = 0) -> None:
        """Give these ranks globals of their own, and discard those that they had before.

        Args:
            ranks: the ranks, in their order.
            seed: the seed of the random numbers that the modules draw at import.
        """
        if self._imported != len(sys.modules) or self._pieces.changed():
            self._look()
        self._owned = []
        for number, rank in enumerate(ranks):
            self._owned.append(_Own(self._pieces, self._leaves(number, seed)))
            others = [own for own in rank.own if not isinstance(own, _Own)]
            rank.own = [self._owned[-1], *others]  # first, so a rank's patches of a module are taken back before it

    def begin(self) -> None:
        """Start a run. Ranks do not see what the controller has changed since they were opened."""
        for piece in self._pieces.changed():
            before, now = piece.contents, piece.note()
            for own in self._owned:
                own.differs[piece] = _difference(now, before) | own.differs.get(piece, {})

    def result(self, value: Any) -> Any:
        """Return a rank's result as it is now, with copies of the modules' containers and objects.

        After the turn, these hold another rank's contents.
        """
        return tree_map(self._as_it_is, value)

    def _as_it_is(self, value: Any) -> Any:
        if id(value) in self._seen and not isinstance(value, _NOT_COPIED):
            with suppress(Exception):  # it may hold what cannot be copied
                return deepcopy(value)
        return value

    def _look(self) -> None:
        drawing = modules_that_draw(self.names)
        modules = {name: module for name, (module, _) in drawing.items()} | _modules(self.names)
        packages = {name.partition(".")[0] for name in modules}
        classes = {name for name in list(sys.modules) if name.partition(".")[0] in packages} | {*user_modules()}
        self._seen: dict[int, Any] = {}
        holders = find_holders(modules, modules, self._seen, classes=classes, many=sys.maxsize)
        pieces = [_Piece(holder) for holder in holders]
        self._pieces = _Pieces(pieces)
        self._imported = len(sys.modules)
        copies = own_leaves([piece.contents for piece in pieces])
        self._classes = classes
        if drawing != self._draws.modules:
            self._draws = OwnDraws(drawing)
        self._with_leaves = [
            piece for piece, own in zip(pieces, copies, strict=True) if drawing or _difference(piece.contents, own)
        ]

    def _leaves(self, rank: int, seed: int) -> dict[_Piece, dict[str, Any]]:
        """Return copies of all leaves as they are now, but those that the modules draw are the rank's own."""
        copies = own_leaves([piece.contents for piece in self._with_leaves])
        if self._draws.modules:
            self._draws.put_into(copies, [piece.holder for piece in self._with_leaves], rank, seed, self._classes)
        return {piece: _difference(piece.contents, own) for piece, own in zip(self._with_leaves, copies, strict=True)}


class _Piece:
    """A holder, with its contents while the controller runs."""

    __slots__ = ("_parts", "contents", "holder")

    def __init__(self, holder: MutableState) -> None:
        self.holder = holder
        self.note()

    def note(self) -> dict[str, Any]:
        """Record the present contents as the controller's, and return them."""
        self.contents = self.holder.read()
        self._parts = self.holder.parts()
        return self.contents

    def is_the_controllers(self) -> bool:
        """Return whether nothing has been put there, or taken away, since then."""
        now = self.holder.parts()
        return len(now) == len(self._parts) and all(map(is_, now, self._parts))

    def put(self, difference: Mapping[str, Any]) -> None:
        """Apply a difference to the contents."""
        for name, value in difference.items():
            if value is not _ABSENT:
                self.holder.put(name, value)
            elif name in self.holder.read():
                self.holder.drop(name)

    def take(self) -> dict[str, Any]:
        """Restore the controller's contents, and return how the present ones differed."""
        difference = _difference(self.contents, self.holder.read())
        self.put({name: self.contents.get(name, _ABSENT) for name in difference})
        self._parts = self.holder.parts()  # the order may differ, and names that are not exchanged may be new
        return difference


class _Pieces:
    """All pieces of the modules."""

    def __init__(self, pieces: Sequence[_Piece]) -> None:
        self._full = [piece for piece in pieces if piece.holder.namespace != {}]
        self._empty = [piece for piece in pieces if piece.holder.namespace == {}]  # nearly every function
        self._namespaces = [piece.holder.namespace for piece in self._empty]

    def changed(self) -> list[_Piece]:
        """Return the pieces that do not hold the controller's contents."""
        looked_at = [*self._full, *self._empty] if any(self._namespaces) else self._full
        return [piece for piece in looked_at if not piece.is_the_controllers()]


class _Own:
    """The contents that one rank has in place of the controller's; an ``Own`` of ``scheduling/rank_state.py``."""

    def __init__(self, pieces: _Pieces, differs: dict[_Piece, dict[str, Any]]) -> None:
        self._pieces = pieces
        self.differs = differs

    def arrive(self) -> None:
        for piece, difference in self.differs.items():
            piece.put(difference)

    def leave(self) -> None:
        self.differs = {piece: piece.take() for piece in self._pieces.changed()}


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return what to put, or take away, to get from ``before`` to ``after``."""
    put = {
        name: value
        for name, value in after.items()
        if (old := before.get(name, _ABSENT)) is not value and not identical(old, value)
    }
    return put | {name: _ABSENT for name in before if name not in after}


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"own_globals names {name!r}, which cannot be imported: {why}") from error


def _modules(names: Sequence[str]) -> dict[str, ModuleType]:
    below = tuple(f"{name}." for name in names)
    return {
        name: module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and (name in names or name.startswith(below))
    }
