"""Groups that another rank made: what only module globals that ranks share can bring about."""

from __future__ import annotations

import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

from pdlcheck.errors import Unsupported
from pdlcheck.worlds.simulated.scheduler import current_rank
from pdlcheck.worlds.watch import Operation, WatchedGroup

__all__ = ["require_own_group"]


def require_own_group(operation: Operation, network: object) -> None:
    """An operation would count as that of the rank whose end of the group it is posted on.

    Raises:
        Unsupported: that is another rank than the one that runs.
    """
    me, signature = current_rank(), operation.signature
    if me is None or me.rank == signature.rank or me.network is not network:
        return
    keepers = sorted(_keepers())
    there = f" of {', '.join(keepers)}" if keepers else ""
    raise Unsupported(
        f"rank {me.rank} posts {signature.kind} on an object of {signature.group_text} that rank {signature.rank} "
        f"made, at {signature.where}: simulated ranks share module globals, while a process would have its own; "
        f"give each rank those{there} (pdlcheck_own_globals in an ini file, own_globals of get_world), keep it in the "
        "function that the ranks run, or run on processes (--world gloo)"
    )


def _keepers() -> set[str]:
    """The modules that hold groups, in a name, a container or an object."""
    return {
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in ("pdlcheck", "torch")
        and any(_is_group(part) for value in vars(module).values() for part in (value, *_parts(value)))
    }


def _is_group(value: Any) -> bool:
    return issubclass(type(value), WatchedGroup)  # some objects warn when they are asked for their class


def _parts(value: Any) -> list[Any]:
    if type(value) in (list, tuple, set):
        return list(value)
    if type(value) is ModuleType:
        return []
    names = value if type(value) is dict else None
    with suppress(AttributeError):
        names = names or object.__getattribute__(value, "__dict__")  # past what the object would do when asked
    return list(names.values()) if type(names) is dict else []
