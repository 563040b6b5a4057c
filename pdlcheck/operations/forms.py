"""The argument forms that the methods of a process group accept.

torch's functions pass lists of tensors and an object with the options. Direct callers of a group's method may pass one
tensor, and the reduce-op, the root and the time limit as separate arguments, by position or by name. torch's own
groups, which are written in C++, try the forms of a method in turn, and a watched group does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import index
from typing import Any

from torch import Tensor

from pdlcheck.uncompiled import uncompiled

__all__ = [
    "FLAT",
    "LIMIT",
    "OP",
    "OPTIONS",
    "ROOT",
    "ROOT_OP",
    "Form",
    "Forms",
    "list_of_one",
    "list_of_tensors",
    "lists_of_one",
    "lists_of_tensors",
    "numbers",
    "row_counts",
    "tensor",
]

_Convert = Callable[[Any], Any]  # converts an argument to the form with options; raises TypeError
Form = dict[str, _Convert | None]  # the arguments of a call, in order; None: it belongs to the options
_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
_MAY_BE_NONE = ("opts", "timeout")
_MAY_BE_LEFT_OUT = ("op", "opts", "timeout")


@uncompiled
class Forms:
    """The argument forms of one method.

    Args:
        name: the name of the method.
        options: the class of its options.
        forms: the forms that it accepts, in the order of trial; torch's functions use the first.
    """

    def __init__(self, name: str, options: type, *forms: Form) -> None:
        self._name = name
        self._options = options
        first = [convert for convert in forms[0].values() if convert is not None]
        self._usual = [*(Tensor if convert is tensor else list for convert in first), options]
        self._forms = forms

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the arguments of a call in the first form, with options.

        Raises:
            TypeError: the arguments fit no form.
        """
        if not kwargs and [*map(type, args)] == self._usual:
            return args
        for form in self._forms:
            try:
                return self._in_form(form, args, kwargs)
            except TypeError:
                continue
        got = [type(value).__name__ for value in args]
        got += [f"{name}={type(value).__name__}" for name, value in kwargs.items()]
        takes = " or ".join(f"({', '.join(form)})" for form in self._forms)
        raise TypeError(f"{self._name}(): incompatible function arguments: it takes {takes}, got ({', '.join(got)})")

    def _in_form(self, form: Form, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        given: dict[str, Any] = {**dict(zip(form, args, strict=False)), **kwargs}
        if len(given) < len(args) + len(kwargs) or not given.keys() <= form.keys():
            raise TypeError("too many, or one that the form has not")
        options = given.get("opts") or self._options()
        if type(options) is not self._options:
            raise TypeError("options of another call")
        tensors = []
        for name, convert in form.items():
            if name not in given:
                if name not in _MAY_BE_LEFT_OUT:
                    raise TypeError("one that is needed is missing")
            elif convert is not None:
                tensors.append(convert(given[name]))
            elif name in _FIELDS and (given[name] is not None or name not in _MAY_BE_NONE):
                setattr(options, _FIELDS[name], given[name])  # the options raise TypeError themselves
        return [*tensors, options]


def numbers(splits: Iterable[Any]) -> list[int]:
    """Return the rows for each rank as a list; accept any sequence of integers except a tensor, as torch does."""
    if isinstance(splits, Tensor):
        raise TypeError("split sizes are a list of integers, not a tensor; call .tolist()")
    return [index(rows) for rows in splits]


def tensor(value: Any) -> Tensor:
    """Return a tensor; raise ``TypeError`` for anything else."""
    if not isinstance(value, Tensor):
        raise TypeError
    return value


def list_of_tensors(value: Any) -> list[Tensor]:
    """Return a sequence of tensors as a list."""
    if isinstance(value, Tensor):
        raise TypeError
    return [tensor(one) for one in value]


def list_of_one(value: Any) -> list[Tensor]:
    """Return a list with one tensor."""
    return [tensor(value)]


def lists_of_tensors(value: Any) -> list[list[Tensor]]:
    """Return a sequence of sequences of tensors as lists."""
    return [list_of_tensors(one) for one in value]


def lists_of_one(value: Any) -> list[list[Tensor]]:
    """Return a list with the tensors of a root; empty on other ranks, which have none."""
    return [tensors] if (tensors := list_of_tensors(value)) else []


def row_counts(value: Any) -> Any:
    """Return split sizes; raise ``TypeError`` for a value that is no sequence."""
    if not hasattr(value, "__iter__"):
        raise TypeError
    return value


OPTIONS: Form = {"opts": None}
LIMIT: Form = {"timeout": None}
OP: Form = {"op": None, "timeout": None}
ROOT: Form = {"root": None, "timeout": None}
ROOT_OP: Form = {"root": None, "op": None, "timeout": None}
FLAT: Form = {"output": tensor, "input": tensor}
