"""The table of worlds by name: those of pdlcheck, and those that installed packages offer.

A world of pdlcheck is one module and one line here. A world of another package is one module and one entry point:

.. code-block:: toml

    [project.entry-points."pdlcheck.worlds"]
    mine = "my_package.world:make"

``make`` takes the options of :func:`get_world` as keyword arguments and returns the world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import cache, cached_property, partial
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from pdlcheck.compat import private
from pdlcheck.errors import WorldUnavailable
from pdlcheck.worlds.backends import BACKENDS

if TYPE_CHECKING:
    from pdlcheck.worlds.protocol import World

__all__ = ["WORLDS", "get_world", "is_simulated", "item_runner_of", "when_made", "worlds_on"]

_GROUP = "pdlcheck.worlds"
_SIMULATED = "pdlcheck.item_runners.simulated.runner"
_listeners: list[Callable[[World], object]] = []


def _sim(device: str, **options: Any) -> World:
    from pdlcheck.worlds.simulated import SimulatedWorld

    return SimulatedWorld(device=device, **options)


def _processes(backend: str, **options: Any) -> World:
    from pdlcheck.worlds.processes import ProcessWorld

    return ProcessWorld(backend, **options)


class _Worlds(MutableMapping[str, Callable[..., "World"]]):
    """The functions that make worlds, by name. Entry points are read if a name is not one of pdlcheck's own."""

    def __init__(self) -> None:
        self.own: dict[str, Callable[..., World]] = {"sim": _sim}
        self.own |= {name: partial(_processes, name) for name in BACKENDS}

    @cached_property
    def others(self) -> Mapping[str, EntryPoint]:
        """The entry points of installed packages."""
        return {one.name: one for one in entry_points(group=_GROUP) if one.name not in self.own}

    def __getitem__(self, name: str) -> Callable[..., World]:
        if name in self.own:
            return self.own[name]
        entry = self.others[name]
        try:
            return entry.load()  # type: ignore[no-any-return]  # of another package
        except Exception as error:
            package = entry.dist.name if entry.dist is not None else entry.value
            raise WorldUnavailable(
                f"world {name} of {package} cannot be imported: {type(error).__name__}: {error}", world=name
            ) from error

    def __setitem__(self, name: str, make: Callable[..., World]) -> None:
        self.own[name] = make

    def __delitem__(self, name: str) -> None:
        del self.own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted([*self.own, *self.others]))

    def __len__(self) -> int:
        return len(self.own) + len(self.others)

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in self.others


WORLDS = _Worlds()


def get_world(name: str, *, device: str | None = None, **options: Any) -> World:
    """Return a new world.

    Args:
        name: ``sim`` (simulated ranks in this process), ``gloo`` (local processes), ``mpi`` (local processes in a run
            of mpiexec), ``nccl`` (local processes, each with a CUDA device of its own), or a world of another package.
        device: the device of the ranks, ``cpu`` or ``cuda``; default: ``cuda`` on ``nccl``, ``cpu`` elsewhere. ``sim``
            and ``gloo`` take both. Ranks of ``gloo`` share the available CUDA devices; ranks of ``sim`` use the first.
        options: the options of the world. All worlds take ``seed``, ``timeout_s`` and ``comm_wrappers``, the modules
            whose callers appear in reports. ``sim``, ``gloo`` and ``mpi`` take ``cuda_as_cpu``, which runs the CUDA
            code of ranks on the CPU. ``sim`` also takes ``semantics``, ``schedule``, ``faults``, ``topology``,
            ``timeline`` and ``own_globals``; the others take ``watch`` and ``threads_per_rank``.

    Raises:
        ValueError: there is no world of that name, or no such device.
        WorldUnavailable: the world's ranks cannot have that device.

    Example:
        >>> get_world("sim").run(lambda: 7, world_size=2)
        [7, 7]
    """
    if name not in WORLDS:
        raise ValueError(f"world must be one of {', '.join(sorted(WORLDS))}; got {name!r}")
    make = WORLDS[name]
    if name in WORLDS.own:
        from pdlcheck.worlds.devices import choose_device

        device = choose_device(name, device)
    if device is not None:
        options["device"] = device
    world = make(**options)
    _warn_of_missing_names()
    for listener in _listeners:
        listener(world)
    return world


@cache
def _warn_of_missing_names() -> None:
    """Warn, once in a process, of private names of torch that the installed version lacks."""
    private.warn_of_missing("torch", only_registered=True)


def when_made(listener: Callable[[World], object]) -> None:
    """Call ``listener`` with each new world from now on, before anything has run on it."""
    if listener not in _listeners:
        _listeners.append(listener)


def item_runner_of(name: str) -> str:
    """Return the module by which pytest items run on the world of this name; see ``harness/item_runner.py``.

    A function that makes a world may name it in its attribute ``item_runner``. The default is the one for worlds whose
    ranks are processes.
    """
    if name == "sim":
        return _SIMULATED
    own: str | None = getattr(WORLDS[name], "item_runner", None) if name in WORLDS else None
    return own or "pdlcheck.item_runners.processes.runner"


def is_simulated(name: str | None) -> bool:
    """Return whether the ranks of the world of this name are simulated: it takes schedules, faults and the like.

    Example:
        >>> is_simulated("sim"), is_simulated("gloo"), is_simulated(None)
        (True, False, False)
    """
    try:
        return name is not None and item_runner_of(name) == _SIMULATED
    except WorldUnavailable:  # of another package, and it cannot be imported
        return False


def worlds_on(device: str) -> list[str]:
    """Return the names of pdlcheck's own worlds whose ranks have this kind of device by default.

    Example:
        >>> worlds_on("cpu"), worlds_on("cuda")
        (['gloo', 'mpi', 'sim'], ['nccl'])
    """
    from pdlcheck.worlds.devices import choose_device

    return sorted(name for name in WORLDS.own if choose_device(name, None) == device)
