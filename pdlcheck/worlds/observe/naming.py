"""The user's name for a tensor at the call that communicates it: ``a``, ``grads['w1']``, ``model.fc1.weight``.

Ranks have no common identity for their tensors, but their programs have common names: the variable of a function that
holds the tensor, its place in a list or dict, the path of a parameter in its module. If no variable holds the tensor,
the text of the call serves as its name.
"""

from __future__ import annotations

import ast
import linecache
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter

from pdlcheck.compat.torch.modules import submodules
from pdlcheck.operations.signature import Name
from pdlcheck.worlds.observe.callsite import KIND_OF_FILE, here, short

__all__ = ["FRAMES", "line_and_names"]

FRAMES = 4  # innermost user frames that are searched
_ITEMS = 256  # longer lists and dicts are not searched
_CONTAINERS = frozenset({dict, list, tuple})
_PLAIN = frozenset({str, int, bool, float, type(None)})
_DEPTH = 2  # enough for lists in dicts, in which an optimizer keeps its parameters
_CALLS = 4096  # the number of cached calls
_CHECKS = os.path.join(str(Path(__file__).parents[2]), "checks") + os.sep


def line_and_names(tensor: Tensor | None) -> tuple[str, tuple[Name, ...], str]:
    """Return the user's line, every name of ``tensor``, and the user's line that called the function of the first line.

    The line is the one that :func:`~pdlcheck.worlds.observe.user_line` returns. The caller is empty if no user code
    called that function. The names are those in the innermost user functions. In a callback of a future only its own
    names count, because the functions that it interrupts depend on timing. So a callback that torch itself gave to a
    future, as its hooks for DDP do, has no names. One walk over the frames finds all three, because it is a large part
    of the cost of an operation.
    """
    line, caller, names, wanted = "", "", [], FRAMES if tensor is not None else 0
    in_wrapper = ""
    seeks = True  # seek the caller
    directory = here()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (wanted or seeks or not line):
        while not (kind := KIND_OF_FILE[frame.f_code.co_filename]) and frame.f_back is not None:
            frame = frame.f_back  # most frames are torch's
        if kind == "bottom":
            break
        if kind == "wrapper":
            in_wrapper = in_wrapper or _call_of(frame, directory).where
        elif kind:
            if kind != "user":
                wanted, seeks = 0, False
            if kind != "futures":
                call = _call_of(frame, directory)
                if not line:
                    line = call.where
                elif seeks and call.where != line:
                    caller, seeks = call.where, False
                if wanted:
                    wanted -= 1
                    for text in list(_in_scope(tensor, frame.f_locals)) or _from_text(frame, call):
                        names.append(Name(text, call.function, call.where))
        frame = frame.f_back
    return line or in_wrapper, tuple(names), caller


# -- by identity -----------------------------------------------------------------------------------


def _in_scope(wanted: object, scope: Mapping[str, Any]) -> Iterator[str]:
    """Yield the variables that hold the object, and its places in lists and dicts; include attributes of ``self``."""
    for name, value in scope.items():
        if value is wanted:
            yield name
        elif type(value) in _CONTAINERS:
            yield from (name + places for places in _in_container(wanted, value, _DEPTH))
    own = getattr(scope.get("self"), "__dict__", None)
    if own:
        yield from (f"self.{name}" for name in _in_scope(wanted, {k: v for k, v in own.items() if k != "self"}))


def _in_container(wanted: object, container: Any, depth: int) -> Iterator[str]:
    """Yield the places that hold the object: ``['w1']``, ``[0][3]``."""
    if len(container) > _ITEMS:
        return
    pairs = enumerate(container.items() if type(container) is dict else zip(range(_ITEMS), container, strict=False))
    for place, (key, held) in pairs:
        if held is wanted:
            yield _place(key, place)
        elif depth > 1 and type(held) in _CONTAINERS:
            yield from (_place(key, place) + inner for inner in _in_container(wanted, held, depth - 1))


def _place(key: object, place: int) -> str:
    """Return a key in brackets.

    A key is replaced by its type and position if its text may be slow to make, differ among ranks, or read a tensor.
    """
    parts = key if type(key) is tuple else (key,)
    return f"[{key!r}]" if all(type(part) in _PLAIN for part in parts) else f"[<{type(key).__name__} {place}>]"


def _parameter(frame: FrameType, argument: str) -> Iterator[str]:
    """Yield ``model.fc1.weight.grad`` for the argument ``p.grad`` if ``p`` of a loop is a parameter of ``model``."""
    root, dot, rest = argument.partition(".")
    parameter = frame.f_locals.get(root)
    if not isinstance(parameter, Parameter):
        return
    scope = {name: value for name, value in frame.f_locals.items() if name != root}
    yield from (f"{name}{dot}{rest}" for name in _in_scope(parameter, scope))
    own = scope.get("self")
    if hasattr(own, "__dict__"):
        scope |= {f"self.{name}": value for name, value in (vars(own) | submodules(own)).items()}
    for name, value in scope.items():
        if isinstance(value, Module):
            for path, held in value.named_parameters():
                if held is parameter:
                    yield f"{name}.{path}{dot}{rest}"


# -- by text ---------------------------------------------------------------------------------------


def _from_text(frame: FrameType, call: _Call) -> list[str]:
    """Return names from the source of the call, which is read only if no variable of the frame holds the tensor."""
    text, argument = call.source
    found = list(_parameter(frame, argument)) if argument else []
    return found or ([text] if text else [])


class _Call:
    """One call in a function; the same object each time that the function reaches the call."""

    def __init__(self, frame: FrameType, directory: str) -> None:
        path = short(frame.f_code.co_filename)
        self.code, self.directory = frame.f_code, directory
        self.function = f"{path} {frame.f_code.co_qualname}"
        self.where = f"{path}:{frame.f_lineno}"
        if self.code.co_filename.startswith(_CHECKS):
            self.where = f"{os.path.basename(path)}:{frame.f_lineno}, where the check compares ranks"
        self._instruction = frame.f_lasti

    @cached_property
    def source(self) -> tuple[str, str]:
        """Return the text of the call in ast's spelling, and its first argument if that is a variable or its attribute.

        Both are empty if the source is not available.
        """
        nothing = "", ""
        positions = list(self.code.co_positions())
        first, last, left, right = positions[self._instruction // 2] if self._instruction >= 0 else (None,) * 4
        if first is None or last is None or left is None or right is None:
            return nothing
        lines = [line.encode() for line in linecache.getlines(self.code.co_filename)[first - 1 : last]]
        if len(lines) != last - first + 1:
            return nothing
        lines[-1] = lines[-1][:right]  # columns count bytes
        lines[0] = lines[0][left:]
        try:
            call = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
        except SyntaxError:  # the file has changed since it was imported
            return nothing
        if not isinstance(call, ast.Call):
            return nothing
        return ast.unparse(call), _variable(call.args[0]) if call.args else ""


_calls: dict[tuple[int, int], _Call] = {}  # by the id of the code, which the call keeps alive: hashing is slower


def _call_of(frame: FrameType, directory: str) -> _Call:
    """Return the call that a frame is executing."""
    place = id(frame.f_code), frame.f_lasti
    call = _calls.get(place)
    if call is None or call.directory != directory:
        if len(_calls) >= _CALLS:
            _calls.clear()
        call = _calls[place] = _Call(frame, directory)
    return call


def _variable(argument: ast.expr) -> str:
    root = argument.value if isinstance(argument, ast.Attribute) else argument
    return ast.unparse(argument) if isinstance(root, ast.Name) else ""
