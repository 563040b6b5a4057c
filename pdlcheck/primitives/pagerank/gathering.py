# mypy: disable-error-code="no-untyped-call"
"""The sums and the new scores of sixteen rows at a time, as LLVM code that numba does not generate itself.

A row sum of a sparse matrix reads one number per entry, from a random address. Processors have an instruction that
reads sixteen such addresses at once, but numba's vectoriser never uses it. So these loops are written directly for
LLVM. If a processor lacks the instruction, LLVM replaces it by sixteen loads.

Source: sliced ELLPACK, Monakov, Lokhmotov and Avetisyan, "Automatically tuning sparse matrix-vector multiplication for
GPU architectures", HiPEAC 2010.
"""

from __future__ import annotations

import sys
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "FIRST_COUNTER",
    "GIVEN_UP",
    "LANES",
    "NUM_SUMS",
    "add_gathered",
    "add_rows",
    "meet",
    "move",
    "take_next",
    "update_rows",
]

LANES = 16
GIVEN_UP, FIRST_COUNTER = 1, 2  # indices of counters; those before FIRST_COUNTER belong to meet
NUM_SUMS = 6  # the sums of update_rows

_FLOAT, _DOUBLE = ir.FloatType(), ir.DoubleType()
_BIT, _INT32, _INT64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)

_GIVE_WAY = "SwitchToThread" if sys.platform == "win32" else "sched_yield"


def _add_gathered(
    typing_context: Any, values: Any, places: Any, shares: Any, begin: Any, end: Any, sums: Any
) -> tuple[Any, Any]:
    """Generate the sums of gathered values, one for each of LANES lanes.

    ``sums[l] = sum(shares[e] * values[places[e]] for e in range(begin + l, end, LANES))`` for each lane ``l``.
    ``values`` are float32 or float64, ``places`` int32 or int64, ``shares`` float64 or None, which means 1. ``sums``
    holds LANES float64. The terms of a lane are added in order, in float64.
    """
    signature = types.void(values, places, shares, types.intp, types.intp, sums)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, places, sums = (_Array(context, builder, signature.args[i], args[i]) for i in (0, 1, 5))
        weighted = signature.args[2] is not types.none
        total = cgutils.alloca_once_value(builder, _constant(_DOUBLE, 0.0))
        gather = _gather(builder.module, values.kind)
        arguments = (
            ir.Constant(_INT32, values.nbytes),
            _constant(_BIT, 1),
            _constant(values.kind, 0.0),
        )
        with cgutils.for_range_slice(builder, args[3], args[4], ir.Constant(_INT64, LANES)) as (at, _):
            where = builder.gep(values.data, [places.load(at)], source_etype=values.kind)
            where.type = _vector(values.kind.as_pointer())  # llvmlite gives it the type of the base, a single pointer
            found = _widened(builder, builder.call(gather, [where, *arguments]))
            if weighted:
                shares = _Array(context, builder, signature.args[2], args[2])
                found = builder.fmul(found, shares.load(at))
            builder.store(builder.fadd(builder.load(total), found), total)
        sums.store(ir.Constant(_INT64, 0), builder.load(total))
        return context.get_dummy_value()

    return signature, generate


def _add_rows(
    typing_context: Any, values: Any, places: Any, shares: Any, begin: Any, end: Any, apart: Any, sums: Any
) -> tuple[Any, Any]:
    """Generate the same sum for one row of LANES vectors; ``values`` holds LANES adjacent numbers for each place.

    ``sums[l] = sum(shares[e] * values[places[e] * LANES + l] for e in range(begin, end, apart))``.
    """
    signature = types.void(values, places, shares, types.intp, types.intp, types.intp, sums)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, places, sums = (_Array(context, builder, signature.args[i], args[i]) for i in (0, 1, 6))
        weighted = signature.args[2] is not types.none
        total = cgutils.alloca_once_value(builder, _constant(_DOUBLE, 0.0))
        with cgutils.for_range_slice(builder, args[3], args[4], args[5]) as (at, _):
            place = builder.mul(places.load_one(at), ir.Constant(_INT64, LANES))
            found = values.load(place)
            if weighted:
                shares = _Array(context, builder, signature.args[2], args[2])
                found = builder.fmul(found, _splat(builder, shares.load_one(at)))
            builder.store(builder.fadd(builder.load(total), found), total)
        sums.store(ir.Constant(_INT64, 0), builder.load(total))
        return context.get_dummy_value()

    return signature, generate


