"""The methods of a process group that post operations, and the group as these methods see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch import Tensor

from pdlcheck.operations.forms import Forms
from pdlcheck.operations.operation import Operation, Part

if TYPE_CHECKING:
    from pdlcheck.operations.kind import OperationKind

__all__ = ["Group", "Method", "Post", "Refuse"]


class Group(Protocol):
    """A process group that takes operations."""

    def name(self) -> str:
        """Return the name of the backend."""

    def rank(self) -> int:
        """Return this rank's number in the group."""

    def size(self) -> int:
        """Return the number of ranks in the group."""

    def post_collective(
        self,
        method: Method,
        parts: Sequence[Part],
        args: tuple[Any, ...],
        *,
        compare: Sequence[Tensor] = (),
        reduce_op: Any = None,
        root: int | None = None,
        splits: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    ) -> dist.Work:
        """Post a collective.

        Args:
            method: the method that was called.
            parts: its tensors.
            args: the arguments of the call; the last one holds the options.
            compare: the tensors whose shapes and dtypes must agree between the ranks.
            reduce_op: the reduce-op, if it reduces.
            root: the number of the root in the group, if it has one.
            splits: the number of elements to each member and from each member.
        """

    def post_message(
        self, method: Method, tensor: Tensor, peer: int | None, tag: int, args: tuple[Any, ...]
    ) -> dist.Work:
        """Post a message: a send to ``peer``, or a receive from it; None means any rank."""


Post = Callable[[Any, "Method", Any], dist.Work]  # (group, method, arguments in the first form)
Refuse = Callable[[Operation], None]  # raises if the operation must not be made


@dataclass(eq=False)
class Method:
    """One method of a process group.

    A method that torch has renamed has two objects, one for each name.

    Args:
        name: the name of the method.
        forms: the argument forms that it accepts.
        post: makes the parts of the operation and posts it.
        function: the method itself, in place of ``forms`` and ``post``, if its arguments have one form.
        copies: torch copies the results into the outputs as a user would, so that autograd detects the change. In
            other operations torch writes to the memory itself.
        check: raises for tensors that no backend combines as a user expects.
        check_on_gloo: raises for tensors that gloo refuses.
        check_grad_on_gloo: raises for outputs to which gloo must not write, because they require grad.
        dispatcher_op: the op of torch's dispatcher that the method calls, for torch's ``CommDebugMode``; default: the
            name with a final ``_``.
    """

    name: str
    forms: Forms | None = None
    post: Post | None = None
    function: Callable[..., Any] | None = None
    copies: bool = False
    check: Refuse | None = None
    check_on_gloo: Refuse | None = None
    check_grad_on_gloo: Refuse | None = None
    dispatcher_op: str = ""
    kind: OperationKind = field(init=False)  # set by the kind that the method belongs to

    def __post_init__(self) -> None:
        self.dispatcher_op = self.dispatcher_op or f"{self.name}_"

    def of_class(self) -> Callable[..., Any]:
        """Return the function that a class of groups has under this name."""
        if self.function is not None:
            return self.function
        assert self.forms is not None
        assert self.post is not None
        in_first_form, post = self.forms.of, self.post

        def call(group: Any, *args: Any, **kwargs: Any) -> dist.Work:
            return post(group, self, in_first_form(args, kwargs))

        call.__name__ = self.name
        call.__doc__ = f"Post ``{self.kind.name}``."
        return call
