"""The private names of libraries: what each is for, what does not work without it, and whether it is there.

Each private name of torch, pytest, Hypothesis, pytest-benchmark and Python stands once, in a module of this package
that is named after its library: as a value (:func:`take`), in a function that reads it from an object (:func:`uses`),
or as a pair of owner and attribute for a table of patches (:func:`name`). The other packages import from there.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

__all__ = [
    "LIBRARIES",
    "MissingName",
    "MissingNameWarning",
    "PrivateName",
    "installed_libraries",
    "missing",
    "name",
    "names",
    "take",
    "uses",
    "warn_of_missing",
]

# the modules of this package
LIBRARIES: Final = ("python", "torch", "pytest", "hypothesis", "pytest_benchmark", "pytest_cov")

_Function = TypeVar("_Function", bound=Callable[..., Any])
_ABSENT: Final = object()
_OR: Final = " or "
_registered: dict[str, PrivateName] = {}
_warned_of: set[str] = set()


class MissingName(RuntimeError):
    """A library lacks a private name that pdlcheck needs."""


class MissingNameWarning(UserWarning):
    """The installed version of a library lacks private names that pdlcheck uses."""


class PrivateName(NamedTuple):
    """A private name of a library.

    Args:
        path: the dotted path: ``torch._C._len_torch_dispatch_stack``, ``_pytest.fixtures.FixtureDef._finalizers``.
            An attribute that a function sets on an object of another module follows that function:
            ``_pytest.tmpdir.pytest_configure._tmp_path_factory``. If versions of the library use several names, they
            are separated by `` or ``; one of them must be there.
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
        for path in self.path.split(_OR):
            owner, _, attribute = path.rpartition(".")
            if _has(owner, attribute):
                return True
        return False


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


def uses(*paths: str, lost: str, when: bool = True) -> Callable[[_Function], _Function]:
    """Register the private names that a function reads; the first line of its docstring is their purpose.

    Args:
        paths: as in :class:`PrivateName`.
        lost: what does not work without them.
        when: whether the installed version should have them.
    """

    def register(function: _Function) -> _Function:
        purpose = (function.__doc__ or "").partition("\n")[0]
        for path in paths if when else ():
            name(path, purpose, lost=lost)
        return function

    return register


def installed_libraries() -> list[str]:
    """Return those of ``LIBRARIES`` that are installed."""
    return [library for library in LIBRARIES if _is_installed(library)]


def names(library: str) -> list[PrivateName]:
    """Return the private names of a library; its modules are imported.

    Args:
        library: one of ``LIBRARIES``.
    """
    import pkgutil  # takes half a millisecond, and a session without ranks never calls this

    home = importlib.import_module(f"pdlcheck.compat.{library}")
    for found in pkgutil.iter_modules(getattr(home, "__path__", ()), f"{home.__name__}."):
        importlib.import_module(found.name)
    return _registered_of(library)


def missing(library: str) -> list[PrivateName]:
    """Return the private names that the installed library lacks; none if the library is not installed.

    Args:
        library: one of ``LIBRARIES``.
    """
    return _missing_of(names(library)) if _is_installed(library) else []


def warn_of_missing(
    library: str, warn: Callable[[Warning], object] = warnings.warn, *, only_registered: bool = False
) -> None:
    """Warn, once in a process for each name, of the private names that the installed library lacks.

    Args:
        library: one of ``LIBRARIES``.
        warn: issues the warning, for instance where filters do not make it an error.
        only_registered: check only the names in modules that are imported already. That takes microseconds.
    """
    found = _missing_of(_registered_of(library)) if only_registered else missing(library)
    new = [row for row in found if row.path not in _warned_of]
    if new:
        _warned_of.update(row.path for row in new)
        lines = [f"\n  {row.path}: {row.purpose.rstrip('.')}. Without it: {row.lost}." for row in new]
        warn(
            MissingNameWarning(
                f"{_with_version(library)} lacks private names that pdlcheck uses:{''.join(lines)}\n"
                f"Install another version of {library} or of pdlcheck; pdlcheck doctor lists all names that are missing"
            )
        )


def _registered_of(library: str) -> list[PrivateName]:
    return [row for row in _registered.values() if row.library == library]


def _missing_of(rows: list[PrivateName]) -> list[PrivateName]:
    return [row for row in rows if not row.is_there()]


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
    import platform

    version = platform.python_version() if library == "python" else importlib.metadata.version(library)
    return f"{library} {version}"


def _is_installed(library: str) -> bool:
    return library == "python" or _module(library) is not _ABSENT


def _has(path: str, attribute: str) -> bool:
    """Return whether what stands at a path has the attribute, or sets it."""
    owner = _resolve(path)
    if owner is _ABSENT:
        return False
    if hasattr(owner, attribute):
        return True
    if isinstance(owner, type):
        from inspect import get_annotations  # reading __annotations__ would give a class without them an empty one

        return any(attribute in get_annotations(base) or _names(base, attribute) for base in owner.__mro__)
    return isinstance(owner, FunctionType) and attribute in (*owner.__code__.co_names, *owner.__code__.co_consts)


def _resolve(path: str) -> Any:
    """Return the value of a dotted path, or ``_ABSENT``."""
    if path in sys.modules:  # first: a package may have a function with the name of one of its modules
        return sys.modules[path]
    module, _, name = path.rpartition(".")
    found = getattr(sys.modules.get(module), name, _ABSENT)
    if found is not _ABSENT:  # most often
        return found
    done, *rest = path.split(".")
    value = _module(done)
    for part in rest:
        done = f"{done}.{part}"
        found = sys.modules.get(done) or getattr(value, part, _ABSENT)
        if found is _ABSENT:
            found = _module(done)
        if found is _ABSENT:
            return _ABSENT
        value = found
    return value


def _module(path: str) -> Any:
    try:
        return sys.modules.get(path) or importlib.import_module(path)
    except ModuleNotFoundError:
        return _ABSENT


def _names(kind: type, attribute: str) -> bool:
    """Return whether a method or property of a class sets the attribute, so that instances have it."""
    own = vars(kind)
    init = own.get("__init__")  # most often it is this one
    if any(_assigns(function, attribute) for function in _functions_of(init)):
        return True
    return any(_assigns(function, attribute) for value in own.values() for function in _functions_of(value))


def _functions_of(value: object) -> tuple[FunctionType, ...]:
    """Return the functions behind a value in a class: a method of any kind, or a property."""
    from inspect import unwrap  # imported by pytest anyway, and not needed in a session without ranks

    found = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
    real = map(unwrap, filter(callable, found))  # a stand-in may be in force
    return tuple(one for one in real if isinstance(one, FunctionType))


def _assigns(function: FunctionType, attribute: str) -> bool:
    """Return whether a function sets the attribute, by a statement or by a string."""
    code = function.__code__
    if attribute not in code.co_names:
        return attribute in code.co_consts
    from dis import get_instructions

    return any(one.opname == "STORE_ATTR" and one.argval == attribute for one in get_instructions(code))
