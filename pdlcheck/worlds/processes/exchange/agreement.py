"""The state machine of watched operations: an operation goes on each of its ranks, or on none of them.

This file decides, and does nothing else: it has no threads, no locks, no time and no input or output. A rank's
coordinator interprets ``ON_RANK``, one state for each operation that the rank has posted. The controller's arbiter
interprets ``ON_CONTROLLER``, one stage for each operation of each rank. Both keep what the table does not need: locks,
shared memory and pipes.

A step of a rank may write the rank's word on the board, which the other ranks read. The rank writes the word before the
effect. Two rules keep an operation from going on some of its ranks only:

* A rank that wants to go writes ``GOES``, and then reads the words of the others again. A rank that withdraws writes
  ``ABSENT``, and then looks for ``GOES``. So at least one of the two sees the other.
* A rank that has asked the controller does not go by itself any more. It goes if the controller grants the operation,
  or if another rank goes that has read its word before it asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

__all__ = [
    "ABSENT",
    "ASKS",
    "GOES",
    "ON_CONTROLLER",
    "ON_RANK",
    "POSTED",
    "WAITS",
    "Effect",
    "Event",
    "Notice",
    "Ruling",
    "Stage",
    "State",
    "Step",
    "Verb",
    "first_reading",
    "later_reading",
    "may_grant",
    "second_reading",
]

# The words on the board.
ABSENT = 0  # not posted yet, or withdrawn
POSTED = 1  # posted, while the rank does something else
WAITS = 2  # posted, and the rank looks for the others
ASKS = 3  # posted, and the rank has asked the controller
GOES = 4  # the rank has seen that all others have posted it


# -- an operation on its rank ----------------------------------------------------------------------


class State(IntEnum):
    """The state of an operation on a rank."""

    NEW = 0  # in the log of the rank, not yet on the board
    POSTED = 1  # on the board; the rank does something else
    WAITING = 2  # on the board; the rank looks for the others
    DOUBTFUL = 3  # to ask the controller about, as soon as no lock is held
    ASKED = 4  # the controller has been asked
    GOING = 5  # all others have posted it; they are read again
    FOLLOWING = 6  # the controller has been asked, but another rank goes; all others are read again
    GRANTED = 7  # the controller has granted it; an older operation of its channel may be in the way
    LAUNCHED = 8  # the call on the real group was made
    LEFT = 9  # launched, while another rank did something else: perhaps that rank never looks
    WITHDRAWN = 10  # this rank never launches it


class Event(IntEnum):
    """An event of an operation on a rank."""

    POST = 0  # the rank puts it on the board, and does something else
    POST_AND_WAIT = 1  # the rank puts it on the board, and waits for it
    ANNOUNCE = 2  # the log has no room: the rank reports it in a message
    WAIT = 3  # the rank starts to wait for it
    ASK = 4  # the rank wants the controller's decision
    ASK_AND_WAIT = 5  # the same, and the rank does nothing else until then
    READY = 6  # first reading: all others have posted it, and none of them has asked
    BLOCKED = 7  # first reading: another rank has not posted it, or has asked the controller
    PEER_ASKS = 8  # another rank has asked the controller at this place, perhaps about another operation
    PEER_GOES = 9  # first reading after this rank has asked: another rank goes
    NONE_GOES = 10  # first reading after this rank has asked: no other rank goes
    CONFIRMED = 11  # second reading: all others still have it
    CONFIRMED_BUSY = 12  # second reading: all others still have it, and one of them does something else
    VANISHED = 13  # second reading: another rank has withdrawn it, or its word was replaced
    HIDE = 14  # a word of this rank about another operation replaces the word of this one
    GRANT = 15  # the controller grants it
    TURN = 16  # it was granted, and no older operation of its channel is in the way
    ABANDON = 17  # the rank launches it without the other rank
    PEER_BUSY = 18  # later reading: a rank that was left still does something else
    PEERS_CAME = 19  # later reading: no rank does something else
    WITHDRAW = 20  # the rank's function has failed, or the controller has refused the operation


class Effect(IntEnum):
    """The work that a step leaves to the rank's coordinator."""

    NOTHING = 0
    LAUNCH = 1  # make the call on the real group
    READ_AGAIN = 2  # read the words of the others, and take the step of the second reading
    READ_PLACE = 3  # read whether another rank asks at this place; if so, take the step of PEER_ASKS
    DOUBT = 4  # take the step of ASK, as soon as no lock is held
    REQUEST = 5  # mark the place, and ask the controller
    REQUEST_AND_WAIT = 6  # the same, and report that the rank does nothing else
    REPORT = 7  # report the operation to the controller in a message, which is also a request
    LOOK_FOR_GOES = 8  # read whether another rank goes; then the call is torn


