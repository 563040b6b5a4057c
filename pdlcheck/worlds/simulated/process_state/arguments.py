"""The arguments of each simulated rank, copied as if they had been sent.

No rank sees what another rank does to its arguments.
"""

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
    """Return copies of the arguments of a call of ``fn``.

    ``of`` is the name of the function in an error; default: its own name.

    Raises:
        TypeError: an argument cannot be copied. The error names it.
    """
    __tracebackhide__ = True
    try:
        return deepcopy((args, kwargs))
    except PdlcheckError:  # for example because a pending operation writes one of the tensors
        raise
    except Exception as error:  # copying runs code of arbitrary classes
        trouble = error
    raise unsendable_call(fn, args, kwargs, lambda value: None if value is fn else _trouble(value), of=of) or trouble


def _trouble(value: Any) -> Exception | None:
    try:
        deepcopy(value)
    except Exception as error:  # returned to the caller
        return error
    return None
