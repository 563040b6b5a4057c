"""The states of a rank's operations: the interpreter of ``agreement.py`` on the rank, with the board as its memory."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pdlcheck.worlds.observe import Signature
from pdlcheck.worlds.processes.exchange.agreement import (
    ASKS,
    ON_RANK,
    Effect,
    Event,
    State,
    first_reading,
    later_reading,
    second_reading,
)
from pdlcheck.worlds.processes.exchange.board import Board

if TYPE_CHECKING:
    from pdlcheck.worlds.processes.rank.coordinated_work import AnnouncedWork

__all__ = ["OperationStates"]


class OperationStates:
    """The interpreter of the transition table for one rank.

    The caller holds one lock around each method that takes a step, the same for all operations of the rank.

    Args:
        rank: rank of this process.
        board: the shared board; None if the ranks share no memory.
    """

    def __init__(self, rank: int, board: Board | None) -> None:
        self._rank = rank
        self._board = board
        self._shown: dict[int, AnnouncedWork] = {}  # the open operations on the board, by digest
        self.in_doubt: deque[AnnouncedWork] = deque()  # operations to ask the controller about, without the lock

    def begin(self, call: int) -> None:
        """Forget all operations, because a call starts."""
        self._shown.clear()
        self.in_doubt.clear()
        if self._board is not None:
            self._board.clear(self._rank, call)

    def log(self, number: int, signature: Signature) -> int | None:
        """Log an operation for the controller; return None if that is not possible, see :meth:`Board.log`."""
        return self._board.log(self._rank, (number, signature)) if self._board is not None else None

    def open_to_all(self) -> None:
        """Record that this rank has a receive from any source."""
        if self._board is not None:
            self._board.open_to_all(self._rank)

    def can_meet(self, signature: Signature) -> bool:
        """Return whether the rank at the other end of a message looks at the board; True for a collective."""
        return signature.peer < 0 or self._board is None or not self._board.is_open_to_all(signature.peer)

    def show(self, work: AnnouncedWork) -> None:
        """Record an operation that has a word on the board from now on."""
        if work.meets:
            assert work.meeting is not None
            self._shown[work.meeting.digest] = work

    def hide(self, work: AnnouncedWork) -> None:
        """Forget an operation that is no longer open."""
        if work.meeting is not None:
            self._shown.pop(work.meeting.digest, None)

    def take(self, work: AnnouncedWork, event: Event) -> Effect:
        """Take one step: change the state of the operation and its word on the board; return what is left to do."""
        step = ON_RANK[work.state, event]
        work.state = step.state
        if step.word is not None and work.meets:
            assert work.meeting is not None
            self._write(work.meeting.digest, step.word)
        return step.effect

    def may_go(self, work: AnnouncedWork) -> bool:
        """Look once whether an open operation may be launched; if so, it is in the state of a launched one."""
        if work.state is State.GRANTED:
            return self.take(work, Event.TURN) is Effect.LAUNCH
        if not work.meets:
            return False
        effect = self.take(work, first_reading(work.state, self._words(work)))
        if effect is Effect.READ_AGAIN:
            effect = self.take(work, second_reading(self._words(work)))
        elif effect is Effect.READ_PLACE and self._others_ask(work):
            effect = self.take(work, Event.PEER_ASKS)
        if effect is Effect.DOUBT:
            self.in_doubt.append(work)
        return effect is Effect.LAUNCH

    def ask(self, work: AnnouncedWork, event: Event) -> Effect:
        """Take the step of a rank that wants the controller's decision; return whether a message has to be sent."""
        effect = self.take(work, event)
        if effect is not Effect.NOTHING and work.meeting is not None:
            self._write(work.meeting.place, ASKS)
        return effect

    def withdraw(self, work: AnnouncedWork) -> bool:
        """Take the step of an operation that this rank never launches; return whether another rank may launch it."""
        looks = self.take(work, Event.WITHDRAW) is Effect.LOOK_FOR_GOES
        if not (looks and work.meets) or self._board is None:
            return False
        assert work.meeting is not None
        return self._board.may_have_gone(work.meeting.others, work.meeting.digest)

    def others_are_busy(self, work: AnnouncedWork) -> bool:
        """Return whether another rank does something else, and may never look at the board."""
        return later_reading(self._words(work)) is Event.PEER_BUSY

    def tell(self, work: AnnouncedWork) -> bool:
        """Take the step of an operation that was launched and left; return whether a message has to be sent."""
        return self.take(work, later_reading(self._words(work))) is Effect.REQUEST

    def _words(self, work: AnnouncedWork) -> list[int]:
        assert work.meeting is not None
        assert self._board is not None
        return self._board.states(work.meeting.others, work.meeting.digest)

    def _others_ask(self, work: AnnouncedWork) -> bool:
        """Return whether another rank asks the controller at this place, also about a different operation."""
        assert work.meeting is not None
        assert self._board is not None
        return ASKS in self._board.states(work.meeting.others, work.meeting.place)

    def _write(self, digest: int, word: int) -> None:
        if self._board is not None:
            hidden = self._shown.get(self._board.say(self._rank, digest, word))
            if hidden is not None and self.take(hidden, Event.HIDE) is Effect.DOUBT:
                self.in_doubt.append(hidden)
