"""``unittest.mock.patch`` on a simulated rank: in force while that rank runs, as with ``monkeypatch``.

This applies to a test's body, fixtures of function scope and ``setUp``; a fixture of wider scope patches for all ranks.

A patch that decorates a function is one object, which stores the original value. Therefore each rank enters a copy.
"""

from __future__ import annotations

from copy import copy
from functools import partial, wraps
from typing import Any

from pdlcheck.compat.patches import Patch
from pdlcheck.compat.python.unittest import exchange_active_mocks, mock_patches, patch_dict, unpatch_dict
from pdlcheck.harness import rank_context
from pdlcheck.worlds.simulated.scheduling.scheduler import current_rank

__all__ = ["PATCHES"]

_Patch, _PatchDict = mock_patches()


def _enter(own: Any, enter: Any) -> Any:
    @wraps(enter)
    def entered(self: Any) -> Any:
        rank = current_rank()
        if rank is None or rank_context.sets_up_for_all():
            return enter(self)
        if not any(isinstance(one, _Started) for one in rank.state.own):
            rank.state.own.append(_Started())
        mine = own(self)
        value = enter(mine.patch)
        rank.state.own.append(mine)
        return value

    return entered


def _exit(leave: Any) -> Any:
    @wraps(leave)
    def left(self: Any, *exc_info: Any) -> Any:
        rank = current_rank()
        owned: list[Any] = [] if rank is None else rank.state.own
        for number in reversed(range(len(owned))):
            if getattr(owned[number], "entered", None) is self:
                return leave(owned.pop(number).patch, *exc_info)
        return leave(self, *exc_info)

    return left


class _Started:
    """The patches that ``start`` has entered on one rank; ``stopall`` ends only those."""

    def __init__(self) -> None:
        self._own: list[Any] = []
        self.arrive()

    def arrive(self) -> None:
        self._everybodys = exchange_active_mocks(_Patch, self._own)

    def leave(self) -> None:
        exchange_active_mocks(_Patch, self._everybodys)


class _Attribute:
    def __init__(self, entered: Any) -> None:
        self.entered, self.patch = entered, entered.copy()

    def leave(self) -> None:
        patch = self.patch
        self._value, _ = patch.get_original()
        if patch.is_local:
            setattr(patch.target, patch.attribute, patch.temp_original)
        else:
            delattr(patch.target, patch.attribute)

    def arrive(self) -> None:
        patch = self.patch
        patch.temp_original, patch.is_local = patch.get_original()
        setattr(patch.target, patch.attribute, self._value)


class _Dict:
    def __init__(self, entered: Any) -> None:
        self.entered, self.patch = entered, copy(entered)

    def leave(self) -> None:
        self._values = dict(self.patch.in_dict)
        unpatch_dict(self.patch)

    def arrive(self) -> None:
        patch_dict(self.patch)
        self.patch.in_dict.clear()
        self.patch.in_dict.update(self._values)


PATCHES = tuple(
    Patch(patch, name, make, "a simulated rank enters a patch of its own, except in a fixture that all ranks share")
    for patch, own in ((_Patch, _Attribute), (_PatchDict, _Dict))
    for name, make in (("__enter__", partial(_enter, own)), ("__exit__", _exit))
)
