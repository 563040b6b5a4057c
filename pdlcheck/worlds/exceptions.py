"""The texts and notes of users' exceptions, read safely for any exception class.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

__all__ = ["LONGEST", "add_note", "notes_of", "shorten", "text_of"]

LONGEST = 200_000  # characters of one text; of a longer text only both ends are shown
_AT_EACH_END = LONGEST // 2
_NO_TEXT = "<exception str() failed>"


def text_of(error: BaseException) -> str:
    """Return the text of an exception; if its ``__str__`` raises, return the text that pytest uses.

    Example:
        >>> text_of(ValueError("no data"))
        'no data'
    """
    try:
        return str(error)
    except BaseException:  # users' classes may raise anything, including SystemExit
        return _NO_TEXT


def add_note(error: BaseException, note: str) -> None:
    """Add a note as ``error.add_note`` does, also if its class overrides that or its ``__notes__`` is not a list."""
    try:
        BaseException.add_note(error, note)
    except TypeError:  # the notes are not a list
        vars(error)["__notes__"] = [*notes_of(error), note]


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of an exception, also if its ``__notes__`` is not a list of texts.

    Example:
        >>> error = ValueError("no data")
        >>> error.add_note("in step 3")
        >>> notes_of(error)
        ['in step 3']
    """
    held = getattr(error, "__notes__", ())
    return [held] if isinstance(held, str) else [str(one) for one in held] if hasattr(held, "__iter__") else []


def shorten(error: BaseException) -> None:
    """Cut the middle out of texts over :data:`LONGEST` characters, in the exception and in those chained to it.

    Formatting such texts would take minutes and gigabytes. A text that the class builds itself, in ``__str__``, stays
    unchanged.
    """
    for one in _chain(error):
        with suppress(Exception):  # `args` and `__notes__` may be anything
            if any(_is_long(value) for value in one.args):
                one.args = tuple(_cut(value) if _is_long(value) else value for value in one.args)
            notes = getattr(one, "__notes__", ())
            if any(_is_long(value) for value in notes):
                one.__notes__ = [_cut(value) if _is_long(value) else value for value in notes]


def _chain(error: BaseException) -> Iterator[BaseException]:
    todo, seen = [error], set()
    while todo:
        one = todo.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            todo += [link for link in (one.__cause__, one.__context__) if link is not None]
            todo += one.exceptions if isinstance(one, BaseExceptionGroup) else ()


def _is_long(value: object) -> bool:
    return isinstance(value, str) and len(value) > LONGEST


def _cut(text: str) -> str:
    left_out = len(text) - 2 * _AT_EACH_END
    return f"{text[:_AT_EACH_END]}\n... {left_out} characters are left out ...\n{text[-_AT_EACH_END:]}"
