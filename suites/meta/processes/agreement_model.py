"""A model of watched ranks and their controller around the transition tables of ``agreement.py``.

The model has no threads and no time: a run is a sequence of steps, and each step is one access to shared memory, one
message, or one decision of a rank's own. So a search can take every order. What has a time limit in the program (the
patience of a rank, the hesitation of the controller) may happen at any time in the model. A rank that may die, dies at
any step. The names of messages and fields follow ``coordinator.py``, ``arbiter.py`` and ``collect.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pdlcheck.worlds.processes.exchange.agreement import (
    ABSENT,
    GOES,
    Effect,
    Event,
    State,
    first_reading,
    later_reading,
    second_reading,
)
from suites.meta.processes.agreement_controller import Controller, put
from suites.meta.processes.agreement_programs import Broken, Do, Program, Tables

__all__ = ["Model"]

GONE = {State.LAUNCHED, State.LEFT}


class Rank:
    """One rank: its main thread, its control thread, and the states of its operations."""

    def __init__(self, operations: int) -> None:
        self.pc = 0
        self.phase = 0  # how far the main thread is in the present instruction
        self.states: list[State | None] = [None] * operations
        self.order: tuple[int, ...] = ()  # the open operations, in posting order
        self.withdrawn: tuple[int, ...] = ()
        self.doubts: tuple[int, ...] = ()
        # What the owner of the lock does: (operations to examine, channels held, number of the reading, words)
        self.session: tuple[tuple[int, ...], frozenset[int], int, tuple[int, ...]] | None = None
        self.tearing: tuple[int, ...] = ()  # withdrawn just now; to look for GOES
        self.refusing: tuple[int, ...] | None = None  # operations that the control thread withdraws, after a refusal
        self.refused = False
        self.ending = ""
        self.ended = ""
        self.torn = False
        self.kept_key: tuple[object, ...] | None = None

    def copy(self) -> Rank:
        new = Rank.__new__(Rank)
        new.__dict__.update(self.__dict__)
        new.states, new.kept_key = [*self.states], None
        return new

    def key(self) -> tuple[object, ...]:
        if self.kept_key is None:
            self.kept_key = (
                *(tuple(self.states), self.pc, self.phase, self.order, self.withdrawn, self.doubts, self.session),
                *(self.tearing, self.refusing, self.refused, self.ending, self.ended, self.torn),
            )
        return self.kept_key


class Model(Controller):
    """One state of all ranks, the board, the pipes and the controller."""

    def __init__(self, program: Program, tables: Tables = Tables()) -> None:  # noqa: B008 - it is immutable
        super().__init__(program, tables)
        size, operations = self.size, len(program.ways)
        self.ranks = [Rank(operations) for _ in range(size)]
        self.words: tuple[tuple[tuple[object, int] | None, ...], ...] = ((None,) * operations,) * size
        self.covered: frozenset[int] = frozenset()  # ranks that have lost a word GOES
        self.places: frozenset[tuple[int, int]] = frozenset()  # (rank, operation) that are marked with ASKS
        self.ever: frozenset[tuple[int, int, int]] = frozenset()  # (rank, operation, variant) posted so far
        self.flags: frozenset[int] = frozenset()

    def copy(self) -> Model:
        """Return a copy that takes steps of its own."""
        new = Model.__new__(Model)
        new.__dict__.update(self.__dict__)
        new.ranks = [*self.ranks]
        new.stages, new.posted, new.waiting = {**self.stages}, {**self.posted}, {**self.waiting}
        return new

    def key(self) -> tuple[object, ...]:
        """Return a value that is equal for equal states."""
        return (
            *[rank.key() for rank in self.ranks],
            *(self.words, self.covered, self.places, self.logs, self.up, self.down, self.flags, self.over, self.dead),
            *(self.returned, self.lost),
            *(self.left_open, self.stopping, self.verdict, self.torn),
            *(frozenset(self.stages.items()), frozenset(self.posted.items()), frozenset(self.waiting.items())),
        )

    # -- the steps ---------------------------------------------------------------------------------

    def steps(self) -> Iterator[tuple[str, Callable[[Model], None]]]:
        """Yield the steps that are possible now: a name, and a function that takes the step on a copy."""
        for number, rank in enumerate(self.ranks):
            if rank.ended != "dead":
                yield from (
                    (f"rank {number}: {name}", _of(number, step)) for name, step in self._steps_of(number, rank)
                )
            # If a rank dies later, its peers learn it from the real group: the connection is closed.
            if number in self.program.mortal and not rank.ended:
                yield f"rank {number} dies", _of(number, Model._die)
            if self.up[number]:
                yield f"controller reads {self.up[number][0]} of rank {number}", _of(number, Model._receive)
            elif rank.ended == "dead" and number not in self.over:
                yield f"controller sees the end of rank {number}", _of(number, Model._see_death)
        if self._mismatched() and not self.stopping:
            yield "controller stops hesitating", Model._raise_mismatch

    def _steps_of(self, number: int, rank: Rank) -> Iterator[tuple[str, Callable[[Model, int], None]]]:
        if rank.session is not None:
            yield "goes on with its look", Model._go_on_looking
            return
        if rank.tearing:
            yield "looks whether another rank went", Model._look_for_goes
            return
        if rank.doubts:
            yield "resolves a doubt", Model._resolve_doubt
        if rank.refusing is not None:
            yield "withdraws after the refusal", Model._withdraw_refused
        elif self.down[number]:
            yield f"handles {self.down[number][0]}", Model._handle
        if not rank.ended:
            yield from self._steps_of_main(number, rank)

    def _steps_of_main(self, number: int, rank: Rank) -> Iterator[tuple[str, Callable[[Model, int], None]]]:
        if rank.ending:
            yield f"{rank.ending}", Model._end
            return
        do = self._do(number)
        if do is None or do.what == "raise":
            yield "leaves its function", Model._leave
        elif do.what == "set":
            yield f"sets {do.name}", Model._set
        elif do.what == "await":
            if do.name in self.flags:
                yield f"sees {do.name}", Model._next
            elif rank.refused:
                yield "is stopped", Model._halt
        elif do.what in ("sync", "async") and rank.phase == 0:
            yield f"logs {do.name}", Model._log
        elif do.what in ("sync", "async") and rank.phase == 1:
            yield f"posts {do.name}", Model._post
        elif rank.phase == 0:
            yield f"waits for {do.name}", Model._begin_to_wait
        else:
            yield from self._steps_of_wait(rank, do)

    def _steps_of_wait(self, rank: Rank, do: Do) -> Iterator[tuple[str, Callable[[Model, int], None]]]:
        state = rank.states[do.name]
        if state is State.WITHDRAWN:
            yield "raises what it was told", Model._leave
        elif state in GONE:
            if state is State.LEFT:
                yield "tells the ranks that it has left", Model._tell
            if all(other.states[do.name] in GONE for other in self.ranks):
                yield f"has waited for {do.name}", Model._next
            elif rank.refused:
                yield "is stopped", Model._halt
        else:
            yield "looks", Model._look_now
            if rank.phase == 2:
                yield "loses patience", Model._ask_and_wait

    # -- a rank ------------------------------------------------------------------------------------

    def _do(self, number: int) -> Do | None:
        instructions, pc = self.program.ranks[number], self.ranks[number].pc
        return instructions[pc] if pc < len(instructions) else None

    def _next(self, number: int) -> None:
        rank = self.ranks[number]
        rank.pc, rank.phase = rank.pc + 1, 0

    def _set(self, number: int) -> None:
        do = self._do(number)
        assert do is not None
        self.flags |= {do.name}
        self._next(number)

    def _log(self, number: int) -> None:
        rank, do = self.ranks[number], self._do(number)
        assert do is not None
        if rank.refused:
            self._leave(number)
            return
        rank.states[do.name], rank.order = State.NEW, (*rank.order, do.name)
        self.ever |= {(number, do.name, do.variant)}
        if (number, do.name) not in self.program.unlogged:
            self.logs = put(self.logs, number, (*self.logs[number], (do.name, do.variant)))
        rank.phase = 1

    def _post(self, number: int) -> None:
        rank, do = self.ranks[number], self._do(number)
        assert do is not None
        waits = do.what == "sync"
        if (number, do.name) in self.program.unlogged:
            if do.name in rank.order:
                self._ask_older(number, do.name)
                if self._take(number, do.name, Event.ANNOUNCE) is Effect.REPORT:
                    self._send(number, "Posted", do.name, do.variant)
        elif do.name in self.program.unseen:
            self._ask(number, do.name, Event.ASK)
        else:
            self._take(number, do.name, Event.POST_AND_WAIT if waits else Event.POST)
            if not waits:  # a rank that waits may look at any time
                self._look(number)
        rank.phase = 2
        if not waits:
            self._next(number)

    def _begin_to_wait(self, number: int) -> None:
        rank, do = self.ranks[number], self._do(number)
        assert do is not None
        if do.name in rank.order and self.program.meets(number, do.name):
            self._take(number, do.name, Event.WAIT)
        rank.phase = 2

    def _ask_and_wait(self, number: int) -> None:
        rank, do = self.ranks[number], self._do(number)
        assert do is not None
        if do.what == "try":
            self._ask(number, do.name, Event.ASK)
            self._next(number)
        else:
            self._ask(number, do.name, Event.ASK_AND_WAIT)
            rank.phase = 3

    def _ask_older(self, number: int, operation: int) -> None:
        rank, ways = self.ranks[number], self.program.ways
        for older in rank.order[: rank.order.index(operation)]:
            if ways[older] == ways[operation] and rank.states[older] is not State.ASKED:
                self._ask_one(number, older, Event.ASK)

    def _ask(self, number: int, operation: int, event: Event) -> None:
        if operation in self.ranks[number].order:
            self._ask_older(number, operation)
            self._ask_one(number, operation, event)

    def _ask_one(self, number: int, operation: int, event: Event) -> None:
        effect = self._take(number, operation, event)
        if effect is not Effect.NOTHING:
            self.places |= {(number, operation)}
            self._send(number, "Asks", operation, effect is Effect.REQUEST_AND_WAIT)

    def _resolve_doubt(self, number: int) -> None:
        rank = self.ranks[number]
        operation, *rest = rank.doubts
        rank.doubts = tuple(rest)
        if operation in rank.order:
            self._ask_one(number, operation, Event.ASK)

    def _tell(self, number: int, operation: int | None = None) -> None:
        if operation is None:
            do = self._do(number)
            assert do is not None
            operation = do.name
        event = later_reading([self._word(peer, number, operation) for peer in self._others(number)])
        if self._take(number, operation, event) is Effect.REQUEST:
            self._send(number, "Asks", operation, False)

    def _leave(self, number: int) -> None:
        do = self._do(number)
        fails = do is not None
        self.ranks[number].ending = "fails" if fails else "returns"
        self._look(number)

    def _end(self, number: int) -> None:
        rank = self.ranks[number]
        for operation, state in enumerate(rank.states):
            if state is State.LEFT:
                self._tell(number, operation)
                return
        if rank.ending == "fails" and rank.order:
            self._withdraw(number, rank.order[0])
            return
        rank.ended = rank.ending
        self._send(number, "Ended", rank.ending, rank.withdrawn, rank.torn, bool(rank.order))

    def _halt(self, number: int) -> None:
        self.ranks[number].ended = "is stopped"
        self._send(number, "Ended", "is stopped", (), True, False)

    def _die(self, number: int) -> None:
        rank = self.ranks[number]
        rank.ended, rank.session, rank.doubts, rank.refusing, rank.tearing = "dead", None, (), None, ()
        self.down = put(self.down, number, ())
        self.dead |= {number}

    def _withdraw(self, number: int, operation: int) -> None:
        rank = self.ranks[number]
        rank.order = tuple(other for other in rank.order if other != operation)
        rank.withdrawn += (operation,)
        if self._take(number, operation, Event.WITHDRAW) is Effect.LOOK_FOR_GOES:
            rank.tearing += (operation,)

    def _look_for_goes(self, number: int) -> None:
        rank = self.ranks[number]
        operation, *rest = rank.tearing
        rank.tearing = tuple(rest)
        slot, digest = self.program.slots[operation], self._digest(number, operation)
        for peer in self._others(number):
            word = self.words[peer][slot]
            if word is not None and (word[1] == GOES if word[0] == digest else peer in self.covered):
                rank.torn = True

    def _withdraw_refused(self, number: int) -> None:
        rank = self.ranks[number]
        assert rank.refusing is not None
        if not rank.refused:
            rank.refused, rank.refusing = True, rank.order
            return
        if not rank.refusing:
            rank.refusing = None
            return
        operation, *rest = rank.refusing
        rank.refusing = tuple(rest)
        if operation in rank.order:
            self._withdraw(number, operation)

    def _handle(self, number: int) -> None:
        rank = self.ranks[number]
        (what, *rest), *later = self.down[number]
        self.down = put(self.down, number, tuple(later))
        if what == "Refuse":
            rank.refusing = ()
            self._look(number)
        elif (operation := int(str(rest[0]))) in rank.order:
            self._take(number, operation, Event.GRANT)
            self._look(number)

    # -- a look at the board, with the lock held ---------------------------------------------------

    def _look(self, number: int) -> None:
        rank = self.ranks[number]
        if rank.order:
            rank.session = (rank.order, frozenset(), 1, ())

    def _look_now(self, number: int) -> None:
        self._look(number)
        self._go_on_looking(number)  # until the first word is read, it makes no difference who has the lock

    def _go_on_looking(self, number: int) -> None:
        rank = self.ranks[number]
        assert rank.session is not None
        queue, held, reading, words = rank.session
        operation, way = queue[0], self.program.ways[queue[0]]
        state = rank.states[operation]
        assert state is not None
        if way in held:
            self._examined(number, goes=False)
            return
        if state is State.GRANTED:
            self._examined(number, goes=self._take(number, operation, Event.TURN) is Effect.LAUNCH)
            return
        if not self.program.meets(number, operation):
            self._examined(number, goes=False)
            return
        others = self._others(number)
        if len(words) < len(others):
            count = len(others) if self.program.at_once else len(words) + 1
            words += tuple(self._word(peer, number, operation) for peer in others[len(words) : count])
            rank.session = (queue, held, reading, words)
            event = first_reading(state, words) if reading == 1 else second_reading(words)
            if len(words) < len(others) or self.tables.rank[state, event].word is not None:
                return  # the word is written in a step of its own
        event = first_reading(state, words) if reading == 1 else second_reading(words)
        effect = self._take(number, operation, event)
        if effect is Effect.READ_AGAIN:
            rank.session = (queue, held, 2, ())
            return
        if effect is Effect.READ_PLACE and any((peer, operation) in self.places for peer in others):
            effect = self._take(number, operation, Event.PEER_ASKS)
        if effect is Effect.DOUBT:
            rank.doubts += (operation,)
        self._examined(number, goes=effect is Effect.LAUNCH)

    def _examined(self, number: int, *, goes: bool) -> None:
        rank = self.ranks[number]
        assert rank.session is not None
        queue, held, _, _ = rank.session
        if goes:
            rank.order = tuple(other for other in rank.order if other != queue[0])
            self._check_launch(number, queue[0])
        else:
            held |= {self.program.ways[queue[0]]}
        rank.session = (queue[1:], held, 1, ()) if queue[1:] else None

    def _take(self, number: int, operation: int, event: Event) -> Effect:
        rank = self.ranks[number]
        state = rank.states[operation]
        assert state is not None
        if (state, event) not in self.tables.rank:
            raise Broken(f"rank {number}: no step for {event!r} in the state {state!r}")
        step = self.tables.rank[state, event]
        rank.states[operation] = step.state
        if step.word is not None and self.program.meets(number, operation):
            self._write(number, operation, step.word)
        return step.effect

    def _write(self, number: int, operation: int, word: int) -> None:
        slot, digest = self.program.slots[operation], self._digest(number, operation)
        before = self.words[number][slot]
        self.words = put(self.words, number, put(self.words[number], slot, (digest, word)))
        if before is not None and before[0] != digest and before[1] == GOES:
            self.covered |= {number}
        rank = self.ranks[number]
        hidden = [other for other in rank.order if before is not None and before[0] == self._digest(number, other)]
        if before is None or before[0] == digest or not hidden:
            return
        if self._take(number, hidden[0], Event.HIDE) is Effect.DOUBT:
            rank.doubts += (hidden[0],)

    def _digest(self, number: int, operation: int) -> tuple[int, int]:
        dos = self.program.ranks[number]
        variant = next((do.variant for do in dos if do.what in ("sync", "async") and do.name == operation), 0)
        return operation, variant

    def _word(self, peer: int, number: int, operation: int) -> int:
        word = self.words[peer][self.program.slots[operation]]
        return word[1] if word is not None and word[0] == self._digest(number, operation) else ABSENT

    def _others(self, number: int) -> list[int]:
        return [peer for peer in range(self.size) if peer != number]

    def _send(self, number: int, *message: object) -> None:
        self.up = put(self.up, number, (*self.up[number], message))

    # -- the invariants ----------------------------------------------------------------------------

    def _check_launch(self, number: int, operation: int) -> None:
        digest = self._digest(number, operation)
        for rank in range(self.size):
            if (rank, *digest) not in self.ever:
                raise Broken(f"rank {number} launches {operation}, and rank {rank} has not posted it")

    def is_over(self) -> bool:
        """Return whether every rank has ended and the controller knows it."""
        return len(self.over) == self.size

    def check(self) -> None:
        """Check what holds in every state.

        Raises:
            Broken: it does not hold.
        """
        if self.verdict and self.verdict != self.program.expected:
            raise Broken(f"the verdict is {self.verdict}, expected {self.program.expected or 'none'}")

    def check_end(self) -> None:
        """Check what holds in the end.

        Raises:
            Broken: it does not hold.
        """
        if self.verdict != self.program.expected and not self.program.may_fail:
            raise Broken(f"the verdict is {self.verdict or 'missing'}, expected {self.program.expected}")
        for operation in range(len(self.program.ways)):
            gone = [number for number, rank in enumerate(self.ranks) if rank.states[operation] in GONE]
            if len(gone) == self.size or (not gone and (self.stopping or not self._all_posted(operation))):
                continue
            if not gone:
                raise Broken(f"all ranks have posted {operation}, and none has launched it")
            if not (self.torn or self.lost or (self.stopping and self.left_open)):
                raise Broken(f"only ranks {gone} have launched {operation}, and the processes would be used again")

    def _all_posted(self, operation: int) -> bool:
        return all(rank.states[operation] is not None for rank in self.ranks)


def _of(number: int, step: Callable[[Model, int], None]) -> Callable[[Model], None]:
    def take(model: Model) -> None:
        model.ranks[number] = model.ranks[number].copy()
        step(model, number)

    return take
