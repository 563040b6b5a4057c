"""The controller's side of templates: processes that do the first work of fresh ranks once, and then fork them."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from signal import SIGKILL
from typing import Any

from pdlcheck.errors import WorldUnavailable
from pdlcheck.time_budgets import LEAVE_S
from pdlcheck.worlds.processes.controller.controller_environment import ControllerEnvironment
from pdlcheck.worlds.processes.controller.forkserver import Forker
from pdlcheck.worlds.processes.controller.local import LocalPlacement, LocalProcess, fork
from pdlcheck.worlds.processes.controller.message_pipe import MessagePipe, report_of
from pdlcheck.worlds.processes.controller.setup import Setup, start_of
from pdlcheck.worlds.processes.exchange.messages import Prepare, Prepared, packed
from pdlcheck.worlds.processes.exchange.payload import dump_call

__all__ = ["Beginning", "KeptTemplates", "Templates"]

_EVENTS = {False: selectors.EVENT_READ, True: selectors.EVENT_READ | selectors.EVENT_WRITE}  # key: there is unsent data


@dataclass(frozen=True)
class Beginning:
    """The first work of every fresh rank, ``fn(*args)``, which a template can do for it; equal ``key``, equal work."""

    key: object
    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()


class Templates:
    """One template for each rank of a world size.

    Pools that are forked from them have their store at the same port, one after the other. So the environment that a
    template reads when it is made is right in every rank.

    Args:
        setup: the setup of the pools.
        placement: forks the templates.
        calls: the functions to call in each template; the last one is user code.
        seed: the seed of the random streams.
        timeout_s: the time limit of the calls.
    """

    def __init__(
        self,
        setup: Setup,
        placement: LocalPlacement,
        calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]],
        seed: int,
        timeout_s: float,
    ) -> None:
        self._processes: list[LocalProcess] = []
        self._forkers: list[Forker] = []
        first = ControllerEnvironment(path=(), arguments=(), directory=None, environment=placement.environment)
        changes, self.surroundings = first.changes()
        payloads = tuple(dump_call(fn, args, {})[0] for fn, args in calls)
        self.listening = socket.create_server((placement.host, 0), backlog=setup.world_size)
        port = self.listening.getsockname()[1]
        pipes: dict[int, MessagePipe] = {}
        try:
            for rank in range(setup.world_size):
                process = placement.place_template(rank)
                self._processes.append(process)
                pipes[rank] = MessagePipe(process.connection)
                pipes[rank].send(packed(Prepare(start_of(setup, placement, rank, port), changes, payloads, seed)))
            for process in self._processes:
                process.started()
            self.are_fit = _all_are_fit(pipes, self._processes, time.monotonic() + timeout_s)
        except BaseException:
            self.kill()
            raise
        if not self.are_fit:
            self.close()
            return
        for process in self._processes:
            os.set_blocking(process.connection.fileno(), True)
            control = socket.fromfd(process.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)
            self._forkers.append(Forker(control, process.started()))

    @property
    def are_well(self) -> bool:
        """Return whether all templates run: False once one of them has ended or is stopped."""
        return all(process.is_well() for process in self._processes) and not any(
            forker.hung_up for forker in self._forkers
        )

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the templates, in rank order."""
        return [process.started() for process in self._processes]

    def place(self, rank: int, world_size: int, fds: Sequence[int]) -> LocalProcess:
        """Fork a rank from its template; see ``Placement``."""
        return fork(self._forkers[rank], fds)

    def close(self) -> None:
        """Let the templates end by themselves; kill those that do not."""
        self._give_back_ends()
        until = time.monotonic() + LEAVE_S
        for process in self._processes:
            process.ended(max(until - time.monotonic(), 0.0))
        self.kill()

    def kill(self) -> None:
        """End the templates and all their forks at once, and close all descriptors."""
        self._give_back_ends()
        for process in self._processes:
            process.signal(SIGKILL)
        for process in self._processes:
            with suppress(WorldUnavailable):  # it could not be started
                process.started()
                process.ended(LEAVE_S)
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptors in a fork of the controller; the templates belong to its parent."""
        self._give_back_ends()
        processes, self._processes = self._processes, []
        for process in processes:
            process.close()

    def _give_back_ends(self) -> None:
        self.listening.close()
        forkers, self._forkers = self._forkers, []
        for forker in forkers:
            forker.close()
        for process in self._processes:
            process.connection.close()


def _all_are_fit(pipes: Mapping[int, MessagePipe], processes: Sequence[LocalProcess], until: float) -> bool:
    """Return whether all templates have prepared themselves by then; wait for each of them, so that none is cut off."""
    fit = True
    with selectors.DefaultSelector() as selector:
        for rank, pipe in pipes.items():
            selector.register(processes[rank].connection, _EVENTS[pipe.is_behind], pipe)
        while selector.get_map():
            ready = selector.select(max(until - time.monotonic(), 0.0))
            if not ready:
                return False
            for key, _ in ready:
                pipe = key.data
                pipe.flush()
                try:
                    said = pipe.receive()
                    if said is None:
                        selector.modify(key.fileobj, _EVENTS[pipe.is_behind], pipe)
                        continue
                    prepared = report_of(said)
                    fit = fit and isinstance(prepared, Prepared) and not prepared.unfit
                except EOFError:
                    fit = False
                selector.unregister(key.fileobj)
    return fit


class KeptTemplates:
    """The templates of a world: those of one beginning at a time, for each world size that was requested."""

    def __init__(self) -> None:
        self._key: object = None
        self._kept: dict[int, Templates] = {}
        self._unfit: set[tuple[object, int]] = set()

    def get(self, key: object, world_size: int, make: Callable[[], Templates]) -> Templates | None:
        """Return the templates of this key, made if needed; None if ranks cannot be forked from them."""
        if key != self._key:
            self.close()
            self._key = key
        if (key, world_size) in self._unfit:
            return None
        found = self._kept.get(world_size)
        if found is not None and not found.are_well:
            self._kept.pop(world_size).kill()
            found = None
        if found is None:
            found = make()
            if not found.are_fit:
                self._unfit.add((key, world_size))
                return None
            self._kept[world_size] = found
        return found

    def drop(self, templates: Templates) -> None:
        """Drop and end templates that could not fork."""
        self._kept = {size: kept for size, kept in self._kept.items() if kept is not templates}
        templates.kill()

    def close(self) -> None:
        """End all templates."""
        kept, self._kept = self._kept, {}
        for templates in kept.values():
            templates.close()

    def abandon(self) -> None:
        """Give back the descriptors in a fork of the controller."""
        kept, self._kept = self._kept, {}
        for templates in kept.values():
            templates.abandon()