def _update_rows(
    typing_context: Any,
    arrived: Any,
    weight: Any,
    keep: Any,
    to_base: Any,
    to_landing: Any,
    base: Any,
    landing: Any,
    out: Any,
    leaving: Any,
    sent: Any,
    before: Any,
    scores: Any,
    stores: Any,
    row: Any,
    fresh: Any,
    place: Any,
    sums: Any,
) -> tuple[Any, Any]:
    """Generate the new scores of the LANES rows that begin at ``row``, and the values that they will send.

    The new value is ``value = keep * arrived + to_base * base + to_landing * landing``, less ``before`` if that is not
    None. It goes to ``scores`` if ``stores`` is true. ``value * out`` goes to ``fresh``, from ``place`` on. For a
    dangling row, which no row reads, ``fresh`` gets the value itself.

    The code adds to the NUM_SUMS lanes of ``sums``: the L1 step; the value of dangling rows, which have ``out`` 0;
    ``value * leaving`` if that is not None; the value; the absolute value; and ``weight`` times the absolute value
    before ``before`` was subtracted. The step is measured against the value that was really sent, with its rounding,
    and only where something is sent: ``abs(value * out - sent) / out``. With ``before`` it is the absolute value.

    For one row of LANES vectors, ``row`` and ``place`` are LANES times those of the row. ``out`` and ``leaving`` are
    the numbers of the row. ``to_base`` and ``to_landing`` are arrays with one number per vector.
    """
    number = types.float64
    factors = number, number, to_base, to_landing
    vectors = base, landing, out, leaving, sent, before, scores
    signature = types.void(arrived, *factors, *vectors, types.boolean, types.intp, fresh, types.intp, sums)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        arrived, base, landing, sent, scores, fresh, sums = (
            _Array(context, builder, signature.args[i], args[i]) for i in (0, 5, 6, 9, 11, 14, 16)
        )
        first = ir.Constant(_INT64, 0)

        def each(i: int, at: Any) -> Any:
            if signature.args[i] == types.float64:
                return _splat(builder, args[i])
            return _Array(context, builder, signature.args[i], args[i]).load(at)

        is_change = signature.args[10] is not types.none
        weight, keep, to_base, to_landing = (each(i, first) for i in range(1, 5))
        row, place, zero = args[13], args[15], _constant(_DOUBLE, 0.0)
        absolute = _function(builder.module, f"llvm.fabs.v{LANES}f64", _vector(_DOUBLE), [_vector(_DOUBLE)])
        value = builder.fmul(keep, arrived.load(first))
        value = builder.fadd(value, builder.fmul(to_base, base.load(row)))
        value = builder.fadd(value, builder.fmul(to_landing, landing.load(row)))
        weighted = builder.fmul(weight, builder.call(absolute, [value]))
        if is_change:
            before = _Array(context, builder, signature.args[10], args[10])
            value = builder.fsub(value, before.load(row))
        shared = each(7, row)
        dangling = builder.fcmp_ordered("==", shared, zero)
        sending = builder.select(dangling, value, builder.fmul(value, shared))
        size = builder.call(absolute, [value])
        step = size
        if not is_change:
            change = builder.call(absolute, [builder.fsub(sending, sent.load(row))])
            step = builder.select(dangling, zero, builder.fdiv(change, shared))
        lost = builder.select(dangling, value, zero)
        left = None if signature.args[8] is types.none else builder.fmul(value, each(8, row))
        for number, term in enumerate((step, lost, left, value, size, weighted)):
            if term is None:
                continue
            at = ir.Constant(_INT64, number * LANES)
            sums.store(at, builder.fadd(sums.load(at), term))
        with builder.if_then(args[12]):
            scores.store(row, value)
        fresh.store(place, sending)
        return context.get_dummy_value()

    return signature, generate


def _move(typing_context: Any, source: Any, first: Any, target: Any, at: Any) -> tuple[Any, Any]:
    """Generate ``target[at : at + LANES] = source[first : first + LANES]``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, target = (_Array(context, builder, signature.args[i], args[i]) for i in (0, 2))
        target.store(args[3], source.load(args[1]))
        return context.get_dummy_value()

    return types.void(source, types.intp, target, types.intp), generate


def _take_next(typing_context: Any, counters: Any, which: Any) -> tuple[Any, Any]:
    """Generate the value of ``counters[which]``, an int64, and atomically add 1 to it for the next thread."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counters = _Array(context, builder, signature.args[0], args[0])
        return builder.atomic_rmw("add", counters.place(args[1]), ir.Constant(_INT64, 1), "seq_cst")

    return types.int64(counters, types.intp), generate


