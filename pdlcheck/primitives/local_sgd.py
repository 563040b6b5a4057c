"""Local SGD: every rank steps on its own, and the ranks average their models after every k-th step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal, Self

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pdlcheck.primitives.agreement import require_agreement
from pdlcheck.primitives.arguments import (
    Members,
    members,
    named_state,
    require_at_least,
    require_state,
    require_writable,
)
from pdlcheck.primitives.averages import averages
from pdlcheck.primitives.broadcasts import broadcast_tensors
from pdlcheck.primitives.optimizer_state import AveragedState, hyper_parameters, optimizer_parameters
from pdlcheck.primitives.sync import broadcast_parameters, sync_shares

__all__ = ["LocalSGD"]

FORMAT = 1  # version of the state_dict


class LocalSGD:
    """A wrapper of an optimizer; after every ``sync_every``-th step the ranks replace their models by the mean model.

    A round costs one message, where ``k`` synchronous steps cost ``k`` messages. The properties of a round:

    - With ``sync_every=1`` the steps are those of synchronous SGD. This holds for SGD with or without momentum, weight
      decay and Nesterov's look-ahead, and for every ``momentum`` except ``"reset"``, because all of these are linear in
      the gradient. It does not hold for Adam, whose step is not linear: the mean of the ranks' steps is not the step of
      the mean gradient.
    - The sum of the models over the ranks is the same before and after a round.
    - With ``momentum="keep"`` each rank keeps the momentum of its own gradients, and no momentum is sent. Replicas
      drift apart faster, and only their weights are equal after a round.
    - With ``momentum="average"`` the ranks average momentum and Adam's moments too. Replicas are then equal except for
      their step counts, at two or three times the bytes. Adam's second moment becomes the mean of the ranks' squares,
      which is at least the square of the mean.
    - With ``momentum="reset"`` all optimizer state is dropped, so every round starts like the first step.

    Ranks may have different numbers of steps. A rank without further steps calls :meth:`finish` (or leaves the ``with``
    block). It takes part in the others' rounds, with its current model, until all ranks have finished. A round divides
    by the number of all ranks. Every rank must finish; then all hold the same model.

    With ``synchronous_steps=n`` the method is post-local SGD: the first n steps are those of synchronous SGD, with the
    mean gradient over the ranks that have not finished, and the rounds begin afterwards. With ``node_group`` it is
    hierarchical: the ranks of a node form one replica with synchronised gradients in each step, and rounds average over
    the nodes.

    Args:
        optimizer: the optimizer of ``model``; every rank makes its own, of the same kind and with the same
            hyper-parameters.
        model: same structure on every rank; starts with the weights and buffers of the group's first rank.
        sync_every: steps between two rounds; with ``None`` only :meth:`finish` runs rounds.
        synchronous_steps: number of synchronous steps before the first round.
        momentum: ``"keep"``, ``"average"`` or ``"reset"`` the state of the optimizer in a round.
        buffers: ``"broadcast"`` the buffers of the group's first rank in a round, ``"average"`` or ``"keep"`` them. If
            the ranks have taken different numbers of steps, integer buffers can be averaged only if they are equal: a
            mean of integers is exact or an error.
        group: process group; ``None`` is the default group.
        node_group: the part of ``group`` that this rank belongs to; every rank of ``group`` is in one such part.

    Raises:
        TypeError, ValueError: on every rank alike. ``sync_every`` is below 1; a policy is unknown; the optimizer has a
            parameter that the model does not have; ranks differ in their model, optimizer or arguments; node groups
            overlap or leave a rank out.

    Example:
        >>> def train():
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     with LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), model, sync_every=4) as local:
        ...         for step in range(dist.get_rank() * 3 + 5):    # 5 steps on rank 0, 8 on rank 1
        ...             model.zero_grad()
        ...             model(torch.ones(2, 1)).sub(1).square().mean().backward()
        ...             local.step()
        ...     return model.weight.item()
        >>> len(set(world.run(train, world_size=2)))
        1

    Source: S. Stich, "Local SGD converges fast and communicates little", ICLR (2019); momentum policies as in J. Wang
    et al., "SlowMo", ICLR (2020); post-local and hierarchical local SGD: T. Lin et al., "Don't use large mini-batches,
    use local SGD", ICLR (2020).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        sync_every: int | None,
        synchronous_steps: int = 0,
        momentum: Literal["average", "keep", "reset"] = "keep",
        buffers: Literal["average", "broadcast", "keep"] = "broadcast",
        group: dist.ProcessGroup | None = None,
        node_group: dist.ProcessGroup | None = None,
    ) -> None:
        caller = type(self).__name__
        self._who = members(caller, group)
        self._settings = {
            "sync_every": sync_every,
            "synchronous_steps": synchronous_steps,
            "momentum": momentum,
            "buffers": buffers,
        }

        def facts() -> dict[str, object]:
            _require_settings(caller, self._settings)
            if node_group is not None:
                members(caller, node_group)
            return {**self._settings, **_shape_of(caller, model, optimizer, self._who)}

        require_agreement(caller, self._who, facts)
        self._node = None if node_group is None else members(caller, node_group)
        _require_nodes(caller, self._who, self._node)
        self.optimizer = optimizer
        self.model = model
        self._sync_every = sync_every
        self._synchronous_steps = synchronous_steps
        self._momentum = momentum
        self._buffer_policy = buffers
        self._parameters, self._buffers = named_state(caller, model)
        self._held = {**self._parameters, **self._buffers}
        self._state = AveragedState(optimizer, self._who)
        self._taken = 0
        self._since_round = 0
        broadcast_parameters(model, src=self._who.at(0), group=self._who.group)

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad()

    def step(self, take: Callable[[], object] | None = None) -> bool:
        """Take a step with this rank's gradients, and join the other ranks if a round is due.

        Args:
            take: a function that takes the step; ``None`` is ``optimizer.step``. With a loss scaler, pass
                ``lambda: scaler.step(optimizer)``: a step that the scaler skips must be counted too.

        Returns:
            True if the ranks' weights are equal now: after a round, and after each synchronous step.

        Raises:
            ValueError: on every rank alike: the model of some rank has other parameters than when it was wrapped;
                buffers or integers have no mean.
        """
        return self._advance(self.optimizer.step if take is None else take, is_active=True)[0]

    def finish(self, take: Callable[[], object] | None = None) -> None:
        """Take part in the rounds of the others until every rank has called this; then all models are equal.

        Training may continue afterwards, for another epoch: the next round is ``sync_every`` steps away.

        Args:
            take: as in :meth:`step`. A finished rank takes the synchronous steps, and those of its node, with the
                gradients of the others. If ``take`` of :meth:`step` also steps a scheduler, this one must do so too.
        """
        while self._advance(self.optimizer.step if take is None else take, is_active=False)[1]:
            pass
        self._since_round = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this rank in its rounds. Each rank saves the model and the optimizer separately.

        After a round, and with ``momentum="average"``, the state is equal on all ranks, and one file serves every rank.
        """
        return {
            "format": FORMAT,
            "kind": type(self).__name__,
            **self._settings,
            "taken": self._taken,
            "since_round": self._since_round,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. Every rank must call it.

        Raises:
            ValueError: on every rank alike, before anything is changed: ``state`` was saved by another class or
                version, or with other arguments; the ranks' states differ in the number of synchronous steps taken.
        """
        caller = f"{type(self).__name__}.load_state_dict"

        def facts() -> dict[str, object]:
            try:
                self._require_mine(caller, state)
            except (AttributeError, KeyError) as error:
                raise ValueError(f"{caller} needs a state that state_dict() gave, got one without {error}") from error
            return {"synchronous steps taken": min(state["taken"], self._synchronous_steps)}

        require_agreement(caller, self._who, facts)
        self._taken, self._since_round = state["taken"], state["since_round"]

    def _require_mine(self, caller: str, state: Mapping[str, Any]) -> None:
        expected = {name: value for name, value in self.state_dict().items() if name in ("format", "kind")}
        for name, value in {**expected, **self._settings}.items():
            if name not in state or state[name] != value:
                found = repr(state[name]) if name in state else "nothing"
                raise ValueError(
                    f"{caller} needs a state with {name}={value!r}, got {found}; make it as the one that was saved"
                )
        for name in ("taken", "since_round"):
            value = state[name]
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{caller} needs a state with a number of steps as {name}, got {value!r}")

    def _advance(self, take: Callable[[], object], *, is_active: bool) -> tuple[bool, bool]:
        """Take one step, or, on a finished rank, take part in a step of the others.

        Returns:
            Whether the ranks are equal now, and whether any rank still has steps to take, as far as this rank can
            detect.
        """
        is_synchronous = self._taken < self._synchronous_steps
        together = self._who if is_synchronous else self._node
        is_stepping = is_active
        if together is not None:
            is_stepping = sync_shares(self._trainable(), float(is_active), group=together.group) > 0
        if is_stepping:
            take()
            self._taken += 1
        if is_synchronous:
            return True, is_stepping
        self._since_round += is_stepping
        if is_stepping and (self._sync_every is None or self._since_round < self._sync_every):
            return False, True
        return True, self._round(is_active)

    def _round(self, is_active: bool) -> bool:
        """Average the models of all ranks; return whether any rank still has steps to take."""
        caller = type(self).__name__
        averaged = self._held if self._buffer_policy == "average" else self._parameters
        is_new = self._momentum == "average" and self._state.is_new()
        tail = [float(is_active), float(self._since_round), float(is_new), float(self._is_changed())]
        means, sums = averages(caller, averaged, self._who.world_size, self._who.group, tail=tail)
        working, steps, somewhere_new, changed = sums
        if changed:
            raise ValueError(
                f"{caller} found other parameters than those that it was made for on {changed:.0f} of "
                f"{self._who.world_size} ranks; change the model first, make its optimizer, then {caller}"
            )
        self._since_round = 0
        if steps:
            self._take_over(means)
            if self._buffer_policy == "broadcast" and self._buffers:
                broadcast_tensors(self._buffers.values(), self._who.at(0), self._who.group)
            if self._momentum == "average":
                self._state.average(somewhere_new=bool(somewhere_new))
            elif self._momentum == "reset":
                self.optimizer.state.clear()
        return bool(working)

    def _take_over(self, means: Mapping[str, Tensor]) -> None:
        """Copy the means of the ranks' models into this rank's model. A subclass may use the means differently."""
        for name, mean in means.items():
            self._held[name].detach().copy_(mean)

    def _trainable(self) -> list[Tensor]:
        return [parameter for parameter in self._parameters.values() if parameter.requires_grad]

    def _is_changed(self) -> bool:
        now = dict(self.model.named_parameters())
        return [*now] != [*self._parameters] or any(now[name] is not p for name, p in self._parameters.items())


