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
from torch.distributed import distributed_c10d as c10d

from pdlcheck.compat.torch.c10d import FLAT_ALL_GATHER, FLAT_REDUCE_SCATTER
from pdlcheck.uncompiled import uncompiled

__all__ = ["FORMS", "Forms", "numbers"]

_Convert = Callable[[Any], Any]  # converts an argument to the form with options; raises TypeError
_Form = dict[str, _Convert | None]  # the arguments of a call, in order; None: it belongs to the options
_AllgatherOptions: type = c10d.AllgatherOptions  # type: ignore[attr-defined]  # public, but not in its __all__
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

    def __init__(self, name: str, options: type, *forms: _Form) -> None:
        self._name = name
        self._options = options
        first = [convert for convert in forms[0].values() if convert is not None]
        self._usual = [*(Tensor if convert is _tensor else list for convert in first), options]
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

    def _in_form(self, form: _Form, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
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


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError
    return value


def _list(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        raise TypeError
    return [_tensor(tensor) for tensor in value]


def _list_of_one(value: Any) -> list[Tensor]:
    return [_tensor(value)]


def _lists(value: Any) -> list[list[Tensor]]:
    return [_list(tensors) for tensors in value]


def _lists_of_one(value: Any) -> list[list[Tensor]]:
    """Return a list with the tensors of a root; empty on other ranks, which have none."""
    return [tensors] if (tensors := _list(value)) else []


def _rows(value: Any) -> Any:
    if not hasattr(value, "__iter__"):
        raise TypeError
    return value


_OPTS: _Form = {"opts": None}
_LIMIT: _Form = {"timeout": None}
_OP: _Form = {"op": None, "timeout": None}
_ROOT: _Form = {"root": None, "timeout": None}
_ROOT_OP: _Form = {"root": None, "op": None, "timeout": None}
_FLAT: _Form = {"output": _tensor, "input": _tensor}
_MANY: _Form = {"outputs": _list, "inputs": _list} | _OPTS
_SPLIT: _Form = _FLAT | {"output_split_sizes": _rows, "input_split_sizes": _rows}
_GATHER: tuple[_Form, ...] = ({"output_tensors": _lists, "input_tensors": _list} | _OPTS,)
_SCATTER: tuple[_Form, ...] = ({"output_tensors": _list, "input_tensors": _lists} | _OPTS,)

_ALL: dict[str, tuple[type, tuple[_Form, ...]]] = {
    "allgather": (
        _AllgatherOptions,
        (*_GATHER, {"output_tensors": _lists_of_one, "input_tensor": _list_of_one} | _LIMIT),
    ),
    "allgather_coalesced": (_AllgatherOptions, ({"output_lists": _lists, "input_list": _list} | _OPTS,)),
    "allreduce": (
        c10d.AllreduceOptions,
        ({"tensors": _list} | _OPTS, {"tensors": _list} | _OP, {"tensor": _list_of_one} | _OP),
    ),
    "allreduce_coalesced": (c10d.AllreduceCoalescedOptions, ({"tensors": _list} | _OPTS,)),
    "alltoall": (c10d.AllToAllOptions, ({"output_tensors": _list, "input_tensors": _list} | _OPTS,)),
    "barrier": (c10d.BarrierOptions, (_OPTS, _LIMIT)),
    "broadcast": (c10d.BroadcastOptions, ({"tensors": _list} | _OPTS, {"tensor": _list_of_one} | _ROOT)),
    "gather": (
        c10d.GatherOptions,
        (*_GATHER, {"output_tensors": _lists_of_one, "input_tensor": _list_of_one} | _ROOT),
    ),
    "reduce": (
        c10d.ReduceOptions,
        ({"tensors": _list} | _OPTS, {"tensor": _list_of_one} | _ROOT_OP),
    ),
    "reduce_scatter": (
        c10d.ReduceScatterOptions,
        (*_SCATTER, {"output": _list_of_one, "input": _lists_of_one} | _OP),
    ),
    "scatter": (
        c10d.ScatterOptions,
        (*_SCATTER, {"output_tensor": _list_of_one, "input_tensors": _lists_of_one} | _ROOT),
    ),
}
_FLAT_CALLS: dict[tuple[str, str], tuple[type, tuple[_Form, ...]]] = {  # names since torch 2.13, and earlier ones
    FLAT_ALL_GATHER: (_AllgatherOptions, (_FLAT | _OPTS,)),
    ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"): (_AllgatherOptions, (_MANY,)),
    ("all_to_all_single", "alltoall_base"): (c10d.AllToAllOptions, (_SPLIT | _OPTS, _SPLIT | _LIMIT)),
    FLAT_REDUCE_SCATTER: (
        c10d.ReduceScatterOptions,
        ({"outputTensor": _tensor, "inputTensor": _tensor} | _OPTS,),
    ),
    ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"): (c10d.ReduceScatterOptions, (_MANY,)),
}
_ALL |= {name: calls for names, calls in _FLAT_CALLS.items() for name in names}
FORMS = {name: Forms(name, options, *forms) for name, (options, forms) in _ALL.items()}
