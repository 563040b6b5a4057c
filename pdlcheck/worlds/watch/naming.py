"""What the user calls a tensor at the call that communicates it: ``a``, ``grads['w1']``, ``model.fc1.weight``.

Ranks have no common identity for their tensors. Their programs do have common names: the variable of one function
that holds the tensor, the place of a list or dict, the path of a parameter in its module. Where no variable holds the
tensor, the text of the call stands for it.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module, Parameter

from pdlcheck.worlds.watch.callsite import calls_tests, short, user_frames

__all__ = ["Name", "names_of"]

_FRAMES = 4  # innermost user frames that are searched
_ITEMS = 256  # longer lists and dicts are not searched
_CONTAINERS = frozenset({dict, list, tuple})
_DEPTH = 2  # lists in dicts are, as an optimizer keeps its parameters


class Name(NamedTuple):
    """One name of a tensor.

    Args:
        text: the name, as a person would write it.
        function: whose name it is, ``train.py step``.
        where: the line that is under way in that function, ``train.py:12``.
    """

    text: str
    function: str
    where: str


def names_of(tensor: Tensor) -> tuple[Name, ...]:
    """Return every name that the innermost user functions have for ``tensor``; empty outside user code.

    So it is in a callback that torch itself gave to a future, as its hooks for DDP do.
    """
    names = []
    for frame, _ in zip(user_frames(of_callback=True), range(_FRAMES), strict=False):
        code = frame.f_code
        if calls_tests(code.co_filename):
            break
        for text in list(_in_scope(tensor, frame.f_locals)) or _from_text(frame):
            names.append(Name(text, *_place(short(code.co_filename), code, frame.f_lineno)))
    return tuple(names)


@lru_cache(maxsize=4096)
def _place(path: str, code: CodeType, line: int) -> tuple[str, str]:
    """The function and the line, as a name tells them."""
    return f"{path} {code.co_qualname}", f"{path}:{line}"


# -- by identity -----------------------------------------------------------------------------------


def _in_scope(wanted: object, scope: Mapping[str, Any]) -> Iterator[str]:
    """The variables that hold the object, and their places in lists and dicts; those of ``self`` too."""
    for name, value in scope.items():
        if value is wanted:
            yield name
        elif type(value) in _CONTAINERS:
            yield from _in_container(wanted, name, value, _DEPTH)
    own = getattr(scope.get("self"), "__dict__", None)
    if own:
        yield from (f"self.{name}" for name in _in_scope(wanted, {k: v for k, v in own.items() if k != "self"}))


def _in_container(wanted: object, name: str, container: Any, depth: int) -> Iterator[str]:
    if len(container) > _ITEMS:
        return
    items = container.items() if type(container) is dict else enumerate(container)
    for key, held in items:
        if held is wanted:
            yield f"{name}[{key!r}]"
        elif depth > 1 and type(held) in _CONTAINERS:
            yield from _in_container(wanted, f"{name}[{key!r}]", held, depth - 1)


def _parameter(frame: FrameType, argument: str) -> Iterator[str]:
    """``model.fc1.weight.grad`` for the argument ``p.grad``, where the loop's ``p`` is a parameter of ``model``."""
    root, dot, rest = argument.partition(".")
    parameter = frame.f_locals.get(root)
    if not isinstance(parameter, Parameter):
        return
    scope = {name: value for name, value in frame.f_locals.items() if name != root}
    yield from (f"{name}{dot}{rest}" for name in _in_scope(parameter, scope))
    own = scope.get("self")
    if hasattr(own, "__dict__"):
        scope |= {f"self.{name}": value for name, value in (vars(own) | getattr(own, "_modules", {})).items()}
    for name, value in scope.items():
        if isinstance(value, Module):
            for path, held in value.named_parameters():
                if held is parameter:
                    yield f"{name}.{path}{dot}{rest}"


# -- by text ---------------------------------------------------------------------------------------


def _from_text(frame: FrameType) -> list[str]:
    """No variable of the frame is the tensor: what the call under way says, read from the source only then."""
    call = _call(frame.f_code, frame.f_lasti)
    found = list(_parameter(frame, call.argument)) if call.argument else []
    return found or ([call.text] if call.text else [])


class _Call(NamedTuple):
    text: str  # the call as written, in ast's spelling
    argument: str  # its first argument, if that is a name or an attribute of one


@lru_cache(maxsize=4096)
def _call(code: CodeType, instruction: int) -> _Call:
    """The call that is under way in a frame; empty where the source is not to be had."""
    positions = list(code.co_positions())
    first, last, left, right = positions[instruction // 2] if instruction >= 0 else (None,) * 4
    if first is None or last is None or left is None or right is None:
        return _Call("", "")
    lines = [line.encode() for line in linecache.getlines(code.co_filename)[first - 1 : last]]
    if len(lines) != last - first + 1:
        return _Call("", "")
    lines[-1] = lines[-1][:right]  # columns count bytes
    lines[0] = lines[0][left:]
    try:
        call = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except SyntaxError:  # the file has changed since it was imported
        return _Call("", "")
    if not isinstance(call, ast.Call):
        return _Call("", "")
    return _Call(ast.unparse(call), _variable(call.args[0]) if call.args else "")


def _variable(argument: ast.expr) -> str:
    root = argument.value if isinstance(argument, ast.Attribute) else argument
    return ast.unparse(argument) if isinstance(root, ast.Name) else ""