class Step(NamedTuple):
    """A step of an operation: the next state, the word to write on the board (None for no word), and what to do."""

    state: State
    word: int | None = None
    effect: Effect = Effect.NOTHING


_LAUNCH = Step(State.LAUNCHED, None, Effect.LAUNCH)
_LEAVE = Step(State.LEFT, None, Effect.LAUNCH)
_GO = Step(State.GOING, GOES, Effect.READ_AGAIN)
_ASK = Step(State.ASKED, ASKS, Effect.REQUEST)
_ASK_AND_WAIT = Step(State.ASKED, ASKS, Effect.REQUEST_AND_WAIT)
_DOUBT = Step(State.DOUBTFUL, None, Effect.DOUBT)
_WITHDRAW = Step(State.WITHDRAWN, ABSENT, Effect.LOOK_FOR_GOES)
_OPEN = (State.NEW, State.POSTED, State.WAITING, State.DOUBTFUL, State.ASKED, State.GRANTED)
_UNASKED = (State.POSTED, State.WAITING, State.DOUBTFUL)


def _stays(states: Iterable[State], *events: Event) -> dict[tuple[State, Event], Step]:
    return {(state, event): Step(state) for state in states for event in events}


ON_RANK: Mapping[tuple[State, Event], Step] = {
    # The control thread may take an operation before it is on the board. Then nothing is put there.
    **_stays((State.GRANTED, State.LAUNCHED, State.WITHDRAWN), Event.POST, Event.POST_AND_WAIT),
    (State.NEW, Event.POST): Step(State.POSTED, POSTED),
    (State.NEW, Event.POST_AND_WAIT): Step(State.WAITING, WAITS),
    (State.NEW, Event.ANNOUNCE): Step(State.ASKED, None, Effect.REPORT),
    # Look at the words of the others. Before an operation is on the board, the others do not see this rank go.
    **_stays((State.NEW,), Event.READY, Event.BLOCKED),
    **{(state, Event.READY): _GO for state in _UNASKED},
    **{(state, Event.BLOCKED): Step(state, None, Effect.READ_PLACE) for state in _UNASKED},
    (State.POSTED, Event.PEER_ASKS): _DOUBT,
    (State.WAITING, Event.PEER_ASKS): _DOUBT,
    (State.DOUBTFUL, Event.PEER_ASKS): Step(State.DOUBTFUL),
    (State.ASKED, Event.PEER_GOES): Step(State.FOLLOWING, GOES, Effect.READ_AGAIN),
    (State.ASKED, Event.NONE_GOES): Step(State.ASKED),
    (State.GOING, Event.CONFIRMED): _LAUNCH,
    (State.GOING, Event.CONFIRMED_BUSY): _LEAVE,
    (State.GOING, Event.VANISHED): _DOUBT,
    (State.FOLLOWING, Event.CONFIRMED): _LAUNCH,
    (State.FOLLOWING, Event.CONFIRMED_BUSY): _LEAVE,
    (State.FOLLOWING, Event.VANISHED): Step(State.ASKED, ASKS),
    # Wait.
    (State.POSTED, Event.WAIT): Step(State.WAITING, WAITS),
    **_stays((State.WAITING, State.DOUBTFUL, State.ASKED, State.GRANTED), Event.WAIT),
    # Lose the word on the board. Another rank that saw the word may assume that this rank launches the operation.
    (State.POSTED, Event.HIDE): _DOUBT,
    (State.WAITING, Event.HIDE): _DOUBT,
    **_stays((State.DOUBTFUL, State.ASKED, State.GRANTED), Event.HIDE),
    # Ask the controller, and get its grant.
    **{(state, Event.ASK): _ASK for state in (State.NEW, *_UNASKED)},
    **{(state, Event.ASK_AND_WAIT): _ASK_AND_WAIT for state in (State.NEW, *_UNASKED)},
    **_stays((State.ASKED, State.GRANTED), Event.ASK),
    (State.ASKED, Event.ASK_AND_WAIT): _ASK_AND_WAIT,
    **_stays((State.GRANTED,), Event.ASK_AND_WAIT),
    **{(state, Event.GRANT): Step(State.GRANTED) for state in _OPEN},
    (State.GRANTED, Event.TURN): _LAUNCH,
    # A rank that was left may never look. Then only a grant makes it launch the operation.
    (State.LEFT, Event.PEER_BUSY): Step(State.LAUNCHED, None, Effect.REQUEST),
    (State.LEFT, Event.PEERS_CAME): Step(State.LAUNCHED),
    # Leave without the others.
    **{(state, Event.ABANDON): _LAUNCH for state in _OPEN},
    **{(state, Event.WITHDRAW): _WITHDRAW for state in _OPEN},
}