def _require_settings(caller: str, settings: Mapping[str, Any]) -> None:
    if settings["sync_every"] is not None:
        require_at_least(caller, "sync_every", settings["sync_every"], 1)
    require_at_least(caller, "synchronous_steps", settings["synchronous_steps"], 0)
    for name, known in (("momentum", ("average", "keep", "reset")), ("buffers", ("average", "broadcast", "keep"))):
        if settings[name] not in known:
            words = ", ".join(map(repr, known[:-1])) + f" and {known[-1]!r}"
            raise ValueError(f"{caller} knows {name} {words}, got {settings[name]!r}")


def _shape_of(caller: str, model: nn.Module, optimizer: Optimizer, who: Members) -> dict[str, object]:
    """Check the model and the optimizer of this rank; return the facts that must be the same on every rank."""
    parameters, buffers = named_state(caller, model)
    require_state(caller, {**parameters, **buffers}, who.group)
    require_writable(caller, {**parameters, **buffers})
    if not parameters:
        raise ValueError(f"{caller} got a model without parameters: {type(model).__name__}; there is nothing to train")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{caller} takes a torch.optim.Optimizer first, got {type(optimizer).__name__}")
    names = {id(parameter): name for name, parameter in parameters.items()}
    held = [names.get(id(parameter)) for parameter in optimizer_parameters(optimizer)]
    if None in held:
        raise ValueError(
            f"{caller} got an optimizer of another model: its parameter {held.index(None)} is not one of the model's; "
            "make it from model.parameters(), after the last change of the model"
        )
    return {
        "model": {name: (tuple(t.shape), str(t.dtype)) for name, t in {**parameters, **buffers}.items()},
        **hyper_parameters(optimizer),
        "order of the optimizer's parameters": held,
    }


def _require_nodes(caller: str, who: Members, node: Members | None) -> None:
    """Raise ValueError unless the ranks' node groups are a partition of the group."""
    parts: list[Any] = [None] * who.world_size
    dist.all_gather_object(parts, None if node is None else node.ranks, who.group)
    if all(part is None for part in parts):
        return
    seen: list[int] = sorted(rank for part in {*parts} for rank in part or ())
    if None in parts or seen != sorted(who.ranks):
        listed = ", ".join(f"rank {who.at(place)}: {part}" for place, part in enumerate(parts))
        raise ValueError(
            f"{caller} needs every rank of the group in one node_group, the same for all ranks of a node; got {listed}"
        )
