"""Each simulated rank has arguments of its own, as if they had been sent: no rank sees what another does to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from pdlcheck.errors import PdlcheckError
from pdlcheck.worlds.unsendable import unsendable_call

__all__ = ["own_copy"]


def own_copy(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, of: str = ""
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Copies of the arguments of a call of ``fn``; ``of``: what that is called.

    Raises:
        TypeError: an argument cannot be copied; says which.
    """
    __tracebackhide__ = True
    try:
        return deepcopy((args, kwargs))
    except PdlcheckError:  # such as of a tensor that a pending operation writes
        raise
    except Exception as error:  # copying runs code of any class
        trouble = error
    raise unsendable_call(fn, args, kwargs, lambda value: None if value is fn else _trouble(value), of=of) or trouble


def _trouble(value: Any) -> Exception | None:
    try:
        deepcopy(value)
    except Exception as error:  # it is handed on
        return error
    return None
