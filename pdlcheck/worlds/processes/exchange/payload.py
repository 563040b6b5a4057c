"""Functions, arguments, results and exceptions as bytes; an error names the value that cannot be sent."""

from __future__ import annotations

import builtins
import copyreg
import importlib
import importlib.util
import io
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from pdlcheck.worlds.exceptions import notes_of, text_of
from pdlcheck.worlds.outcome import check_has_run
from pdlcheck.worlds.unsendable import unsendable_call, users, within

__all__ = [
    "Modules",
    "dump_call",
    "dump_error",
    "dump_result",
    "import_module_of",
    "is_our_own",
    "load_call",
    "made_anew",
]

Modules = tuple[tuple[str, str], ...]  # names and files

_OUR_OWN = ("pdlcheck.harness.", "pdlcheck.item_runners.")
_PLAIN = frozenset({bool, bytes, complex, float, int, str, type(None)})


def dump_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bytes, Modules]:
    """Return the call as bytes; functions of ``__main__``, lambdas and closures travel by value.

    Also return the modules that a rank may need help to import, including those of functions and classes in the call.
    The functions of a test file rely on the effects of its import, such as changes of the environment or of
    ``sys.modules``.

    Raises:
        TypeError: the function or an argument cannot be sent; the message names it.
    """
    __tracebackhide__ = True
    try:
        if is_our_own(fn) and not kwargs and _is_plain(args):
            return pickle.dumps((fn, args, kwargs), pickle.HIGHEST_PROTOCOL), ()
        modules: dict[tuple[str, str], None] = {}
        data = _dumps((fn, args, kwargs), modules)
        return data, tuple(modules)
    except Exception as caught:  # pickling runs code of any class; find out below which one
        error = caught
    if own := unsendable_call(fn, args, kwargs, _trouble, of="the test" if is_our_own(fn) else ""):
        raise own
    name = getattr(fn, "__qualname__", repr(fn))
    raise TypeError(f"the call of {name} cannot be sent to the ranks: {_head(error)}") from error


