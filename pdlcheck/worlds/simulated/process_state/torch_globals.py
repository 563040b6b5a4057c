"""State that torch's context managers and global hooks keep for the whole process: each rank has its own.

``loss_parallel`` puts its operators into the table of all DTensors. ``enable_wrap`` and FSDP's profiler refuse to be
entered twice. ``CommDebugMode`` and ``FlopCounterMode`` record every module's call. A rank that communicates inside one
of them gives up its turn there. What a rank leaves behind when it ends applies to every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

__all__ = ["begin", "controllers", "end", "present", "put_back"]


class _Place(NamedTuple):
    """An attribute, or the contents of a container.

    The container stays the same object, because handles and C++ hold references to it.
    """

    owner: Any
    name: str
    contents: bool

    def read(self) -> Any:
        value = getattr(self.owner, self.name)
        return value.copy() if self.contents else value

    def is_as(self, held: Any) -> bool:
        value = getattr(self.owner, self.name)
        if self.contents:
            return len(value) == len(held) and (not value or bool(value == held))
        return value is held

    def put(self, held: Any) -> None:
        if self.contents:
            value = getattr(self.owner, self.name)
            value.clear()
            value.update(held)
        else:
            setattr(self.owner, self.name, held)


def _without_losses(handlers: dict[Any, Any]) -> dict[Any, Any]:
    return {op: call for op, call in handlers.items() if not call.__module__.endswith(".parallel.loss")}


def _same(value: Any) -> Any:
    return value


# the module, the object in it, its attributes, and a function from their values to those outside of a context manager
_Known = tuple[str, str, tuple[str, ...], Callable[[Any], Any]]
_HOOKS: list[_Known] = [
    (
        "torch.nn.modules.module",
        "",
        (
            "_global_backward_hooks",
            "_global_backward_pre_hooks",
            "_global_buffer_registration_hooks",
            "_global_forward_hooks",
            "_global_forward_hooks_always_called",
            "_global_forward_hooks_with_kwargs",
            "_global_forward_pre_hooks",
            "_global_is_full_backward_hook",
            "_global_module_registration_hooks",
            "_global_parameter_registration_hooks",
        ),
        _same,
    ),
    ("torch.optim.optimizer", "", ("_global_optimizer_post_hooks", "_global_optimizer_pre_hooks"), _same),
]
_CONTEXTS: list[_Known] = [
    ("torch.utils.checkpoint", "", ("_enable_checkpoint_early_stop",), _same),
    ("torch._dynamo.eval_frame", "", ("_in_optimized_module",), lambda entered: False),
    ("torch.nn.utils.parametrize", "", ("_cache_enabled",), lambda entered: 0),
    ("torch.nn.utils.parametrize", "", ("_cache",), lambda cache: {}),
    ("torch.distributed.fsdp._debug_utils", "SimpleProfiler", ("profiling",), lambda profiled: set()),
    ("torch.distributed.fsdp.wrap", "_ConfigAutoWrap", ("in_autowrap_context",), lambda entered: False),
    ("torch.distributed.fsdp.wrap", "_ConfigAutoWrap", ("wrapper_cls",), lambda wrapper: None),
    ("torch.distributed.fsdp.wrap", "_ConfigAutoWrap", ("kwargs",), lambda kwargs: {}),
    ("torch.distributed.tensor._api", "DTensor._op_dispatcher", ("_custom_op_handlers",), _without_losses),
]
_ASSIGNED = frozenset({"_cache", "kwargs"})  # each context manager assigns a new object when it is entered

_ADDED = frozenset({"_custom_op_handlers"})  # entries are added to tens of others, which are never replaced

_missing = [*_HOOKS, *_CONTEXTS]  # not found yet, because their modules are not imported: that takes seconds
_places: list[_Place] = []
_modules = 0  # the number of imported modules at the last search
_present: tuple[Any, ...] = ()
_everybodys: tuple[Any, ...] = ()
# These lists allow a quick test, at every switch, of whether `_present` has changed: empty containers, containers with
# their contents, containers with only their length, and attributes.
_empty: list[Any] = []
_filled: list[tuple[Any, Any]] = []
_counted: list[tuple[Any, int]] = []
_single: list[tuple[Any, str, Any]] = []


def _now(held: tuple[Any, ...]) -> None:
    """Record ``held`` as the values in force."""
    global _present
    _present = held
    for found in (_empty, _filled, _counted, _single):
        found.clear()
    for place, value in zip(_places, held, strict=True):
        container = getattr(place.owner, place.name) if place.contents else None
        if container is None:
            _single.append((place.owner, place.name, value))
        elif not value:
            _empty.append(container)
        elif place.name in _ADDED:
            _counted.append((container, len(value)))
        else:
            _filled.append((container, value))


def _has_changed() -> bool:
    if any(_empty):
        return True
    for owner, name, value in _single:
        if getattr(owner, name) is not value:
            return True
    for container, count in _counted:
        if len(container) != count:
            return True
    return any(container != value for container, value in _filled) if _filled else False


def _look() -> None:
    """Find the places in modules that were imported meanwhile.

    A rank may already be inside one of their context managers.
    """
    global _everybodys, _modules
    found = _present
    _modules = len(sys.modules)
    for known in _missing[:]:
        module, path, names, at_rest = known
        owner: Any = sys.modules.get(module)
        if owner is None or getattr(getattr(owner, "__spec__", None), "_initializing", False):
            continue
        _missing.remove(known)
        for part in filter(None, path.split(".")):
            owner = getattr(owner, part, None)
        for name in names:
            if hasattr(owner, name):  # not every version of torch has it
                contents = isinstance(getattr(owner, name), dict | set) and name not in _ASSIGNED
                place = _Place(owner, name, contents)
                held = place.read()
                _everybodys += (at_rest(held),)
                found += (held,)
                _places.append(place)
    _now(found)


def present() -> tuple[Any, ...]:
    """Return the values in force. The object stays the same as long as nothing changes."""
    if len(sys.modules) != _modules and _missing:
        _look()
    if _has_changed():
        _now(tuple([place.read() for place in _places]))
    return _present


def put_back(wanted: tuple[Any, ...] | None = None) -> None:
    """Put ``wanted`` in force; None: the values that all ranks share.

    Call :func:`present` first, which reads the values in force. ``wanted`` may be older than some of the places: those
    get the shared values.
    """
    if wanted is None:
        wanted = _everybodys
    if wanted is _present:
        return
    wanted += _everybodys[len(wanted) :]
    for place, held in zip(_places, wanted, strict=True):
        if not place.is_as(held):
            place.put(held)
    _now(wanted)


def begin() -> tuple[Any, ...]:
    """Return the values that a rank starts from, for :func:`end`."""
    return _everybodys


def end(began: tuple[Any, ...]) -> None:
    """Share the values that a rank has not restored when it ended, as torch would without this module."""
    global _everybodys
    left = present()
    if left != began + _everybodys[len(began) :]:
        _everybodys = left
    else:
        put_back()  # another rank may have left other values meanwhile


@contextmanager
def controllers() -> Iterator[None]:
    """Let ranks start, in the block, from the values in force now."""
    global _everybodys
    _everybodys = present()
    yield
