"""The passes of one process in a step, run in the order of the grid, with the messages between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pdlcheck.primitives.pipeline.batches import moved
from pdlcheck.primitives.pipeline.cells import Cell
from pdlcheck.primitives.pipeline.messages import Form, Messages, form_of
from pdlcheck.primitives.pipeline.peer_error import Mishap
from pdlcheck.primitives.pipeline.program import Turn, consumer
from pdlcheck.primitives.pipeline.stage import Stage, Tensors, as_tensors
from pdlcheck.primitives.pipeline.stash import Stash
from pdlcheck.primitives.pipeline.work import Work

__all__ = ["Passes"]


@dataclass
class Passes:
    """The runner of the turns of one process.

    Args:
        n_stages: number of stages in the whole pipeline.
        stages: the stages of this process, by their index.
        messages: to and from other ranks; None if there are none.
        stashes: the weight stashes of ``"pipedream"``, by stage.
        sync: averages the gradients of a stage over pipelines, before a step of ``"pipedream"``; None if there is one
            pipeline.
        mishap: reports a failed pass to other ranks.
    """

    n_stages: int
    stages: Mapping[int, Stage]
    messages: Messages | None
    stashes: Mapping[int, Stash]
    sync: Callable[[nn.Module, float], None] | None
    mishap: Mishap
    _first: tuple[Cell, Form] | None = None  # a pass before forms were known, and its form

    def run(self, turns: Sequence[Turn], work: Work, settle: Callable[[], float], *, eager: bool = False) -> float:
        """Run ``turns``; return the result of ``settle``.

        Args:
            turns: the turns of this process.
            work: the step; ``settle`` sets its forms if they are not known yet.
            settle: exchanges facts with the other ranks, and raises if one of them cannot take the step.
            eager: run the first pass before ``settle``.
        """
        messages = self.messages
        handed: dict[Cell, Tensors] = {}
        weight: float | None = None
        self._first = None
        for stash in self.stashes.values():
            stash.start()
        for turn in turns:
            if weight is None and not (eager and turn.cell == Cell(0, "F", 0)):
                weight = settle()
            receives = [] if weight is None else self._receives(turn, work)
            ahead = messages is not None and messages.ahead and weight is not None
            if messages is not None and ahead and receives:
                messages.post((), None, receives)
            result = () if turn.cell is None else self._pass(turn.cell, turn.sends, handed, work)
            if weight is None:
                weight = settle()
                self._require_first(work)
                receives = self._receives(turn, work)
            if messages is not None and (turn.sends is not None or (receives and not ahead)):
                messages.post(result, turn.sends, [] if ahead else receives)
        if messages is not None:
            messages.finish()
        assert weight is not None  # every process has a turn
        return weight

    def _pass(self, cell: Cell, target: int | None, handed: dict[Cell, Tensors], work: Work) -> Tensors:
        """Run the pass ``cell``; return the message to send to the place ``target``.

        The message is empty if the reader is in this process.
        """
        alarm = work.alarm
        read: Tensors = ()
        if cell in handed:
            read = handed.pop(cell)
        elif cell.stage if cell.kind == "F" else cell.stage < self.n_stages - 1:
            assert self.messages is not None  # the stages of this process pass their results in memory
            read = alarm.open(self.messages.take(cell), cell.microbatch, lambda: self._form(cell, work))
        result: Tensors = ()
        if not alarm.raised:
            result = self._forward(cell, read, work) if cell.kind == "F" else self._backward(cell, read, work)
        reader = consumer(cell, self.n_stages)
        if reader is None:
            return ()
        if target is None:
            device = self.stages[reader.stage].device
            handed[reader] = tuple(moved(tensor, device) for tensor in result)
            return ()
        return alarm.seal(result, cell.microbatch, lambda: self._form(reader, work), self.stages[cell.stage].device)

    def _receives(self, turn: Turn, work: Work) -> list[tuple[Cell, int, Form]]:
        return [
            (reader, source, work.alarm.form(self._form(reader, work), reader.microbatch))
            for reader, source in turn.receives
        ]

    def _form(self, reader: Cell, work: Work) -> Form:
        """Return the form of the message that ``reader`` reads."""
        returned = work.forms[work.samples[reader.microbatch]]
        if reader.kind == "F":
            return returned[reader.stage - 1]
        return returned[reader.stage].gradients()

    def _forward(self, cell: Cell, read: Tensors, work: Work) -> Tensors:
        stage, number = self.stages[cell.stage], cell.microbatch
        packed = work.packed
        if cell.stage:
            packed = work.forms[work.samples[number]][cell.stage - 1].packed
        else:
            read = tuple(tensor.to(stage.device) for tensor in work.parts[number])
        stash = self.stashes.get(cell.stage) if work.backward else None
        last = cell.stage == self.n_stages - 1
        try:
            out = stage.forward(
                number,
                read,
                packed=packed,
                targets=moved(work.targets[number], stage.device) if last else None,
                weights=stash.weights(number) if stash else None,
                keep=work.backward,
                keep_outputs=last and work.keep_outputs,
            )
            return () if last else self._returned(cell, out, work)
        except Exception as error:
            self.mishap.tell(error, cell)
            raise

    def _returned(self, cell: Cell, out: Any, work: Work) -> Tensors:
        """Return the tensors of ``out``. Raise ValueError if they have not the form that other ranks wait for."""
        tensors = tuple(tensor.detach() for tensor in as_tensors(out, f"stage {cell.stage}"))
        found = form_of(tensors, isinstance(out, tuple | list))
        if work.forms:
            self._require(cell, found, work)
        else:
            self._first = cell, found
        return tensors

    def _require_first(self, work: Work) -> None:
        """Check the form of the first pass, as soon as forms are known and before anything is sent."""
        if self._first is None:
            return
        cell, found = self._first
        try:
            self._require(cell, found, work)
        except ValueError as error:
            self.mishap.tell(error, cell)
            raise

    def _require(self, cell: Cell, found: Form, work: Work) -> None:
        number = cell.microbatch
        expected = work.forms[work.samples[number]][cell.stage]
        if found != expected:
            raise ValueError(
                f"stage {cell.stage} returned {found} for micro-batch {number}, and {expected} for as many zeros; "
                "what a stage returns must have a shape that depends on the shape of its input alone"
            )

    def _backward(self, cell: Cell, read: Tensors, work: Work) -> Tensors:
        stage, number = self.stages[cell.stage], cell.microbatch
        stash = self.stashes.get(cell.stage)
        forms = work.forms[work.samples[number]]
        gradients = forms[cell.stage].unpack(read)
        if cell.stage == self.n_stages - 1:
            loss = stage.losses[number]
            gradients = [torch.full_like(loss, 1.0 if stash else work.shares[number])]
        try:
            result = stage.backward(number, gradients) if work.shares[number] else stage.skip(number)
        except Exception as error:
            self.mishap.tell(error, cell)
            raise
        if stash:
            stash.update(number)
            if self.sync is not None and work.counts[number]:  # otherwise the gradients of all ranks are zero
                self.sync(stage.layers, work.weights[number])
            stash.step()
        return forms[cell.stage - 1].pack(result, stage.device) if cell.stage else ()
