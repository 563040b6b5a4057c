"""The private names of warnings."""

from __future__ import annotations

import warnings
from types import FunctionType
from typing import Any, Final

from pdlcheck.compat.private import uses

__all__ = [
    "read_warnings",
    "records_warnings",
    "set_warnings",
]

_warnings: Final = vars(warnings)


@uses(
    "warnings._showwarnmsg_impl",
    "warnings._showwarning_orig",
    lost="pytest.warns and recwarn get no warnings of ranks of processes",
)
def records_warnings() -> bool:
    """Return whether warnings are recorded, as in ``catch_warnings(record=True)``, or shown by a program's function."""
    if not isinstance(_warnings["_showwarnmsg_impl"], FunctionType):  # a recorder puts a list's method there
        return True
    return warnings.showwarning is not _warnings.get("_showwarning_orig")


def read_warnings() -> tuple[Any, Any, Any]:
    """Return the filters of warnings, the function that shows them, and the one by which ``pytest.warns`` records."""
    return _warnings["filters"], _warnings["showwarning"], _warnings["_showwarnmsg_impl"]


def set_warnings(filters: Any, shown: Any, shown_by: Any) -> None:
    """Set what :func:`read_warnings` returns."""
    _warnings["filters"], _warnings["showwarning"], _warnings["_showwarnmsg_impl"] = filters, shown, shown_by
