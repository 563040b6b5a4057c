"""The end of processes that a rank forks: they are not the rank, nor are their results and exceptions."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from pdlcheck.worlds.standard_streams import flush_streams

__all__ = ["forked_children_end"]


@contextmanager
def forked_children_end() -> Iterator[None]:
    """End each process that the block forks at the moment it would leave the block, as at the end of a script.

    Its exit code is 0. After an exception the process prints the traceback and exits with 1, and after ``sys.exit(n)``
    with ``n``.
    """
    rank = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != rank:
            _end(error)
        raise
    if os.getpid() != rank:
        _end(None)


def _end(error: BaseException | None) -> NoReturn:
    code: object = 0
    with suppress(Exception):  # the process may have closed its streams
        if isinstance(error, SystemExit):
            code = error.code
        elif error is not None:
            code = 1
            traceback.print_exception(error)
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
    flush_streams()
    os._exit(0 if code is None else code & 0xFF if isinstance(code, int) else 1)
