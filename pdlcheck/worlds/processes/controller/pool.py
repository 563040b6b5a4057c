"""The rank processes of one world size, and one call at a time on all of them."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TextIO

from pdlcheck.errors import WorldUnavailable
from pdlcheck.time_budgets import ANSWER_S, JOIN_GROUP_S, LEAVE_S, LIVE_OUTPUT_S, LOOK_S, OUTPUT_BOUND_S
from pdlcheck.worlds.backends import backend_of
from pdlcheck.worlds.outcome import Outcome, Raised
from pdlcheck.worlds.processes.controller.arbiter import Arbiter
from pdlcheck.worlds.processes.controller.collect import Collector
from pdlcheck.worlds.processes.controller.controller_environment import ControllerEnvironment
from pdlcheck.worlds.processes.controller.machine_limits import full_shared_memory, lacks, loopback_is_down
from pdlcheck.worlds.processes.controller.placement import Placement
from pdlcheck.worlds.processes.controller.rank_handle import Died, Member, Written
from pdlcheck.worlds.processes.controller.setup import Setup, start_of, store_at
from pdlcheck.worlds.processes.controller.templates import Templates
from pdlcheck.worlds.processes.exchange.board import Board, shared_file
from pdlcheck.worlds.processes.exchange.messages import Call, DefaultGroup, Ping, Pong, Ready, Report, packed
from pdlcheck.worlds.processes.exchange.payload import Modules
from pdlcheck.worlds.processes.exchange.settings import present
from pdlcheck.worlds.processes.exchange.warning_relay import WarningFilters

__all__ = ["Pool"]

_MAX_GROUPS = 32  # each group holds threads and a socket to every peer


class Pool:
    """``world_size`` processes with a default group.

    A failure may leave an operation half done. Then ``is_usable`` is False and the processes are gone. If the user has
    set ``to_be_ended``, the processes may stay and are ``is_spent``: only teardown code runs on them.

    Args:
        setup: the common settings of the ranks.
        placement: starts the processes.
        templates: the templates that fork the processes; None if the placement starts them.
    """

    def __init__(self, setup: Setup, placement: Placement, templates: Templates | None = None) -> None:
        self._setup = setup
        self._placement = placement
        self._calls = 0
        self._surroundings = ControllerEnvironment(
            path=(), arguments=(), directory=None, environment=placement.environment
        )
        if templates is not None:
            self._surroundings = templates.surroundings
        self._selector = selectors.DefaultSelector()
        self._members: list[Member] = []
        self._behind: set[int] = set()  # ranks that have not read all data that was sent to them
        self._live = False
        self._bound_at = 0.0  # time at which the ranks' output is bounded again
        self._board: Board | None = None
        self._store: object = None  # the store of the ranks, if this process hosts it
        self.is_usable = True
        self.to_be_ended = self.is_spent = False
        self.is_worn = False  # too many groups were not destroyed: replace the pool when no call runs on it
        self.heard: list[bytes] = []  # the ranks' warnings in the last call, see `tell`
        self.lacks_group = False  # the ranks have left their default group
        self.begun: object = None  # the key of a call that runs, see `begin`
        try:
            with ExitStack() as stack:
                if no_way := loopback_is_down(placement.host):
                    raise self._unavailable(no_way)
                fd = self._share(stack) if placement.shares_memory and setup.watch else None
                if templates is not None:
                    listening = templates.listening
                else:
                    listening = stack.enter_context(socket.create_server((placement.host, 0), backlog=setup.world_size))
                for rank in range(setup.world_size):
                    more = [] if fd is None else [fd]
                    if rank == 0 and not placement.hosts_store:
                        more.append(listening.fileno())
                    self._members.append(Member(rank, (templates or placement).place(rank, setup.world_size, more)))
                port: int = listening.getsockname()[1]
                if placement.hosts_store:
                    self._store = store_at(placement.host, port, listening.detach())
                self._start(port)
        except BaseException as error:
            self.kill()
            if isinstance(error, OSError):
                raise self._unavailable(lacks(error, setup.world_size)) from error
            raise

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._setup.world_size

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the ranks, in rank order."""
        return [member.pid for member in self._members]

    def read_with(self, reader: Callable[[Written], None] | None, *, live: bool = False) -> None:
        """Pass the ranks' output to ``reader`` instead of showing it: after each call or, if ``live``, at once."""
        self._live = live and reader is not None
        for member in self._members:
            member.reader = reader

    def call(
        self,
        payload: bytes,
        modules: Modules,
        *,
        seed: int | None,
        group: DefaultGroup,
        timeout_s: float,
        debugged: int | None = None,
        filters: WarningFilters | None = None,
    ) -> list[Outcome]:
        """Send a call to every rank; return the outcome of each rank. See :class:`Call` for the arguments.

        The rank ``debugged`` is never hurried: after a failure of another rank, the pool waits for it up to
        ``timeout_s``.
        """
        self._send(payload, modules, seed=seed, group=group, filters=filters)
        return self._collect(timeout_s, debugged)

    def begin(self, key: object, payload: bytes, modules: Modules, *, seed: int) -> None:
        """Send a call before its outcomes are wanted; until :meth:`end`, no other call may be sent.

        The caller that asks for the outcomes identifies the call by ``key``.
        """
        self._send(payload, modules, seed=seed, group="kept")
        self.begun = key

    def end(self, timeout_s: float) -> list[Outcome]:
        """Return the outcomes of the call that :meth:`begin` has sent."""
        self.begun = None
        return self._collect(timeout_s)

    def _send(
        self,
        payload: bytes,
        modules: Modules,
        *,
        seed: int | None,
        group: DefaultGroup,
        filters: WarningFilters | None = None,
    ) -> None:
        self._calls += 1
        self.lacks_group = group == "none" or (self.lacks_group and group == "kept")
        changes, self._surroundings = self._surroundings.changes()
        try:
            data = packed(Call(self._calls, payload, modules, seed, group, changes, filters, present()))
            for member in self._members:
                member.send_packed(data)
        except BaseException:  # such as Ctrl-C between two ranks
            self.kill()
            raise

    def _collect(self, timeout_s: float, debugged: int | None = None) -> list[Outcome]:
        arbiter = Arbiter(self._setup.world_size) if self._setup.watch else None
        collector = Collector(self._members, self._calls, self._wait, arbiter, self._board, timeout_s, debugged)
        try:
            outcomes = self._with_output(collector.outcomes())
        except BaseException as error:
            try:
                if isinstance(error, KeyboardInterrupt):
                    error.add_note(collector.interrupted())
            finally:  # this runs also after a second Ctrl-C
                self.kill()
            raise
        self.heard = collector.heard()
        self.is_worn = collector.groups() > _MAX_GROUPS
        if not collector.can_go_on():
            if self.to_be_ended and collector.can_be_ended():
                self.is_spent = True
            else:
                self.kill()
        return outcomes

    def drop_if_lost(self) -> None:
        """Give up an idle pool in which a rank has ended or was stopped; report this on stderr.

        The report of an end takes a moment to arrive, and the next call must not be blamed for it. So every rank must
        answer, unless the system reports that all of them are well.
        """
        if not self.is_usable or self.begun is not None or all(member.is_well() for member in self._members):
            return
        for member in self._members:
            if member.died is not None:
                self._replace(f"rank {member.rank} {member.died.how}")
                return
        for member in self._members:
            member.send(Ping())
        silent = {member.rank: member for member in self._members}
        own = {rank: member.own_time() for rank, member in silent.items()}
        while silent:
            events = self._wait(LOOK_S)
            for member, report in events:
                if isinstance(report, Died):
                    self._replace(f"rank {member.rank} {report.how}")
                    return
                if isinstance(report, Pong):
                    silent.pop(member.rank, None)
            late = [member for rank, member in silent.items() if own[rank].spent() >= ANSWER_S]
            if not events and late:
                member = min(late, key=lambda member: member.rank)
                stopped = member.is_stopped()
                why = "was stopped by SIGSTOP or SIGTSTP" if stopped else f"did not answer within {ANSWER_S:g} s"
                self._replace(f"rank {member.rank} {why}")
                return

    def close(self) -> None:
        """Let idle ranks end by themselves; kill those that do not."""
        for member in self._members:
            member.hang_up()
        for member in self._members:
            if not member.ends_within(LEAVE_S):
                break
        self.kill()

    def kill(self) -> None:
        """End every process at once, and close all descriptors."""
        self.is_usable, self.begun = False, None
        members, self._members = self._members, []
        self._selector.close()
        for member in members:
            member.signal(signal.SIGKILL)
        for member in members:
            member.wait_ended(LEAVE_S)
        self._give_back(members)

    def abandon(self) -> None:
        """Close the descriptors in a fork of the controller; the ranks belong to its parent."""
        self.is_usable = False
        members, self._members = self._members, []
        self._selector.close()
        self._give_back(members)

    # -- inside ------------------------------------------------------------------------------------

    def _give_back(self, members: Sequence[Member]) -> None:
        for member in members:
            member.close()
        self._store = None
        if self._board is not None:
            self._board.close()
            self._board = None

    def _share(self, stack: ExitStack) -> int:
        fd = shared_file(self.world_size)
        stack.callback(os.close, fd)  # by then, the ranks have their own descriptors
        self._board = Board(fd, self.world_size)
        return fd

    def _start(self, port: int) -> None:
        for member in self._members:
            self._selector.register(member.connection, selectors.EVENT_READ, member)
            member.send(start_of(self._setup, self._placement, member.rank, port))
        for member in self._members:
            member.await_start()  # before that, the status pipe does not report the end of the process
            self._selector.register(member.status, selectors.EVENT_READ, member)
        waiting = {member.rank for member in self._members}
        until = time.monotonic() + JOIN_GROUP_S
        while waiting:
            events = self._wait(max(until - time.monotonic(), 0.0))
            if not events:
                raise self._unavailable(f"ranks {sorted(waiting)} did not join the group within {JOIN_GROUP_S:g} s")
            for member, report in events:
                if isinstance(report, Died):
                    raise self._unavailable(f"rank {member.rank} {report.how} while it joined the group", member)
                if isinstance(report, Ready):
                    if report.missing:
                        text = "; ".join(f"{name} ({why})" for name, why in report.missing.items())
                        raise self._unavailable(f"the fork server could not import {text}")
                    waiting.discard(member.rank)

    def _replace(self, why: str) -> None:
        size = self.world_size
        self.kill()
        sys.stderr.write(f"pdlcheck: {why} while nothing ran on it; {size} new processes take over\n")

    def _unavailable(self, what: str, member: Member | None = None) -> WorldUnavailable:
        words = member.output()[1].strip() if member is not None else ""
        said = f"\n{words}" if words else ""
        advice, cure = backend_of(self._setup.backend).start_advice
        hint = full_shared_memory() or advice
        return WorldUnavailable(
            f"{self._setup.backend} processes cannot start: {what}; {hint}{said}",
            world=self._setup.backend,
            cure=cure,
        )

    def _wait(self, timeout_s: float) -> list[tuple[Member, Report | Died]]:
        """Wait until something happens; return messages and deaths, those of one rank in order."""
        events: list[tuple[Member, Report | Died]] = []
        gone: set[int] = set()
        for member in self._members:
            if member.is_behind and member.rank not in self._behind and member.connection in self._selector.get_map():
                self._behind.add(member.rank)
                self._selector.modify(member.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, member)
        ready = self._select(timeout_s)
        if self._live:
            for member in self._members:
                member.output()
        for key, mask in ready:
            member = key.data
            if member.rank in gone:
                continue
            if mask & selectors.EVENT_WRITE:
                self._send_on(member)
            if mask == selectors.EVENT_WRITE:
                continue
            if key.fileobj is member.connection:
                with suppress(EOFError):
                    report = member.receive()
                    if report is not None:
                        events.append((member, report))
                    continue
            gone.add(member.rank)
            self._selector.unregister(member.connection)
            self._selector.unregister(member.status)
            events += [(member, word) for word in member.last_words()]
        return events

    def _select(self, timeout_s: float) -> list[tuple[selectors.SelectorKey, int]]:
        until = time.monotonic() + timeout_s
        while True:
            left = until - time.monotonic()
            ready = self._selector.select(max(min(left, LIVE_OUTPUT_S if self._live else OUTPUT_BOUND_S), 0.0))
            now = time.monotonic()
            if now >= self._bound_at:
                self._bound_at = now + OUTPUT_BOUND_S
                for member in self._members:
                    member.bound_output()
            if ready or self._live or now >= until:
                return ready

    def _send_on(self, member: Member) -> None:
        member.flush()
        if not member.is_behind:
            self._behind.discard(member.rank)
            self._selector.modify(member.connection, selectors.EVENT_READ, member)

    def _with_output(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Attach the output of failed ranks to their outcomes; show the other ranks' output. A reader replaces both."""
        complete: list[Outcome] = []
        for outcome, member in zip(outcomes, self._members, strict=True):
            out, err = member.output()
            member.rewind()
            if member.reader is not None:
                complete.append(outcome)
            elif isinstance(outcome, Raised):
                complete.append(replace(outcome, output=outcome.output + out + err))
            else:
                _show(out, member.rank, lambda: sys.stdout)
                _show(err, member.rank, lambda: sys.stderr)
                complete.append(outcome)
        return complete


def _show(text: str, rank: int, stream: Callable[[], TextIO]) -> None:
    if text:
        lines = "".join(f"[rank {rank}] {line}\n" for line in text.splitlines())
        stream().write(lines)
