"""A model in stages: micro-batches go forward and back through ranks, or through devices of one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pdlcheck.primitives.agreement import exchange
from pdlcheck.primitives.arguments import members
from pdlcheck.primitives.pipeline.agreement import Agreement, Header
from pdlcheck.primitives.pipeline.batches import concatenated, counted, micro_batches, require_batch
from pdlcheck.primitives.pipeline.building import Request
from pdlcheck.primitives.pipeline.cells import Schedule
from pdlcheck.primitives.pipeline.changes import Made
from pdlcheck.primitives.pipeline.messages import Form, Messages, form_of
from pdlcheck.primitives.pipeline.passes import Passes
from pdlcheck.primitives.pipeline.peer_error import Mishap
from pdlcheck.primitives.pipeline.program import Turn, forward_only, program
from pdlcheck.primitives.pipeline.shapes import Forms, find_forms
from pdlcheck.primitives.pipeline.stash import Stash, weight_versions
from pdlcheck.primitives.pipeline.step_veto import Alarm, bearer
from pdlcheck.primitives.pipeline.ties import share_tied_values, sum_tied_gradients
from pdlcheck.primitives.pipeline.together import Peers, build_together
from pdlcheck.primitives.pipeline.undo import Undo
from pdlcheck.primitives.pipeline.work import Work, form_of_batch, leaves_of
from pdlcheck.primitives.sync import broadcast_parameters, sync_gradients
from pdlcheck.uncompiled import uncompiled

__all__ = ["Pipeline", "Result"]


@dataclass(frozen=True)
class Result:
    """The result of a step on the process that has the last stage; both fields are None on other processes.

    Args:
        loss: the loss of the whole batch, without a graph.
        outputs: the outputs of the whole batch, in the order of its samples, without a graph.
    """

    loss: Tensor | None
    outputs: Any


@uncompiled
class Pipeline:
    """A sequential model whose stages are on different ranks, or on several devices of one process.

    Every process makes it from the same model and arguments and calls :meth:`step` with each batch. The process with
    stage 0 reads the inputs. The process with the last stage reads the targets and returns loss and outputs. Arguments
    of other processes are ignored.

    Gradients are those of one process on the whole batch, for every schedule except ``"pipedream"``. This includes
    batches that do not divide, several tensors between stages, integers that have no gradient, and parameters that
    stages share. Gradients of shared parameters are added, and their copies stay equal bit for bit. Layers that depend
    on the batch as a whole, such as batch norm in training mode, process micro-batches; a buffer that stages share is
    separate on each rank. A parameter without a gradient keeps None, even if the reason is that a later stage does not
    use its stage's output.

    Shapes and dtypes of messages are determined at the first step with inputs and targets of a given shape, or in a
    given mode of training or autocast. For that, every stage runs once on zeros. If a rank cannot take a step, all
    ranks raise the same error before a gradient is changed; random numbers and buffers are then as before the step.
    Cost: a step with the same shapes as the previous one adds one byte to each message of one micro-batch. Any other
    step, and every step with a ``data_group``, adds an all_reduce of 32 + 8 x world_size bytes.

    Args:
        model: an ``nn.Sequential``, whole, on every process. Each process keeps its own stages: use ``module``
            afterwards.
        loss: ``loss(outputs, targets)`` of a micro-batch, a mean or a sum over its samples; None if only :meth:`infer`
            is called.
        schedule: ``"1f1b"``, ``"gpipe"``, ``"interleaved"``, ``"pipedream"``, or a :class:`Schedule`.
        n_microbatches: parts of a batch, at most its number of samples.
        stages_per_rank: for ``"interleaved"`` only; the default is 2.
        split: how to cut the model, see :func:`split_model`. With ``"time"``, the first rank of the first pipeline
            measures.
        sample: input for ``split="time"``.
        reduction: the way ``loss`` combines samples, ``"mean"`` or ``"sum"``. The default is the reduction of the loss
            or among the keywords of a ``functools.partial``, if there is one; otherwise ``"mean"``. In that last case,
            a loss that doubles if every sample occurs twice is refused.
        loss_weight: the weight of a micro-batch's mean, ``loss_weight(targets)``. The default is the number of samples.
            With ``nn.CrossEntropyLoss`` and ``nn.NLLLoss`` it is the number of targets that are not ignored, times the
            weights of their classes. If another kind of loss ignores targets, return the number of targets that it does
            not ignore.
        recompute: keep a stage's inputs instead of its activations and run it again before each backward pass, with the
            same random numbers.
        optimizer: for ``"pipedream"`` only: makes the optimizer of a stage from its parameters.
        vertical_sync: for ``"pipedream"`` only: in every stage, a micro-batch uses the version of the weights that
            stage 0 had when it entered.
        devices: for several devices in this process: one for each row of the schedule; a device may occur twice.
        device: the device of this rank's stages; None leaves them on the model's device.
        group: the ranks of the pipeline, in the order of the stages; None is the default group.
        data_group: ranks of other pipelines with the same stages, which process other samples. Weights start as on its
            first rank. Gradients are averaged over all samples, as ``loss_weight`` states, or added if the loss is a
            sum. Give it on every rank or on none. If the pipelines do not contain all ranks of the default group, a
            rank that omits it makes the ranks with the same stages wait.

    Raises:
        TypeError: the model is not sequential; the loss is not a function.
        ValueError: there are more stages than layers; a stage has no parameters; the schedule is unknown, invalid, or
            for another number of ranks; ``data_group`` does not contain this rank, contains others of its pipeline, or
            contains ranks with other stages; arguments differ between ranks, or between pipelines of a ``data_group``.
            The same on every rank.
        RuntimeError: another failure of a rank, such as moving its stages to ``device``. The same on every rank.

    Example:
        >>> def train():
        ...     torch.manual_seed(0)
        ...     model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        ...     pipeline = Pipeline(model, torch.nn.MSELoss(), schedule="1f1b", n_microbatches=4)
        ...     optimizer = torch.optim.SGD(pipeline.module.parameters(), lr=0.1)
        ...     for _ in range(3):
        ...         optimizer.zero_grad()
        ...         result = pipeline.step(torch.ones(8, 2), torch.ones(8, 1))
        ...         optimizer.step()
        ...     return sorted(dict(pipeline.module.named_parameters())), result.loss is not None
        >>> world.run(train, world_size=2)
        [(['0.bias', '0.weight'], False), (['2.bias', '2.weight'], True)]

    Source: layer slicing and pipelining in D. Gannon, "Doing Deep Learning in Parallel with PyTorch" (2020); the
    schedules as in :func:`gpipe`, :func:`one_f_one_b`, :func:`interleaved_1f1b` and :func:`pipedream`.
    """

    def __init__(
        self,
        model: nn.Sequential,
        loss: Callable[..., Tensor] | None = None,
        *,
        schedule: str | Schedule = "1f1b",
        n_microbatches: int | None = None,
        stages_per_rank: int | None = None,
        split: Literal["layers", "parameters", "time"] | Sequence[int] = "parameters",
        sample: Any = None,
        reduction: Literal["mean", "sum"] | None = None,
        loss_weight: Callable[[Any], float] | None = None,
        recompute: bool = False,
        optimizer: Callable[[list[Tensor]], Optimizer] | None = None,
        vertical_sync: bool = False,
        devices: Sequence[torch.device | str] | None = None,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        data_group: dist.ProcessGroup | None = None,
    ) -> None:
        if devices is None:
            who = members("Pipeline", group)
            n_ranks, place = who.world_size, who.rank
            self._group: dist.ProcessGroup | None = who.group
            places: list[torch.device | str | None] = [device] * n_ranks
        else:
            if group is not None or not devices:
                raise ValueError(
                    "Pipeline takes devices, at least one, for several in this process, or group; not both"
                )
            n_ranks, place, self._group = len(devices), None, None
            places = list(devices)
        request = Request(
            *(model, loss, schedule, n_microbatches, stages_per_rank, split, sample, reduction, recompute, optimizer),
            *(vertical_sync, loss_weight),
        )
        self._built = build_together(request, n_ranks, place, places, Peers(self._group, data_group))
        self._mishap = Mishap(self._built.token, self._group)
        self._weight = loss_weight
        self._data_group = data_group
        self._turns = _turns(self.schedule, place)
        self._forward_turns = _turns(forward_only(self.schedule), place)
        own_device = next(iter(self._built.stages.values())).device
        self._wire = own_device
        self._place = place or 0
        messages = None if self._group is None else Messages(self._group, own_device)
        self._known: dict[tuple[int, ...], Forms] = {}  # by the situations of all ranks, see Header
        self._situations: dict[object, int] = {}
        self._fitting: set[int] = set()  # situations in which the stages of this process have run
        self._last: Header | None = None  # the agreed header of an earlier step
        self._alike: Header | None = None  # the same, if the next step is tried as a repetition of that one
        alone = place is None or n_ranks == 1
        self._bearer = None if alone or data_group is not None else bearer(self.schedule)
        losses = [stage.loss for stage in self._built.stages.values() if isinstance(stage.loss, nn.Module)]
        self._undo = Undo(nn.ModuleList([self._built.module, *losses]), own_device)
        if data_group is not None:
            broadcast_parameters(self.module, dist.get_global_rank(data_group, 0), data_group)
        share_tied_values(self._built.ties, self._group)
        self._stepped = False
        stashes: dict[int, Stash] = {}
        if self.schedule.asynchronous:
            assert optimizer is not None  # build() raises without one
            for index, stage in self._built.stages.items():
                versions = weight_versions(self.schedule, index, vertical_sync=vertical_sync)
                stashes[index] = Stash(stage.layers, optimizer, versions)
        sync = None if data_group is None else self._sync
        self._passes = Passes(self.schedule.n_stages, self._built.stages, messages, stashes, sync, self._mishap)
        exchanged = [copy for tie in self._built.ties for copy in tie.copies.values()]
        if data_group is not None or self.schedule.asynchronous:
            exchanged = list(self.module.parameters())
        self._made = Made(self.module, exchanged)

    @property
    def schedule(self) -> Schedule:
        """Return the grid that every step follows; ``print`` shows it."""
        return self._built.schedule

    @property
    def module(self) -> nn.Module:
        """Return the layers of this process, under their names in the model: for optimizers and checkpoints."""
        return self._built.module

    @property
    def stages(self) -> list[list[str]]:
        """Return the names of the layers of every stage, of all ranks."""
        return self._built.names

    def step(self, inputs: Any = None, targets: Any = None, *, keep_outputs: bool = True) -> Result:
        """Run forward and backward passes of one batch; add gradients to ``grad`` of the parameters of ``module``.

        With ``"pipedream"`` every micro-batch also takes a step of the optimizers, and the pipeline is empty again at
        the end: give it many micro-batches. The loss is then the mean over micro-batches, each before its own step.

        Args:
            inputs: a tensor, or a tuple of tensors, with samples as first dimension; on the process with stage 0. If
                the inputs have a graph, gradients flow back into it at the end of the step.
            targets: the same, on the process with the last stage.
            keep_outputs: False does not keep or join the outputs.

        Returns:
            Loss and outputs on the process with the last stage.

        Raises:
            ValueError: there are fewer samples than micro-batches, unequal numbers of inputs and targets, or stages
                that do not fit each other; the loss is missing or not one number; a weight is negative or not finite.
                Or ``module`` was changed after the pipeline was made: a layer or a parameter was replaced, or has
                another shape or device; or a parameter was cast or frozen although its gradient goes to other ranks or
                to an optimizer of the pipeline. The same on every rank, before any gradient is changed.
            Exception: the error of a layer or the loss in the middle of a step, on its rank alone, with a note of the
                pass. Let it end the process: ranks that wait for this one then raise a RuntimeError that repeats it.
        """
        return self._take(inputs, targets, keep_outputs=keep_outputs, backward=True)

    def infer(self, inputs: Any = None, targets: Any = None) -> Result:
        """Run forward passes only, without gradients; compute the loss too if there are targets.

        Layers are in the mode that ``module.train()`` or ``module.eval()`` has set.

        Args:
            inputs: as in :meth:`step`.
            targets: as in :meth:`step`; may be None.

        Returns:
            Loss and outputs on the process with the last stage.
        """
        return self._take(inputs, targets, keep_outputs=True, backward=False)

    def _take(self, inputs: Any, targets: Any, *, keep_outputs: bool, backward: bool) -> Result:
        work, header, error = self._prepare(inputs, targets, keep_outputs, backward)
        try:
            self._carry_out(work, header, error)
        except Exception as failure:
            for stage in self._built.stages.values():
                stage.clear()
            behind = self._mishap.behind(failure)
            if behind is not None:
                raise behind from failure
            raise
        self._stepped = self._stepped or work.backward
        used = [(source, leaf.grad) for source, leaf in work.sources if leaf.grad is not None]
        if used:
            torch.autograd.backward([source for source, _ in used], [grad for _, grad in used])
        return self._result(work)

    def _carry_out(self, work: Work, header: Header, error: Exception | None) -> None:
        """Run the passes of a step, and combine its gradients with those of other ranks."""
        alike = self._alike
        is_alike = alike is not None and header.is_like(alike, self._place)
        self._undo.note(everything=not is_alike)
        if alike is not None and not is_alike:
            self._try(work, alike, raised=True)
            alike = None
        if error is not None:
            # This raises, before the code below touches gradients, which may not fit.
            self._settle(Agreement(header, self._group, self._wire), work, error)
        eager = header.situation in self._fitting
        if not work.backward:
            agreement = Agreement(header, self._group, self._wire)
            self._passes.run(self._forward_turns, work, partial(self._settle, agreement, work, None), eager=eager)
            return
        with self._set_aside():
            if alike is None or not self._try(work, alike):
                agreement = Agreement(header, self._group, self._wire)
                settle = partial(self._settle, agreement, work, None)
                weight = self._passes.run(self._turns, work, settle, eager=eager)
                if not self.schedule.asynchronous:
                    self._sync(self.module, weight)
            sum_tied_gradients(self._built.ties, self._group)
        self._undo.learn()

    def _try(self, work: Work, alike: Header, *, raised: bool = False) -> bool:
        """Take the step without a header, as ``alike``. If a rank raises the alarm, undo it and return False."""
        assert self._bearer is not None
        assert alike.n_samples is not None
        work.alarm = Alarm(self._bearer, raised)
        work.samples, work.forms = self._sizes(alike.n_samples), self._known[alike.situations]
        self._passes.run(self._turns, work, lambda: 0.0)
        if not work.alarm.raised:
            return True
        self._alike = None
        self._forget()
        work.alarm, work.samples, work.forms = Alarm(), [], {}
        return False

    def _forget(self) -> None:
        """Restore the state before the step."""
        for stage in self._built.stages.values():
            stage.clear()
        self._undo.go_back()

    def _settle(self, agreement: Agreement, work: Work, problem: Exception | None) -> float:
        """Exchange facts with the other ranks; raise if any rank has an error; return the weight of the batch."""
        met = agreement.settle()
        data_group = self._data_group if any(met.backwards) else None  # only then other pipelines wait for this one
        if not met.failed:
            try:
                _require_one_call(met.backwards)
                self._learn(work, met)
            except ValueError as found:  # raised on all ranks of this pipeline
                problem = found
        failed = met.failed or problem is not None
        if data_group is not None:
            own = Header(failed=failed, weights=met.weights)
            everywhere = Agreement(own, data_group, self._wire).settle()
            failed = everywhere.failed
            adds = self._built.reduction == "sum"
            work.weights, work.counts = met.weights, [adds or weight > 0 for weight in everywhere.weights]
        if failed:
            self._forget()
            self._raise_everywhere(problem, met, data_group)
        if work.backward and self._bearer is not None:
            now = replace(met, weight=None, weights=())
            self._alike = now if self._last in (None, now) else None  # a header that just changed may change again
            self._last = now
        return met.weight or 0.0

    def _prepare(
        self, inputs: Any, targets: Any, keep_outputs: bool, backward: bool
    ) -> tuple[Work, Header, Exception | None]:
        """Return the work, the header and the error of this process, before any exchange with the other ranks."""
        count, stages, last = self.schedule.n_microbatches, self._built.stages, self.schedule.n_stages - 1
        work = Work([], isinstance(inputs, tuple | list), [None] * count, [1.0] * count, backward, keep_outputs)
        n_samples = weight = None
        asked = self.schedule.asynchronous and self._data_group is not None
        weights = (-1.0,) * count if asked else ()
        own: dict[str, Form] = {}
        modes = self._undo.look()
        try:
            if backward and torch.is_inference_mode_enabled():
                raise ValueError(
                    "Pipeline.step makes no gradients in torch.inference_mode; call it outside, or infer instead"
                )
            change = self._made.change(backward)
            if change is not None:
                raise ValueError(change)
            if backward and last in stages and self._stepped and not stages[last].reached:
                raise ValueError(
                    "Pipeline got a loss without a gradient in the step before, so that no parameter got one; return a "
                    "loss that depends on parameters by operations that have gradients, not by argmax or item()"
                )
            if 0 in stages:
                n_samples = require_batch("inputs", inputs, count)
                own["inputs"] = form_of_batch(inputs)
                parts = micro_batches(leaves_of(inputs, work.sources) if backward else inputs, count)
                work.parts = [tuple(part) if work.packed else (part,) for part in parts]
            if last in stages:
                if (backward or targets is not None) and self._built.stages[last].loss is None:
                    raise ValueError("Pipeline needs a loss for this: give it one, or call infer without targets")
                if backward or targets is not None:
                    found = require_batch("targets", targets, count)
                    if n_samples not in (None, found):
                        raise ValueError(_unequal(n_samples, found))
                    n_samples = found
                    own["targets"] = form_of_batch(targets)
                    work.targets = micro_batches(leaves_of(targets, work.sources) if backward else targets, count)
                    found_weights = self._weigh(work)
                    weight, weights = sum(found_weights), tuple(found_weights) if asked else ()
        except Exception as error:  # any kind of error, because the other ranks wait for this rank's header
            return work, Header(failed=True, weights=weights, backward=backward), error
        return work, Header(n_samples, weight, weights, self._situation(own, modes), backward), None

    def _weigh(self, work: Work) -> list[float]:
        """Set each micro-batch's share in the loss; return its weight beside the micro-batches of other batches."""
        loss = self._built.stages[self.schedule.n_stages - 1].loss
        count_of = self._weight or (lambda part: counted(loss, part))
        try:
            weights = [float(count_of(part)) for part in work.targets]
        except Exception as error:  # any error of the user's function is sent to all ranks
            raise ValueError(
                f"Pipeline needs a number from loss_weight, and got {type(error).__name__}: {error}"
            ) from error
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
            raise ValueError(
                f"Pipeline got the weights {weights} from loss_weight; "
                "return how many targets count, a finite number that is not negative"
            )
        total = sum(weights)
        if not total > 0:
            raise ValueError(f"Pipeline needs a batch that counts, its micro-batches have the weights {weights}")
        if self._built.reduction == "mean":
            work.shares = [weight / total for weight in weights]
        return weights

    def _raise_everywhere(self, error: Exception | None, met: Header, data_group: dist.ProcessGroup | None) -> None:
        found = exchange(None, error, self._group).first_error
        if found is None and met.differ is not None:
            found = ValueError(_unequal(*met.differ))
        if data_group is not None:
            found = exchange(None, found, data_group).first_error
        assert found is not None  # a header reported an error
        raise found from error

    def _situation(self, own: Mapping[str, Form], modes: bytes) -> int:
        """Return a number for the facts that decide the forms of messages, as far as this process has them."""
        kind = self._wire.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        mode = modes, self._made.dtypes, autocast
        return self._situations.setdefault((mode, *own.items()), len(self._situations))

    def _sizes(self, n_samples: int) -> list[int]:
        count = self.schedule.n_microbatches
        return [n_samples // count + (number < n_samples % count) for number in range(count)]

    def _learn(self, work: Work, met: Header) -> None:
        """Find the forms of messages, or reuse known ones. All ranks do the same."""
        assert met.n_samples is not None  # the process with stage 0 has sent it
        work.samples = self._sizes(met.n_samples)
        if met.situations not in self._known:
            of_size = {size: number for number, size in enumerate(work.samples)}
            first = {size: form_of(work.parts[n], work.packed) for size, n in of_size.items() if work.parts}
            targets = {size: work.targets[number] for size, number in of_size.items()}
            stages, unsaid = self._built.stages, self._built.unsaid
            forms = find_forms(stages, self.schedule, first, targets, self._group, unsaid=unsaid)
            self._known[met.situations] = forms
            self._fitting.add(met.situations[self._place])
        work.forms = self._known[met.situations]

    def _sync(self, module: nn.Module, weight: float) -> None:
        """Average gradients over pipelines that process other samples, or add them."""
        if self._data_group is None or not any(p.requires_grad for p in module.parameters()):
            return
        if self._built.reduction == "mean":
            sync_gradients(module, weight=weight, group=self._data_group)
        else:
            sync_gradients(module, reduction="sum", group=self._data_group)

    @contextmanager
    def _set_aside(self) -> Iterator[None]:
        """Keep gradients from before the step out of the reduction over ranks, which has counted them already."""
        before: list[tuple[nn.Parameter, Tensor]] = []
        if self._data_group is not None or self._built.ties:
            before = [(p, p.grad) for p in self.module.parameters() if p.grad is not None]
        for parameter, _ in before:
            parameter.grad = None
        done = False
        try:
            yield
            done = True
        finally:
            for parameter, grad in before:
                parameter.grad = grad + parameter.grad if done and parameter.grad is not None else grad

    def _result(self, work: Work) -> Result:
        stage = self._built.stages.get(self.schedule.n_stages - 1)
        if stage is None:
            return Result(None, None)
        loss = None
        if stage.losses:
            counted = [stage.losses[number] * share for number, share in enumerate(work.shares) if share]
            loss = torch.stack(counted).sum()
        outputs = concatenated(stage.outputs) if stage.outputs else None
        for one in self._built.stages.values():
            one.clear()
        return Result(loss, outputs)


def _turns(schedule: Schedule, place: int | None) -> list[Turn]:
    """Return the turns of one rank; those of all ranks, step by step, if they are one process."""
    if place is not None:
        return program(schedule, place)
    return [Turn(cell, None, ()) for _, _, cell in schedule]


def _require_one_call(backwards: Sequence[bool]) -> None:
    """Raise ValueError if some ranks called step, which goes backward, and others infer."""
    ranks = [[str(rank) for rank, one in enumerate(backwards) if one == called] for called in (True, False)]
    if all(ranks):
        step, infer = map(", ".join, ranks)
        raise ValueError(
            f"Pipeline.step was called on rank {step} of its group and infer on rank {infer}; call the same on all"
        )


def _unequal(n_inputs: int | None, n_targets: int | None) -> str:
    return f"Pipeline needs a target for every input, got batches of {n_inputs} and {n_targets} samples"
