"""The error for an argument or a result that cannot be sent between processes: it names the value and the bad part."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from types import FunctionType
from typing import Any

from pdlcheck.worlds.exceptions import text_of

__all__ = ["unsendable_call", "users", "within"]

Trouble = Callable[[Any], BaseException | None]  # returns the error of sending a value; None if it can be sent

_LEVELS = 8
_PARTS = 1000  # the number of parts tried in one container
_HELD = "'s "  # stands before the name of a variable that a function refers to
_MACHINERY = ("cloudpickle", "copy", "copyreg", "pdlcheck", "pickle")
_CURE = "create it inside the function, or pass what it is made of"


def unsendable_call(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], trouble: Trouble, *, of: str = ""
) -> TypeError | None:
    """Return the error for a call with a part that cannot be sent to the ranks; None if every part alone can be sent.

    Args:
        fn: the function of the call.
        args: its positional arguments.
        kwargs: its keyword arguments.
        trouble: returns the exception raised when a value is sent; None if it can be sent.
        of: the name of the function in the message; default: its own name.
    """
    of = of or getattr(fn, "__qualname__", repr(fn))
    parts = [(f"the function {of}", "", fn)]
    parts += [(f"argument {name} of {of}", name.strip("'"), value) for name, value in _named(fn, args, kwargs)]
    for words, name, value in parts:
        if (cause := trouble(value)) is not None:
            error = TypeError(f"{words} cannot be sent to the ranks: {within(value, name, cause, trouble)}; {_CURE}")
            error.__cause__ = users(cause)
            return error
    return None


def within(value: Any, name: str, cause: BaseException, trouble: Trouble) -> str:
    """Return a description of the object ``name``: its type, the part that cannot be sent, and the reason.

    ``name`` is "" for an object without a name.
    """
    path, part, cause = _innermost(value, cause, trouble, _LEVELS)
    why = f"{type(cause).__name__}: {_first_line(cause)}"
    if not name:
        return f"its {path.removeprefix(_HELD)} is a {_kind(part)}: {why}" if path else why
    return f"{name} is a {_kind(value)}{f', {name}{path} a {_kind(part)}' if path else ''}: {why}"


def users(error: BaseException) -> BaseException | None:
    """Return the error if it comes from code of a user's class; else None: a library's traceback does not help."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    name = str(frames[-1].f_globals.get("__name__")) if frames else ""
    return None if name.partition(".")[0] in _MACHINERY else error


def _innermost(value: Any, cause: BaseException, trouble: Trouble, levels: int) -> tuple[str, Any, BaseException]:
    for step, part in islice(_parts(value), _PARTS) if levels else ():
        if (why := trouble(part)) is not None:
            path, innermost, why = _innermost(part, why, trouble, levels - 1)
            return step + path, innermost, why
    return "", value, cause


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts that a user can name, except those of an object whose class pickles in its own way."""
    kind: Any = type(value)
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{place}]", part) for place, part in enumerate(value))
    elif isinstance(value, FunctionType):
        try:
            held = inspect.getclosurevars(value)
        except ValueError:  # a variable has no value yet
            return
        yield from ((f"{_HELD}{name}", part) for name, part in {**held.globals, **held.nonlocals}.items())
    elif kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__:
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())


def _named(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments with the function's names for them, or with their numbers."""
    try:
        known = [
            parameter.name
            for parameter in inspect.signature(fn).parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):  # fn is written in C, or cannot be called
        known = []
    for place, value in enumerate(args):
        yield (repr(known[place]) if place < len(known) else str(place)), value
    yield from ((repr(name), value) for name, value in kwargs.items())


def _kind(value: Any) -> str:
    return type(value).__qualname__


def _first_line(error: BaseException) -> str:
    return (text_of(error).splitlines() or [""])[0]