def first_reading(state: State, words: Sequence[int]) -> Event:
    """Return the event that a look at the words of the others is for an operation in this state."""
    if state is State.ASKED:
        return Event.PEER_GOES if GOES in words else Event.NONE_GOES
    return Event.BLOCKED if ABSENT in words or ASKS in words else Event.READY


def second_reading(words: Sequence[int]) -> Event:
    """Return the event of a look at the words of the others after this rank has written ``GOES``."""
    if ABSENT in words:
        return Event.VANISHED
    return Event.CONFIRMED_BUSY if POSTED in words else Event.CONFIRMED


def later_reading(words: Sequence[int]) -> Event:
    """Return the event of a look at the words of the others after the launch."""
    return Event.PEER_BUSY if POSTED in words else Event.PEERS_CAME


# -- an operation for the controller ---------------------------------------------------------------


class Stage(IntEnum):
    """The stage of an operation of one rank, as far as the controller knows."""

    UNKNOWN = 0
    ANNOUNCED = 1  # read in the log of the rank, or in a message
    REQUESTED = 2  # the rank has asked for a grant
    MATCHED = 3  # all of its ranks have announced it, and none has asked: they launch it by themselves
    GRANTED = 4  # granted to all of its ranks
    WITHDRAWN = 5  # the rank never launches it, so it is not granted


class Notice(IntEnum):
    """The news of an operation of one rank."""

    ANNOUNCE = 0
    REQUEST = 1
    MATCH = 2  # all of its ranks have announced matching operations, and no grant is due
    GRANT = 3  # a grant is due; see `may_grant`
    WITHDRAW = 4  # the rank has ended, and reports that it never launches the operation


class Verb(IntEnum):
    """The work that a ruling leaves to the controller."""

    NOTHING = 0
    SEND = 1  # send the grant to this rank
    GRANT_ALL = 2  # grant it to all of its ranks, if `may_grant` allows that
    TEAR = 3  # other ranks may launch it and this one never does: the processes are not used again


class Ruling(NamedTuple):
    """A step of the controller: the next stage, and what to do."""

    stage: Stage
    verb: Verb = Verb.NOTHING


_SEND = Ruling(Stage.GRANTED, Verb.SEND)

ON_CONTROLLER: Mapping[tuple[Stage, Notice], Ruling] = {
    (Stage.UNKNOWN, Notice.ANNOUNCE): Ruling(Stage.ANNOUNCED),
    (Stage.UNKNOWN, Notice.REQUEST): Ruling(Stage.REQUESTED),
    (Stage.UNKNOWN, Notice.WITHDRAW): Ruling(Stage.WITHDRAWN),
    (Stage.UNKNOWN, Notice.MATCH): Ruling(Stage.MATCHED),  # the rank has reported that it no longer asks
    (Stage.UNKNOWN, Notice.GRANT): _SEND,
    (Stage.ANNOUNCED, Notice.REQUEST): Ruling(Stage.REQUESTED),
    (Stage.ANNOUNCED, Notice.MATCH): Ruling(Stage.MATCHED),
    (Stage.ANNOUNCED, Notice.GRANT): _SEND,
    (Stage.ANNOUNCED, Notice.WITHDRAW): Ruling(Stage.WITHDRAWN),
    (Stage.REQUESTED, Notice.ANNOUNCE): Ruling(Stage.REQUESTED),
    (Stage.REQUESTED, Notice.REQUEST): Ruling(Stage.REQUESTED),
    (Stage.REQUESTED, Notice.MATCH): Ruling(Stage.MATCHED),  # another of its ranks has withdrawn it
    (Stage.REQUESTED, Notice.GRANT): _SEND,
    (Stage.REQUESTED, Notice.WITHDRAW): Ruling(Stage.WITHDRAWN),
    (Stage.MATCHED, Notice.REQUEST): Ruling(Stage.MATCHED, Verb.GRANT_ALL),
    (Stage.MATCHED, Notice.GRANT): _SEND,
    (Stage.MATCHED, Notice.WITHDRAW): Ruling(Stage.WITHDRAWN),
    (Stage.GRANTED, Notice.REQUEST): Ruling(Stage.GRANTED),
    (Stage.GRANTED, Notice.WITHDRAW): Ruling(Stage.WITHDRAWN, Verb.TEAR),
    (Stage.WITHDRAWN, Notice.ANNOUNCE): Ruling(Stage.WITHDRAWN),
    (Stage.WITHDRAWN, Notice.REQUEST): Ruling(Stage.WITHDRAWN),
    (Stage.WITHDRAWN, Notice.MATCH): Ruling(Stage.WITHDRAWN),
    (Stage.WITHDRAWN, Notice.WITHDRAW): Ruling(Stage.WITHDRAWN),
}


def may_grant(stages: Sequence[Stage]) -> bool:
    """Return whether an operation may be granted whose ranks have these stages: no rank has withdrawn it."""
    return Stage.WITHDRAWN not in stages
