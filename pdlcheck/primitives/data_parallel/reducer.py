"""The reduction of gradients to means over ranks, during the backward pass.

A hook of each parameter records that its gradient is final. The hook of the parameter that is expected last in its
bucket starts the reduction. Hooks cost time in each step, so all other hooks are a plain ``deque.append``.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from pdlcheck.compat.torch.autograd import call_after_backward
from pdlcheck.compat.torch.hooks import accumulation_hooks
from pdlcheck.primitives.arguments import Members
from pdlcheck.primitives.data_parallel.agreement import raise_together
from pdlcheck.primitives.data_parallel.assignment import assign_buckets
from pdlcheck.primitives.data_parallel.buckets import Bucket
from pdlcheck.primitives.data_parallel.hook_agreement import Registered, require_same_hook, same_hook
from pdlcheck.primitives.data_parallel.hook_answers import ask, take_answer
from pdlcheck.primitives.data_parallel.sparse_bucket import SparseBucket
from pdlcheck.primitives.outputs import parameters_behind, tensors_in
from pdlcheck.uncompiled import uncompiled

__all__ = ["Reducer"]


@uncompiled
class Reducer:
    """A reducer of the gradients of ``params`` over a group, in buckets, in the same order on every rank.

    Args:
        params: by name, in the same order on every rank; they require gradients.
        who: the ranks.
        explain: returns a description of the module's change since it was wrapped, or None.
        bucket_caps, reduce_dtype, sparse: as in :func:`assign_buckets`.
        as_view: gradients are views of the buckets after the pass.
        find_unused: parameters may stay without a gradient.
        static_graph: every pass is like the first one.
    """

    def __init__(
        self,
        params: dict[str, Parameter],
        who: Members,
        explain: Callable[[], str | None],
        *,
        bucket_caps: Sequence[int],
        reduce_dtype: torch.dtype | None,
        sparse: Collection[int],
        as_view: bool,
        find_unused: bool,
        static_graph: bool,
    ) -> None:
        self.names = {id(param): name for name, param in params.items()}
        self.params = list(params.values())
        self.who = who
        self.divisor = who.world_size
        self.authority = 0
        self.problems: list[str] = []
        self.hook: Registered = None
        self.is_rebuilt = False
        self._hook: Registered = None  # the hook of this pass
        self._has_agreed = False  # whether the ranks have compared hooks and all have the same one
        self._differs = False  # whether the ranks have compared hooks and found different ones
        self._make = partial(assign_buckets, bucket_caps=bucket_caps, reduce_dtype=reduce_dtype, sparse=sparse)
        self._explain = explain
        self._as_view, self._find_unused, self.static_graph = as_view, find_unused, static_graph
        self._fires: Counter[int] | None = None  # how often a parameter fires in a pass of a static graph
        self._reached: set[int] | None = None  # parameters that the outputs depend on, if they were looked up
        self._order: list[Parameter] = []
        self._expecting = False  # whether the next backward pass is synchronised, wherever it begins
        self._pass: Callable[[], object] = _no_pass
        self._other_pass: Callable[[], object] = _no_pass  # a pass that is not synchronised
        self._has_begun = False  # whether a pass of either kind has begun since the last forward pass
        self._next = 0
        self._handles: list[RemovableHandle] = []
        self._use(self._make(self.params[::-1]))

    def prepare(self) -> None:
        """Begin a forward pass: discard the records of backward passes that were not synchronised."""
        if self._pass() is None:
            self._require_synchronised()
            self._expecting = self._has_begun = False
            for bucket in self.buckets:
                bucket.ready.clear()
            self._order.clear()

    def expect(self, output: object, owner: object) -> bool:
        """Synchronise the backward pass through ``output``. Return False if ``output`` holds no tensor with a graph.

        The graph keeps ``owner`` alive; the hooks are removed at the end of ``owner``. A backward pass may reach no
        hook of an output, for example after the output was modified in place. Then the pass begins with the first
        parameter that fires.
        """
        tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if self._find_unused and not self.static_graph:
            self._reached = (self._reached or set()) | parameters_behind(tensors)
        begins = [tensor for tensor in tensors if tensor.grad_fn is not None]
        for tensor in begins:
            tensor.register_hook(partial(self._begin, owner))  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._expecting = True
        return bool(begins)

    def leave_alone(self, output: object) -> None:
        """Do not synchronise the backward pass through ``output``."""
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._leave_alone)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def shadow(self) -> None:
        """Take part in the reductions of one backward pass of the other ranks, without gradients of this rank."""
        self.prepare()
        self._start()
        self._finish(joined=True)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # -- hooks ------------------------------------------------------------------------------------

    def _use(self, buckets: list[Bucket]) -> None:
        """Use these buckets, and register the hooks that serve them on the parameters."""
        self.close()
        self.buckets = buckets
        self._tables: list[dict[int, object]] = []  # hooks of the parameters whose reducer hook may launch or take
        self._own: list[int] = []
        for bucket in buckets:
            last = bucket.params[-1]
            for place, param in enumerate(bucket.params):
                if not self.is_rebuilt:
                    hook: Callable[[Parameter], None] = partial(self._note_order, bucket)
                elif bucket.is_large[place]:
                    hook = partial(self._take, bucket, place)
                elif param is last or self._find_unused:
                    hook = partial(self._note, bucket)
                else:
                    hook = bucket.ready.append
                register: Any = param.register_post_accumulate_grad_hook  # torch leaves it untyped
                handle = register(hook)
                self._handles.append(handle)
                if hook != bucket.ready.append:
                    self._tables.append(accumulation_hooks(param))
                    self._own.append(handle.id)

    def _note_order(self, bucket: Bucket, param: Parameter) -> None:
        self._order.append(param)
        self._note(bucket, param)

    def _note(self, bucket: Bucket, param: Parameter) -> None:
        bucket.ready.append(param)
        if self._pass() is None:
            if not self._expecting or self._other_pass() is not None:
                return
            self._begin()
        if not (self.static_graph and self._fires is None):
            self._advance()

    def _take(self, bucket: Bucket, place: int, param: Parameter) -> None:
        once = self._fires is None or self._fires[id(param)] == 1
        if once and self._pass() is not None and not self.problems and not bucket.taken[place]:
            with torch.no_grad():
                bucket.take(place, 1.0 if self._hook else 1 / self.divisor, as_view=self._as_view)
        self._note(bucket, param)

    def _begin(self, owner: object = None, grad: Tensor | None = None) -> None:
        """Begin a synchronised backward pass. The engine calls ``end`` when the pass has ended.

        Only the engine keeps that callback alive. If an error ends the pass, the callback is freed.
        """
        if self._pass() is not None:
            return

        def end() -> None:
            self._pass = _no_pass
            fired = any(bucket.ready or bucket.early for bucket in self.buckets)
            self._has_begun = fired or bool(self.problems and self._explain())
            if self._has_begun:  # otherwise the pass was torch.autograd.grad, or of a functional_call
                self._expecting = False
                self._finish()

        self._has_begun = True
        call_after_backward(end)
        self._pass = weakref.ref(end)
        self._start()

    def _leave_alone(self, grad: Tensor) -> None:
        """Begin a backward pass that is not synchronised, unless it also goes through a synchronised output."""
        self._has_begun = True
        if self._other_pass() is not None:
            return

        def end() -> None:
            self._other_pass = _no_pass

        call_after_backward(end)
        self._other_pass = weakref.ref(end)

    def _require_synchronised(self) -> None:
        """Raise RuntimeError if a backward pass since the last forward pass has ended without being synchronised."""
        fired = [param for bucket in self.buckets for param in bucket.ready]
        if not (self._expecting and fired) or self._has_begun:
            return
        quiet = [name for key, name in self.names.items() if key not in set(map(id, fired))]
        for bucket in self.buckets:
            bucket.ready.clear()
        self._expecting = False
        raise RuntimeError(
            f"DistributedDataParallel: the last backward pass gave {self.names[id(fired[0])]!r} a gradient, and was "
            f"not synchronised: it did not go through what forward returned, nor come to {quiet[-1]!r}; let forward "
            "return what the loss is made of, or pass find_unused_parameters=True"
        )

    # -- one pass ---------------------------------------------------------------------------------

    def _start(self) -> None:
        if [*map(next, map(reversed, self._tables))] != self._own:
            self._use(self.buckets)  # register again, so that hooks that may change the gradient run before these
        self._next = 0
        self._hook, self._differs = self.hook, False
        for bucket in self.buckets:
            bucket.begin()
            if self._fires is not None:
                bucket.expected = sum(self._fires[id(param)] for param in bucket.params)
            elif self._reached is not None:
                bucket.expected = sum(id(param) in self._reached for param in bucket.params)

    def _advance(self) -> None:
        """Reduce the next buckets that are complete. The last one waits until the pass has ended."""
        while self._next < len(self.buckets) - 1:
            bucket = self.buckets[self._next]
            if not bucket.is_complete(repeats=self._fires is not None):
                return
            self._launch(bucket)

    def _launch(self, bucket: Bucket, *, joined: bool = False) -> None:
        self._next += 1
        bucket.launched_at = len(bucket.ready)
        trouble = bool(self.problems)
        with torch.no_grad():
            scale = 1.0 if self._hook else 1 / self.divisor
            try:
                bucket.fill(scale, trouble=trouble, empty=joined or trouble)
            except RuntimeError:  # the shape or layout of a gradient does not fit
                change = self._explain() or self._sparse_gradient(bucket)
                if change is None:
                    raise
                self.problems = [change]
                bucket.fill(scale, trouble=True, empty=True)
            asks = self._hook is not None and not self._has_agreed
            if asks:
                self._ask_for_hooks(bucket)
            if self._hook is None and not asks:
                bucket.pending = self.who.group.allreduce([bucket.whole])
            elif self._hook is not None and not isinstance(bucket, SparseBucket):
                last = [one for one in self.buckets if not isinstance(one, SparseBucket)][-1]
                problem = ask(*self._hook, bucket, is_last=bucket is last)
                self.problems += [] if problem is None else [problem]
            bucket.reduce_beside(self.who.group, self.divisor)
            if bucket.gives_at_once(as_view=self._as_view) and not (asks and self._differs):
                bucket.give(None, as_view=True)  # assign now: the next step would be to wait

    def _sparse_gradient(self, bucket: Bucket) -> str | None:
        for param in bucket.params:
            if param.grad is not None and param.grad.layout != torch.strided:
                name = self.names[id(param)]
                return f"the gradient of {name!r} has layout {param.grad.layout}; build the embedding with sparse=False"
        return None

    def _ask_for_hooks(self, bucket: Bucket) -> None:
        """Compare the hooks of all ranks, once, in the first pass with a hook; a registered hook cannot be removed.

        The hook is used only if all ranks have it. A rank without a hook sends its first bucket at this point, so the
        question is a message of the same size.
        """
        asked, flags = bucket.question()
        self.who.group.allreduce([asked]).wait()
        self._has_agreed = not flags[-2].real.item() and same_hook(self._hook, self.who)
        self._differs = not self._has_agreed
        if self._differs:
            self._hook = None
            self.problems.append("its communication hook is not that of every other rank; register it there too")

    @torch.no_grad()
    def _finish(self, *, joined: bool = False) -> None:
        """Reduce the remaining buckets after the pass, and assign the parameters their gradients."""
        if not joined:
            self.problems += self._found_wrong()
        while self._next < len(self.buckets):
            self._launch(self.buckets[self._next], joined=joined)
        problems, self.problems = self.problems, []
        self._reached = None
        for bucket in self.buckets:
            problems += self._wait(bucket)
        if self._hook is not None:
            self._reduce_flags()
        # On devices other than CPU the host would have to wait for the flags. It does so in the first pass only.
        agrees = self._find_unused or not self.is_rebuilt or all(b.whole.device.type == "cpu" for b in self.buckets)
        trouble, differs = bool(problems), self._differs
        for bucket in self.buckets:
            used = None
            if agrees or not bucket.is_whole:
                *used, _, asked, _, troubled = bucket.tail.real.tolist()
                differs = differs or (agrees and bool(asked))
                trouble = trouble or (agrees and bool(troubled or asked))
            if not (joined or trouble or bucket.gives_at_once(as_view=self._as_view)):
                bucket.give(used, as_view=self._as_view)
            bucket.grads = []
        if trouble and agrees:
            if differs:
                require_same_hook("DistributedDataParallel", self.hook, self.who)
            raise_together("DistributedDataParallel", problems, self.who)
        elif trouble:
            raise RuntimeError(f"DistributedDataParallel: on this rank, {problems[0]}")
        if not self.is_rebuilt:
            self._rebuild()

    def _wait(self, bucket: Bucket) -> list[str]:
        """Wait for the reduction of ``bucket``; return the problems of the hook's result."""
        bucket.wait_beside()
        if bucket.pending is None:  # the hook returned no future
            return []
        pending, bucket.pending = bucket.pending, None
        value: object = pending.wait()
        problem = None if self._hook is None else take_answer(self._hook[1], bucket, value)
        return [] if problem is None else [problem]

    def _reduce_flags(self) -> None:
        """Reduce the flags of all buckets in one message, because a hook reduces gradients only."""
        tails = [bucket.tail for bucket in self.buckets]
        flags = torch.cat([tail.real.float().to(tails[0].device) for tail in tails])
        dist.all_reduce(flags, group=self.who.group)
        for tail, summed in zip(tails, torch.split(flags, [tail.numel() for tail in tails]), strict=True):
            tail.copy_(summed)

    def _found_wrong(self) -> list[str]:
        """Return the problems that make the gradients of this pass wrong, as far as this rank detects them."""
        if self.problems:
            return []
        for place, bucket in enumerate(self.buckets):
            late = list(bucket.ready)[bucket.launched_at :] if place < self._next else []
            if not self.static_graph and len(set(map(id, bucket.ready))) < len(bucket.ready):
                late += [p for p, times in Counter(bucket.ready).items() if times > 1]
            if late:
                return [
                    f"parameter {self.names[id(late[0])]!r} got a gradient after it was taken as final: it is used "
                    "several times in one backward pass, as by re-entrant checkpointing, or outside of what forward "
                    "returned; pass static_graph=True if every pass is alike"
                ]
        enough = [
            len(bucket.ready) >= (bucket.expected if self._fires else len(bucket.params)) for bucket in self.buckets
        ]
        if all(enough):
            return []
        change = self._explain()
        if change is not None:
            return [change]
        if self._find_unused or self.static_graph:
            return []
        fired = {id(param) for bucket in self.buckets for param in [*bucket.ready, *bucket.early]}
        unused = [name for key, name in self.names.items() if key not in fired]
        if not unused:
            return []
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        return [
            f"parameter {unused[0]!r}{more} got no gradient in this backward pass; pass "
            "find_unused_parameters=True, or static_graph=True if every pass is alike"
        ]

    def _rebuild(self) -> None:
        """Order the buckets as the gradients became ready in this pass on the authority, one of the ranks."""
        self.is_rebuilt = True
        places = {id(param): place for place, param in enumerate(self.params)}
        if self.static_graph:
            self._fires = Counter(id(param) for param in self._order)
        seen = [*dict.fromkeys(places[id(param)] for param in reversed(self._order))][::-1]
        left = [place for place in reversed(range(len(self.params))) if place not in set(seen)]
        order = torch.tensor([*seen, *left], device=self.params[0].device)
        dist.broadcast(order, self.who.at(self.authority), group=self.who.group)
        self._order.clear()
        self._use(self._make([self.params[place] for place in order.tolist()]))


def _no_pass() -> None:
    return None