def _meet(typing_context: Any, counters: Any, size: Any) -> tuple[Any, Any]:
    """Generate a wait until ``size`` threads have arrived, this one included, or ``counters[GIVEN_UP]`` is not 0.

    ``counters[0]``, 0 at first, counts the arrivals, so threads may meet any number of times.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counts = _Array(context, builder, signature.args[0], args[0])
        arrived, given_up = (counts.place(ir.Constant(_INT64, i)) for i in (0, GIVEN_UP))
        none, one = ir.Constant(_INT64, 0), ir.Constant(_INT64, 1)
        before = builder.atomic_rmw("add", arrived, one, "seq_cst")
        everyone = builder.mul(builder.add(builder.sdiv(before, args[1]), one), args[1])
        look, wait, met = (builder.append_basic_block(f"meet.{name}") for name in ("look", "wait", "met"))
        builder.branch(look)
        builder.position_at_end(look)
        here = builder.icmp_signed(">=", builder.atomic_rmw("add", arrived, none, "seq_cst"), everyone)
        end = builder.icmp_signed("!=", builder.atomic_rmw("add", given_up, none, "seq_cst"), none)
        builder.cbranch(builder.or_(here, end), met, wait)
        builder.position_at_end(wait)
        # another thread may need this one's core
        builder.call(_function(builder.module, _GIVE_WAY, _INT32, []), [])
        builder.branch(look)
        builder.position_at_end(met)
        return context.get_dummy_value()

    return types.void(counters, types.intp), generate


add_gathered: Any = intrinsic(_add_gathered)
add_rows: Any = intrinsic(_add_rows)
update_rows: Any = intrinsic(_update_rows)
take_next: Any = intrinsic(_take_next)
meet: Any = intrinsic(_meet)
move: Any = intrinsic(_move)


class _Array:
    """An array argument, read and written LANES numbers at a time; the caller sees floats as float64."""

    def __init__(self, context: Any, builder: Any, array_type: Any, value: Any) -> None:
        kinds = {types.float32: _FLOAT, types.float64: _DOUBLE, types.int32: _INT32, types.int64: _INT64}
        self.data = context.make_array(array_type)(context, builder, value).data
        self.kind = kinds[array_type.dtype]
        self.nbytes = array_type.dtype.bitwidth // 8
        self._builder = builder

    def load(self, at: Any) -> Any:
        found = self._builder.load(self._pointer(at), align=self.nbytes, typ=_vector(self.kind))
        return _widened(self._builder, found)

    def load_one(self, at: Any) -> Any:
        found = self._builder.load(self.place(at), typ=self.kind)
        return self._builder.sext(found, _INT64) if self.kind is _INT32 else found

    def store(self, at: Any, values: Any) -> None:
        if self.kind is _FLOAT:
            values = self._builder.fptrunc(values, _vector(_FLOAT))
        self._builder.store(values, self._pointer(at), align=self.nbytes)

    def place(self, at: Any) -> Any:
        return self._builder.gep(self.data, [at], source_etype=self.kind)

    def _pointer(self, at: Any) -> Any:
        return self._builder.bitcast(self.place(at), _vector(self.kind).as_pointer())


def _vector(kind: Any) -> Any:
    return ir.VectorType(kind, LANES)


def _constant(kind: Any, value: float) -> Any:
    return ir.Constant(_vector(kind), [value] * LANES)


def _widened(builder: Any, values: Any) -> Any:
    return builder.fpext(values, _vector(_DOUBLE)) if values.type == _vector(_FLOAT) else values


def _splat(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(_vector(value.type), ir.Undefined)
    one = builder.insert_element(undefined, value, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(one, undefined, _constant(_INT32, 0))


def _gather(module: Any, kind: Any) -> Any:
    short = "f32" if kind is _FLOAT else "f64"
    pointer = "p0" if binding.llvm_version_info[0] >= 17 else f"p0{short}"  # pointers had types before LLVM 17
    arguments = [_vector(kind.as_pointer()), _INT32, _vector(_BIT), _vector(kind)]
    return _function(module, f"llvm.masked.gather.v{LANES}{short}.v{LANES}{pointer}", _vector(kind), arguments)


def _function(module: Any, name: str, returned: Any, arguments: list[Any]) -> Any:
    return module.globals.get(name) or ir.Function(module, ir.FunctionType(returned, arguments), name)
