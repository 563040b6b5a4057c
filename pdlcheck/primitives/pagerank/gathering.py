# mypy: disable-error-code="no-untyped-call"
"""Sums of values at scattered places, sixteen at a time: instructions that numba has no words for.

A row sum of a sparse matrix reads one number for each entry, from anywhere. Processors have an instruction that reads
sixteen such places at once, numba's vectoriser never uses it. So these two loops are given to LLVM as they are meant;
where a processor lacks the instruction, LLVM makes sixteen loads of it.

Source: sliced ELLPACK, Monakov, Lokhmotov and Avetisyan, "Automatically tuning sparse matrix-vector multiplication for
GPU architectures", HiPEAC 2010.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["LANES", "add_gathered", "add_gathered_shares"]

LANES = 16

_FLOAT, _DOUBLE = ir.FloatType(), ir.DoubleType()
_BIT, _INT32, _INT64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)


def _add_gathered(
    typing_context: Any, values: Any, places: Any, begin: Any, steps: Any, sums: Any
) -> tuple[Any, Any]:
    """``sums[l] = sum(values[places[begin + k * LANES + l]] for k in range(steps))`` for each lane ``l``, in float64.

    ``values`` are float32 or float64, ``places`` int32 or int64, ``sums`` holds LANES float64; the terms of a lane are
    added in their order.
    """
    signature = types.void(values, places, types.intp, types.intp, sums)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _loop(context, builder, signature, args, shares=None)
        return context.get_dummy_value()

    return signature, generate


def _add_gathered_shares(
    typing_context: Any, values: Any, places: Any, shares: Any, begin: Any, steps: Any, sums: Any
) -> tuple[Any, Any]:
    """The same with each value times ``shares[begin + k * LANES + l]``, which is float64."""
    signature = types.void(values, places, shares, types.intp, types.intp, sums)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, places, shares, begin, steps, sums = args
        rest = types.void(*(signature.args[:2] + signature.args[3:]))
        array = context.make_array(signature.args[2])(context, builder, shares)
        _loop(context, builder, rest, (values, places, begin, steps, sums), shares=array.data)
        return context.get_dummy_value()

    return signature, generate


add_gathered: Any = intrinsic(_add_gathered)
add_gathered_shares: Any = intrinsic(_add_gathered_shares)


def _loop(context: Any, builder: Any, signature: Any, args: Any, *, shares: Any) -> None:
    values, places, begin, steps, sums = args
    kinds = signature.args[0], signature.args[1], signature.args[4]
    data = [
        context.make_array(kind)(context, builder, value).data
        for kind, value in zip(kinds, (values, places, sums), strict=True)
    ]
    single = signature.args[0].dtype == types.float32
    kind, nbytes = (_FLOAT, 4) if single else (_DOUBLE, 8)
    narrow = signature.args[1].dtype == types.int32
    place_kind, place_nbytes = (_INT32, 4) if narrow else (_INT64, 8)
    total = cgutils.alloca_once_value(builder, ir.Constant(_vector(_DOUBLE), [0.0] * LANES))
    gather = _gather(builder.module, kind, "f32" if single else "f64")
    first = _splat(builder, builder.ptrtoint(data[0], _INT64))
    with cgutils.for_range(builder, steps) as loop:
        at = builder.add(begin, builder.mul(loop.index, ir.Constant(_INT64, LANES)))
        where = _load(builder, data[1], at, place_kind, place_nbytes)
        if narrow:
            where = builder.sext(where, _vector(_INT64))
        addresses = builder.add(first, builder.mul(where, ir.Constant(_vector(_INT64), [nbytes] * LANES)))
        pointers = builder.inttoptr(addresses, _vector(kind.as_pointer()))
        found = builder.call(
            gather,
            [
                pointers,
                ir.Constant(_INT32, nbytes),
                ir.Constant(_vector(_BIT), [1] * LANES),
                ir.Constant(_vector(kind), [0.0] * LANES),
            ],
        )
        if single:
            found = builder.fpext(found, _vector(_DOUBLE))
        if shares is not None:
            found = builder.fmul(found, _load(builder, shares, at, _DOUBLE, 8))
        builder.store(builder.fadd(builder.load(total), found), total)
    target = builder.bitcast(data[2], _vector(_DOUBLE).as_pointer())
    builder.store(builder.load(total), target, align=8)


def _vector(kind: Any) -> Any:
    return ir.VectorType(kind, LANES)


def _load(builder: Any, data: Any, at: Any, kind: Any, align: int) -> Any:
    pointer = builder.bitcast(builder.gep(data, [at]), _vector(kind).as_pointer())
    return builder.load(pointer, align=align)


def _splat(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(_vector(_INT64), ir.Undefined)
    one = builder.insert_element(undefined, value, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(_vector(_INT32), [0] * LANES))


def _gather(module: Any, kind: Any, short: str) -> Any:
    pointer = "p0" if binding.llvm_version_info[0] >= 17 else f"p0{short}"  # pointers had types before
    name = f"llvm.masked.gather.v{LANES}{short}.v{LANES}{pointer}"
    return module.globals.get(name) or ir.Function(
        module,
        ir.FunctionType(_vector(kind), [_vector(kind.as_pointer()), _INT32, _vector(_BIT), _vector(kind)]),
        name,
    )
