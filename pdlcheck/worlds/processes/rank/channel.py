"""A rank's end of its pipe to the controller, and the thread that reads the pipe."""

from __future__ import annotations

import os
import queue
import threading
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, cast

from pdlcheck.time_budgets import ANSWER_PAUSE_S, ATEXIT_S, LOOK_S, STILL_S
from pdlcheck.worlds.processes.exchange.messages import (
    Call,
    Command,
    Ending,
    Halted,
    Ping,
    Pong,
    Report,
    Stack,
    Stop,
    WhereAreYou,
    put,
)
from pdlcheck.worlds.processes.exchange.own_time import OwnTime, waited_for_cores
from pdlcheck.worlds.processes.rank import ending
from pdlcheck.worlds.stack_position import place_of

__all__ = ["Channel"]

_DEAF = 70  # the exit code of a rank whose listening thread failed: sysexits' "internal software error"


class Channel:
    """A rank's end of its pipe.

    A thread reads the messages. Calls go to the main thread through a queue; the thread handles other messages at once.
    When the pipe ends, the controller has gone. Then the process ends, even in the middle of a call.

    Args:
        connection: the rank's end of the pipe.
    """

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._main = threading.main_thread().ident or 0
        self._reported = 0  # the last call whose end was reported
        self._busy = False
        self.still_s = STILL_S  # a thread this long at one instruction of a communication call is blocked in it
        self.on_message: Callable[[Command], None] = lambda message: None

    def start(self) -> None:
        """Start the thread that reads the pipe."""
        threading.Thread(target=self._listen, name="pdlcheck control", daemon=True).start()

    def next_call(self) -> Call | None:
        """Wait for the next call and return it; None when the controller wants this process to end."""
        self._busy = False
        call = self._calls.get()
        self._busy = True
        return call

    def receive(self) -> Any:
        """Wait for the next message and return it; only before :meth:`start`."""
        return self._connection.recv()

    def send(self, report: Report) -> None:
        """Send a message, from any thread."""
        with self._sending:
            put(self._connection, report)

    def end(self, call: int, report: Report) -> None:
        """Report how a call ended, unless its end was reported already."""
        if threading.get_ident() == self._main:
            self._busy = False  # before the report, after which the controller may close the pipe
        with self._sending:
            if self._reported < call:
                self._reported = call
                put(self._connection, report)

    def _listen(self) -> None:
        try:
            while (message := self._next_message()) is not None:
                self._handle(message)
        except (BrokenPipeError, ConnectionResetError):  # the controller ended while this thread answered it
            pass
        except BaseException:  # the other ranks would wait for a rank that reads no messages
            traceback.print_exc()
            os._exit(_DEAF)
        self._leave()

    def _next_message(self) -> Command | None:
        try:
            return cast(Command, self._connection.recv())
        except (EOFError, OSError):
            return None

    def _handle(self, message: Command) -> None:
        if isinstance(message, Call):
            self._calls.put(message)
        elif isinstance(message, Ping):
            self.send(Pong())
        elif isinstance(message, WhereAreYou):
            place = place_of(self._main)
            self.send(Stack(message.call, place.words, place.stack))
        else:
            self.on_message(message)
            if isinstance(message, Stop):
                threading.Thread(target=self._halt, args=(message.call,), daemon=True).start()

    def _halt(self, call: int) -> None:
        """Report where the main thread is, once it is clear that it will not end the call by itself.

        Until then, report that it may still end the call. No fixed number of seconds limits that; see ``ending.py``. A
        time counts only if this thread could also answer as often as it does in that time on an idle machine: the main
        thread may have waited for this one, which waited for a core.
        """
        pause = threading.Event()
        told_to_stop, at_this_place, mark = _own_time(), _own_time(), None
        answers = answers_here = 0
        while self._reported < call:
            place = place_of(self._main)
            if place.mark != mark:
                mark, at_this_place, answers_here = place.mark, _own_time(), 0
            elif place.communicates and _is_over(self.still_s, at_this_place, answers_here):
                break
            if _is_over(ending.grace_s(), told_to_stop, answers):
                break
            self.send(Ending(call))
            answers, answers_here = answers + 1, answers_here + 1
            pause.wait(ANSWER_PAUSE_S)
        self.end(call, Halted(call, place_of(self._main).words))

    def _leave(self) -> None:
        if self._busy:
            os._exit(0)
        self._calls.put(None)
        pause, leaves = threading.Event(), _own_time()
        while leaves.spent() < ATEXIT_S:  # the main thread runs the functions registered with atexit
            pause.wait(LOOK_S)
        os._exit(0)


def _is_over(seconds: float, own: OwnTime, answers: int) -> bool:
    """Return whether a time is over, in the process's own seconds and also in answers."""
    return answers * ANSWER_PAUSE_S >= seconds and own.spent() >= seconds


def _own_time() -> OwnTime:
    return OwnTime(partial(waited_for_cores, os.getpid()))