def load_call(
    payload: bytes, loads: Callable[[bytes], Any] = pickle.loads
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the call that :func:`dump_call` has dumped, in the rank; ``loads`` unpickles."""
    try:
        return loads(payload)  # type: ignore[no-any-return]
    except ModuleNotFoundError:  # the file may be newer than the import system's cache of its folder
        importlib.invalidate_caches()
        return loads(payload)  # type: ignore[no-any-return]


def dump_result(value: Any, rank: int) -> bytes:
    """Return the result of a rank's function as bytes.

    Raises:
        TypeError: the result cannot be sent.
    """
    check_has_run(value, rank)
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL) if _is_plain(value) else _dumps(value)
    except BaseException as error:  # pickling runs code of any class
        raise TypeError(
            f"rank {rank} returned a {type(value).__name__} that cannot be sent to the controller: "
            f"{within(value, '', error, _trouble)}; return tensors, numbers, strings, or containers of these"
        ) from users(error)


def dump_error(error: BaseException) -> bytes | None:
    """Return an exception as bytes; None unless it unpickles to the same type with the same text.

    A form that keeps the notes is preferred. The reducer of a user's class may lose them.
    """
    known = None
    for form in (error, _AsItIs(error)):
        with suppress(BaseException):  # constructors and reducers of users' classes may raise anything
            data = _dumps(form)
            copy = pickle.loads(data)
            if type(copy) is type(error) and text_of(copy) == text_of(error):
                if notes_of(copy) == notes_of(error):
                    return data
                known = known or data
    return known


class _AsItIs:
    """An exception that unpickles without its constructor, whose arguments often differ from ``args``.

    They do for most exceptions with fields.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        held = {name: value for name, value in vars(self._error).items() if _travels(value)}
        return _remade, (type(self._error), self._error.args, held)


def _remade(kind: type[BaseException], args: tuple[Any, ...], held: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(held)
    return error


def _travels(value: Any) -> bool:
    try:
        pickle.loads(_dumps(value))
    except BaseException:  # pickling runs code of any class
        return False
    return True


def _module_of(fn: Callable[..., Any] | type) -> tuple[str, str] | None:
    """Return the name and file of the module of a function or class; None if a rank can import it without help."""
    name: Any = getattr(fn, "__module__", None)
    module = sys.modules.get(name) if isinstance(name, str) else None
    file = getattr(module, "__file__", None)
    if module is None or file is None or name == "__main__":
        return None
    file = os.path.abspath(file)
    top = name.partition(".")[0]
    if getattr(module, "__package__", "") and _is_importable(top, _folder_of(top, name, file)):
        return None
    return name, file


def _folder_of(package: str, name: str, file: str) -> str:
    """Return the folder of a package that holds the module ``name``, given the file of that module."""
    levels = name.count(".") - package.count(".") + os.path.basename(file).startswith("__init__.")
    for _ in range(levels):
        file = os.path.dirname(file)
    return file


@lru_cache(maxsize=256)
def _is_importable(package: str, folder: str) -> bool:
    """Return whether imports find that package there; ``--import-mode=importlib`` hides the packages of test files."""
    specs = (finder.find_spec(package, None) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    found = next((spec for spec in specs if spec is not None), None)
    return found is not None and any(_is_file(path, folder) for path in found.submodule_search_locations or ())


def import_module_of(name: str, file: str) -> None:
    """Import the module ``name`` from exactly this file: test files share names, and not all are importable."""
    known = sys.modules.get(name)
    if known is not None and _is_file(getattr(known, "__file__", None), file):
        return
    found = _spec_of(name) if known is None else None
    package = name.rpartition(".")[0]
    if found is None and package and package not in sys.modules:
        _import_package(package, _folder_of(package, name, file))
        found = _spec_of(name)
    if found is not None and _is_file(found.origin, file):
        with suppress(Exception):  # the unpickling of the call reports it
            importlib.import_module(name)
        return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise


def _spec_of(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:  # imports do not find its package
        return None


def _import_package(name: str, folder: str) -> None:
    """Import a package from its own file; without one, make a package of the folder alone, as pytest does."""
    above, _, last = name.rpartition(".")
    if above and above not in sys.modules:
        _import_package(above, os.path.dirname(folder))
    file = os.path.join(folder, "__init__.py")
    if os.path.isfile(file):
        import_module_of(name, file)
    else:
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = [folder]
    if above:
        setattr(sys.modules[above], last, sys.modules[name])


def _is_file(one: str | None, other: str) -> bool:
    return one is not None and os.path.realpath(one) == os.path.realpath(other)


made_anew: dict[type, Callable[[], Any]] = {}  # types of which a rank makes a new object, and the function for it


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """A pickler that also takes classes that falsely claim to be builtins, as pytest's do: a skip stays a skip.

    It also takes modules with parametrized tensors, such as those of weight_norm and spectral_norm. Each such module
    has its own class, which refuses to be pickled because a file would need it. Here the class travels with the module.
    """

    def __init__(self, file: io.BytesIO, modules: dict[tuple[str, str], None]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._modules = modules

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType | type) and (module := _module_of(obj)) is not None:
            self._modules[module] = None
        if isinstance(obj, type) and obj.__module__ == "builtins" and not hasattr(builtins, obj.__name__):
            home = _home(obj)
            if home is not None:
                return getattr, (home, obj.__name__)
        if type(obj) in made_anew:
            return made_anew[type(obj)], ()
        if _is_parametrized(obj):
            return copyreg.__newobj__, (type(obj),), vars(obj)  # type: ignore[attr-defined]  # as pickle itself does
        return super().reducer_override(obj)


def _is_parametrized(obj: Any) -> bool:
    """Return whether torch has made the class for this one module.

    This compares names, because torch may not be imported yet.
    """
    return type(obj).__module__ == "torch.nn.utils.parametrize" and hasattr(obj, "parametrizations")


def _home(cls: type) -> ModuleType | None:
    """Return the module whose code defines the class; None if it is not found."""
    maker = cls.__init__  # type: ignore[misc]  # of this class, not of an instance
    module = sys.modules.get(getattr(maker, "__module__", ""))
    return module if getattr(module, cls.__name__, None) is cls else None


def _dumps(value: Any, modules: dict[tuple[str, str], None] | None = None) -> bytes:
    """Return the value as bytes; add the modules of all functions and classes to ``modules``."""
    buffer = io.BytesIO()
    _Pickler(buffer, {} if modules is None else modules).dump(value)
    return buffer.getvalue()


def is_our_own(fn: Callable[..., Any]) -> bool:
    """Return whether the function belongs to pdlcheck's item runners or harness: any rank can import it."""
    return str(getattr(fn, "__module__", "")).startswith(_OUR_OWN)


def _is_plain(value: Any, depth: int = 4) -> bool:
    """Return whether a value consists of Python's own types in shallow containers, which pickle without help."""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind is dict:
        return depth > 0 and all(_is_plain(k, depth - 1) and _is_plain(v, depth - 1) for k, v in value.items())
    return kind in (tuple, list) and depth > 0 and all(_is_plain(part, depth - 1) for part in value)


def _trouble(part: Any) -> BaseException | None:
    try:
        _dumps(part)
    except BaseException as error:  # the caller gets it
        return error
    return None


def _head(error: BaseException) -> str:
    return f"{type(error).__name__}: {(text_of(error).splitlines() or [''])[0]}"
