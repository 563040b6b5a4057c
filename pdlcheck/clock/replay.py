"""The times of a trace: a replay of every rank's program on a virtual clock.

The rules:

- Each rank has a clock of its own. ``compute`` advances it, posting an operation takes no time, and a wait moves it to
  the end of the operation if that is later.
- A message begins when send and receive are posted; the message of a buffered send begins when the send is posted. A
  collective begins when its last member has posted it, and ends on all members at once.
- A rank sends one message and receives one at a time; a collective takes both of these ports on each member. The
  operation that is ready first goes first, and an operation whose ports are taken lets others pass. At equal times the
  lower rank's operation goes first, then the one that it posted first. So asynchronous operations of a rank run one
  after the other while it computes, as on one NCCL stream, and a send and a receive run at the same time. This is the
  one-port, full-duplex model of Thakur et al. (2005).

The result does not depend on the schedule of the run, only on the actions of each rank and the matched sends and
receives.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from pdlcheck.clock import rounds
from pdlcheck.clock.links import Topology
from pdlcheck.clock.timeline import Message, Span, Timeline
from pdlcheck.clock.trace import Act, Compute, Exchange, Post, Trace, Wait

__all__ = ["replay"]

_STEP = 1.0
_Key = tuple[float, int, int]  # ready at, rank, number of the post in its program


def replay(trace: Trace, topology: Topology | None) -> Timeline:
    """Compute the times; without a topology every computation and every operation takes one step."""
    return _Replay(trace, topology).run()


class _Exchange:
    """One exchange in progress."""

    def __init__(self, of: Exchange) -> None:
        self.of = of
        send = of.acts[0]
        self.is_message = send.op == "send"
        self.missing = 1 if self.is_message and send.buffered else len(of.acts)
        self.key: _Key = (0.0, 0, 0)
        self.end_s = math.inf  # until the end is computed
        self.waiting: list[int] = []  # the ranks that wait
        if self.is_message:
            self.ports: Sequence[int] = (2 * send.rank, 2 * of.acts[1].rank + 1)
        else:
            self.ports = [port for act in of.acts for port in (2 * act.rank, 2 * act.rank + 1)]


class _Replay:
    def __init__(self, trace: Trace, topology: Topology | None) -> None:
        self._trace = trace
        self._topology = topology
        self._clocks = [0.0] * trace.world_size
        self._next = [0] * trace.world_size  # the next step of each rank's program
        self._exchanges: dict[int, _Exchange] = {}
        self._events: list[tuple[float, int, bool, _Exchange]] = []  # (time, number, has ended, exchange)
        self._number = 0
        self._taken: set[int] = set()  # the taken ports
        self._queues: dict[int, dict[_Key, _Exchange]] = defaultdict(dict)  # port -> the exchanges that wait for it
        self._spans: list[Span] = []
        self._messages: list[Message] = []
        self._known: dict[Any, float] = {}

    def run(self) -> Timeline:
        for rank in range(self._trace.world_size):
            self._go_on(rank)
        while self._events:
            now = self._events[0][0]
            freed: set[int] = set()
            candidates: dict[_Key, _Exchange] = {}
            while self._events and self._events[0][0] == now:
                _, _, has_ended, exchange = heapq.heappop(self._events)
                if has_ended:
                    freed.update(exchange.ports)
                    self._end(exchange, now)
                else:
                    candidates[exchange.key] = exchange
            self._taken -= freed
            for port in freed:
                candidates.update(self._queues.pop(port, {}))
            self._start(candidates, now)
        self._spans += [self._stuck(rank) for rank in range(self._trace.world_size) if self._is_stuck(rank)]
        self._spans.sort(key=lambda span: (span.rank, span.start_s, span.kind, span.end_s, span.what))
        self._messages.sort(key=lambda message: (message.start_s, message.src, message.dst))
        return Timeline(
            world_size=self._trace.world_size,
            spans=tuple(self._spans),
            messages=tuple(self._messages),
            in_steps=self._topology is None,
            by_schedule=tuple(self._trace.by_schedule),
        )

    # -- ranks -------------------------------------------------------------------------------------

    def _go_on(self, rank: int) -> None:
        """Run the rank's program to its end, or to a wait for an operation whose end is not computed yet."""
        program, clock = self._trace.programs[rank], self._clocks[rank]
        while self._next[rank] < len(program):
            number = self._next[rank]
            step = program[number]
            if isinstance(step, Compute):
                end = clock + (_STEP if self._topology is None else step.seconds)
                if end > clock:
                    self._spans.append(Span(rank, "compute", "compute", clock, end, "compute", step.where))
                clock = end
            elif isinstance(step, Post):
                step.act.posted_s = clock
                self._arrive(step.act, number)
            else:
                until = self._end_of(step.act, clock, is_last=number == len(program) - 1)
                if until is None:
                    break
                if until > clock:
                    self._spans.append(_span(step.act, "wait", clock, until))
                clock = until
            self._next[rank] += 1
        self._clocks[rank] = clock

    def _end_of(self, act: Act, clock: float, is_last: bool) -> float | None:
        """Return when a rank that waits for ``act`` from ``clock`` on continues; None if that is not computed yet."""
        if act.op == "send" and act.buffered:
            return clock
        if act.exchange is None:  # its partners never came: the rank waits for ever, or an error ended the wait
            if is_last and not act.completed:
                self._spans.append(_span(act, "wait", clock, math.inf))
            return clock
        exchange = self._of(act.exchange)
        if exchange.end_s == math.inf:
            exchange.waiting.append(act.rank)
            return None
        return max(clock, exchange.end_s)

    def _is_stuck(self, rank: int) -> bool:
        """Return whether the rank is not at its end although no event is left: it and its partner wait for ever."""
        return self._next[rank] < len(self._trace.programs[rank])

    def _stuck(self, rank: int) -> Span:
        step = self._trace.programs[rank][self._next[rank]]
        assert isinstance(step, Wait)
        return _span(step.act, "wait", self._clocks[rank], math.inf)

    # -- operations --------------------------------------------------------------------------------

    def _of(self, exchange: Exchange) -> _Exchange:
        known = self._exchanges.get(id(exchange))
        if known is None:
            known = self._exchanges[id(exchange)] = _Exchange(exchange)
        return known

    def _arrive(self, act: Act, number: int) -> None:
        if act.exchange is None:
            return
        exchange = self._of(act.exchange)
        acts = exchange.of.acts
        if act is acts[0]:
            exchange.key = (0.0, act.rank, number)
        elif acts[0].buffered:
            return  # a buffered message starts without its receive
        exchange.missing -= 1
        if exchange.missing == 0:
            ready = act.posted_s if acts[0].buffered else max(act.posted_s for act in acts)
            exchange.key = (ready, *exchange.key[1:])
            self._push(ready, False, exchange)

    def _push(self, time: float, has_ended: bool, exchange: _Exchange) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, has_ended, exchange))

    def _start(self, candidates: dict[_Key, _Exchange], now: float) -> None:
        for key in sorted(candidates):
            exchange = candidates[key]
            busy = next((port for port in exchange.ports if port in self._taken), None)
            if busy is not None:
                self._queues[busy][key] = exchange
                continue
            self._taken.update(exchange.ports)
            end = now + self._seconds(exchange)
            self._push(end, True, exchange)
            self._tell(exchange, now, end)

    def _end(self, exchange: _Exchange, now: float) -> None:
        exchange.end_s = now
        for rank in exchange.waiting:
            self._go_on(rank)

    def _seconds(self, exchange: _Exchange) -> float:
        topology, acts = self._topology, exchange.of.acts
        if topology is None:
            return _STEP
        if exchange.is_message:
            return topology.link(acts[0].rank, acts[1].rank).seconds(acts[0].nbytes)
        call = (acts[0].op, tuple([act.rank for act in acts]), exchange.of.root, exchange.of.payload)
        if call not in self._known:
            self._known[call] = rounds.seconds(*call, topology)
        return self._known[call]

    def _tell(self, exchange: _Exchange, start: float, end: float) -> None:
        acts = exchange.of.acts
        self._spans += [_span(act, "communication", start, end) for act in acts]
        if exchange.is_message:
            self._messages.append(Message(acts[0].rank, acts[1].rank, start, end, acts[0].nbytes, acts[0].what))


def _span(act: Act, kind: str, start: float, end: float) -> Span:
    return Span(act.rank, kind, act.op, start, end, act.what, act.where, act.nbytes)
