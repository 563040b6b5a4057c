"""The private names of libraries: what each is for, what does not work without it, and whether it is there.

Each private name of torch, pytest, Hypothesis, pytest-benchmark and Python stands once, in a module of this package
that is named after its library: as a value (:func:`take`), in a function that reads it from an object (:func:`uses`),
or as a pair of owner and attribute for a table of patches (:func:`name`). The other packages import from there.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import platform
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

__all__ = ["LIBRARIES", "MissingName", "PrivateName", "missing", "name", "names", "take", "uses"]

LIBRARIES: Final = ("python", "torch", "pytest", "hypothesis", "pytest_benchmark")  # the modules of this package

_Function = TypeVar("_Function", bound=Callable[..., Any])
_ABSENT: Final = object()
_registered: dict[str, PrivateName] = {}


class MissingName(RuntimeError):
    """A library lacks a private name that pdlcheck needs."""


class PrivateName(NamedTuple):
    """A private name of a library.

    Args:
        path: the dotted path: ``torch._C._len_torch_dispatch_stack``, ``_pytest.fixtures.FixtureDef._finalizers``.
        purpose: what pdlcheck uses it for.
        lost: what does not work without it.
    """

    path: str
    purpose: str
    lost: str

    @property
    def library(self) -> str:
        """The library that has the name, as in ``LIBRARIES``."""
        top = self.path.partition(".")[0]
        return "python" if top in sys.stdlib_module_names else "pytest" if top == "_pytest" else top

    @property
    def value(self) -> Any:
        """The present value, or an object that raises :class:`MissingName` when it is used."""
        value = _resolve(self.path)
        return _Missing(self) if value is _ABSENT else value

    @property
    def owner(self) -> Any:
        """The module, class or object that has the attribute."""
        return _resolve(self.path.rpartition(".")[0])

    @property
    def attribute(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    def is_there(self) -> bool:
        """Return whether the installed library has the name; on instances, whether their class sets it."""
        owner = self.owner
        if owner is _ABSENT:
            return False
        return hasattr(owner, self.attribute) or (isinstance(owner, type) and _sets(owner, self.attribute))


def name(path: str, purpose: str, *, lost: str) -> PrivateName:
    """Register a private name.

    Raises:
        ValueError: the name is registered already.
    """
    row = PrivateName(path, purpose, lost)
    if _registered.setdefault(path, row) != row:
        raise ValueError(f"the private name {path} is registered twice; import it from where it is registered first")
    return row


def take(path: str, purpose: str, *, lost: str) -> Any:
    """Register a private name and return its value, or an object that raises :class:`MissingName` when it is used.

    Example:
        >>> depth = take("sys._getframe", "the caller's line in a message", lost="the line in messages")
        >>> depth().f_lineno
        1
    """
    row = name(path, purpose, lost=lost)
    value = _resolve(path)
    return _Missing(row) if value is _ABSENT else value


def uses(*paths: str, lost: str) -> Callable[[_Function], _Function]:
    """Register the private names that a function reads; the first line of its docstring is their purpose."""

    def register(function: _Function) -> _Function:
        purpose = (function.__doc__ or "").partition("\n")[0]
        for path in paths:
            name(path, purpose, lost=lost)
        return function

    return register


def names(library: str) -> list[PrivateName]:
    """Return the private names of a library; its modules are imported.

    Args:
        library: one of ``LIBRARIES``.
    """
    home = importlib.import_module(f"pdlcheck.compat.{library}")
    for found in pkgutil.iter_modules(getattr(home, "__path__", ()), f"{home.__name__}."):
        importlib.import_module(found.name)
    return [row for row in _registered.values() if row.library == library]


def missing(library: str) -> list[PrivateName]:
    """Return the private names that the installed library lacks.

    Args:
        library: one of ``LIBRARIES``.
    """
    return [row for row in names(library) if not row.is_there()]


class _Missing:
    """Stands for a name that is not there; each use says so."""

    def __init__(self, row: PrivateName) -> None:
        self.__dict__["row"] = row

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        _refuse(self.__dict__["row"])

    def __getattr__(self, attribute: str) -> NoReturn:
        _refuse(self.__dict__["row"])

    def __mro_entries__(self, bases: tuple[object, ...]) -> NoReturn:
        _refuse(self.__dict__["row"])

    def __instancecheck__(self, value: object) -> NoReturn:
        _refuse(self.__dict__["row"])


def _refuse(row: PrivateName) -> NoReturn:
    raise MissingName(
        f"{_with_version(row.library)} has no {row.path}. pdlcheck uses it for: {row.purpose}. Without it: {row.lost}. "
        "Install another version of either; pdlcheck doctor lists all names that are missing"
    )


def _with_version(library: str) -> str:
    version = platform.python_version() if library == "python" else importlib.metadata.version(library)
    return f"{library} {version}"


def _resolve(path: str) -> Any:
    """Return the value of a dotted path, or ``_ABSENT``."""
    module, *rest = _split(path)
    if module is _ABSENT:
        return _ABSENT
    value = module
    for part in rest:
        value = getattr(value, part, _ABSENT)
        if value is _ABSENT:
            return _ABSENT
    return value


def _split(path: str) -> tuple[Any, ...]:
    """Return the longest part of a path that is a module, as the module, and the names after it."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            return importlib.import_module(".".join(parts[:length])), *parts[length:]
        except ModuleNotFoundError:
            continue
    return (_ABSENT,)


def _sets(kind: type, attribute: str) -> bool:
    """Return whether a method of a class, or of a base, names the attribute, so that instances have it."""
    return any(attribute in getattr(base, "__annotations__", ()) or attribute in _named(base) for base in kind.__mro__)


def _named(kind: type) -> Iterator[str]:
    for value in vars(kind).values():
        if isinstance(value, FunctionType):
            yield from value.__code__.co_names
