"""Modules whose globals each simulated rank has for itself, as a process would: what ``own_globals`` of a world names.

Code that keeps its groups there, as Megatron's ``parallel_state`` and what follows its example, runs on simulated ranks
by that. What the modules hold (``holders.py`` in this folder) is the controller's while no rank runs. When a rank has
its turn, what differs for it is put there, and taken away again when the turn ends; to find out what differs takes time
in proportion to all that they hold, about 50 ns a name.
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
from torch.utils._pytree import tree_map

from pdlcheck.worlds.simulated.own.isolation import RankState
from pdlcheck.worlds.simulated.own_globals.holders import Holder, find_holders, identical, own_leaves, user_modules

__all__ = ["OwnModules", "known_own_globals"]

# where public libraries keep what a process has one of, its rank, groups or configuration, without much beside it
_KNOWN = (
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
    """Those of public libraries that a program has imported, whose globals each rank has for itself unasked."""
    return tuple(name for name in _KNOWN if name in sys.modules)


class OwnModules:
    """Gives ranks globals of their own. They begin with what the controller has, each with tensors of its own.

    Args:
        names: of modules and packages. They are imported; a package stands for those of its modules that are imported.

    Raises:
        ValueError: one cannot be imported.
    """

    def __init__(self, names: Sequence[str]) -> None:
        for name in names:
            _import(name)
        self.names = names
        self._pieces = _Pieces([])
        self._imported = 0

    def open(self, ranks: Iterable[RankState]) -> None:
        """These ranks have their own from here on, and what they had before no longer."""
        if self._imported != len(sys.modules) or self._pieces.changed():
            self._look()
        self._owned = []
        for rank in ranks:
            self._owned.append(_Own(self._pieces, self._leaves()))
            others = [own for own in rank.own if not isinstance(own, _Own)]
            rank.own = [self._owned[-1], *others]  # first: what a rank patches in a module is taken back before

    def begin(self) -> None:
        """A run begins: what the controller has changed since the ranks were opened is its own."""
        for piece in self._pieces.changed():
            before, now = piece.contents, piece.note()
            for own in self._owned:
                own.differs[piece] = _difference(now, before) | own.differs.get(piece, {})

    def result(self, value: Any) -> Any:
        """On a rank: what it returns, as it is now; a container or object of the modules is another's afterwards."""
        return tree_map(self._as_it_is, value)

    def _as_it_is(self, value: Any) -> Any:
        if id(value) in self._seen and not isinstance(value, _NOT_COPIED):
            with suppress(Exception):  # it may hold what cannot be copied
                return deepcopy(value)
        return value

    def _look(self) -> None:
        modules = _modules(self.names)
        packages = {name.partition(".")[0] for name in modules}
        classes = {name for name in list(sys.modules) if name.partition(".")[0] in packages} | {*user_modules()}
        self._seen: dict[int, Any] = {}
        holders = find_holders(modules, modules, self._seen, classes=classes, many=sys.maxsize)
        pieces = [_Piece(holder) for holder in holders]
        self._pieces = _Pieces(pieces)
        self._imported = len(sys.modules)
        copies = own_leaves([piece.contents for piece in pieces])
        self._with_leaves = [
            piece for piece, own in zip(pieces, copies, strict=True) if _difference(piece.contents, own)
        ]

    def _leaves(self) -> dict[_Piece, dict[str, Any]]:
        """Copies of all leaves as they are now."""
        copies = own_leaves([piece.contents for piece in self._with_leaves])
        return {piece: _difference(piece.contents, own) for piece, own in zip(self._with_leaves, copies, strict=True)}


class _Piece:
    """A holder, and what it holds while the controller runs."""

    __slots__ = ("_parts", "contents", "holder")

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self.note()

    def note(self) -> dict[str, Any]:
        """What it holds now is the controller's."""
        self.contents = self.holder.read()
        self._parts = self.holder.parts()
        return self.contents

    def is_the_controllers(self) -> bool:
        """Whether nothing has been put there, or taken away, since."""
        now = self.holder.parts()
        return len(now) == len(self._parts) and all(map(is_, now, self._parts))

    def put(self, difference: Mapping[str, Any]) -> None:
        """Change what it holds."""
        for name, value in difference.items():
            if value is not _ABSENT:
                self.holder.put(name, value)
            elif name in self.holder.read():
                self.holder.drop(name)

    def take(self) -> dict[str, Any]:
        """Put back what is the controller's; return how it differed."""
        difference = _difference(self.contents, self.holder.read())
        self.put({name: self.contents.get(name, _ABSENT) for name in difference})
        self._parts = self.holder.parts()  # in another order, or with names that are nobody's own, as a registry
        return difference


class _Pieces:
    """All that the modules hold."""

    def __init__(self, pieces: Sequence[_Piece]) -> None:
        self._full = [piece for piece in pieces if piece.holder.namespace != {}]
        self._empty = [piece for piece in pieces if piece.holder.namespace == {}]  # nearly every function
        self._namespaces = [piece.holder.namespace for piece in self._empty]

    def changed(self) -> list[_Piece]:
        """Those that do not hold what is the controller's."""
        looked_at = [*self._full, *self._empty] if any(self._namespaces) else self._full
        return [piece for piece in looked_at if not piece.is_the_controllers()]


class _Own:
    """What one rank has instead of what the controller has: an ``Own`` of :mod:`isolation`."""

    def __init__(self, pieces: _Pieces, differs: dict[_Piece, dict[str, Any]]) -> None:
        self._pieces = pieces
        self.differs = differs

    def arrive(self) -> None:
        for piece, difference in self.differs.items():
            piece.put(difference)

    def leave(self) -> None:
        self.differs = {piece: piece.take() for piece in self._pieces.changed()}


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What to put, or take away, to get from one to the other."""
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
