"""pytest's texts: tracebacks in reports, values in messages, and the JUnit XML file."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pdlcheck.compat.private import take

__all__ = [
    "ExceptionRepr",
    "ReprEntry",
    "ReprExceptionInfo",
    "ReprFileLocation",
    "ReprTraceback",
    "TerminalWriter",
    "TracebackEntry",
    "filter_traceback",
    "require_text",
    "saferepr",
    "xml_key",
]

if TYPE_CHECKING:
    from _pytest._code.code import (
        ExceptionRepr,
        ReprEntry,
        ReprExceptionInfo,
        ReprFileLocation,
        ReprTraceback,
        TracebackEntry,
        filter_traceback,
    )
    from _pytest._io import TerminalWriter
    from _pytest._io.saferepr import saferepr
else:
    _FAILURE, _LOST = "the report of a failure on a rank", "reports of failures on ranks"
    ExceptionRepr = take("_pytest._code.code.ExceptionRepr", _FAILURE, lost=_LOST)
    ReprEntry = take("_pytest._code.code.ReprEntry", _FAILURE, lost=_LOST)
    ReprExceptionInfo = take("_pytest._code.code.ReprExceptionInfo", _FAILURE, lost=_LOST)
    ReprFileLocation = take("_pytest._code.code.ReprFileLocation", _FAILURE, lost=_LOST)
    ReprTraceback = take("_pytest._code.code.ReprTraceback", _FAILURE, lost=_LOST)
    TerminalWriter = take("_pytest._io.TerminalWriter", _FAILURE, lost=_LOST)
    TracebackEntry = Any
    filter_traceback = take(
        "_pytest._code.code.filter_traceback", "the traceback of a conftest file", lost="tests on rank processes"
    )
    saferepr = take("_pytest._io.saferepr.saferepr", "short values in messages", lost="tests on rank processes")

xml_key: Any = take("_pytest.junitxml.xml_key", "what ranks record for --junit-xml", lost="tests on rank processes")
require_text: Callable[[str, object], None] = take(
    "_pytest.junitxml._check_record_param_type",
    "the error of record_testsuite_property for a name that is no text",
    lost="that error on rank processes",
)
