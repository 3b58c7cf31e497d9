"""Vector registers in compiled code, and a small matrix product that stays in them.

LLVM turns simple loops into vector instructions by itself, but not products of narrow matrices, nor a maximum that must
not lose NaN. In code compiled with `vectorised` a value can be a vector of LANES numbers:

    load(x, (i, j))         x[i, j], x[i, j + 1], ..., widened to float32 if x is in half precision
    store(x, (i, j), a)     the reverse: rounds to nearest even
    a + b, a - b, a * b     number by number; one of them may be a number
    fma(a, b, c)            a b + c, rounded once
    larger(a, b)            the larger of two numbers, NaN if b is NaN
    total(a), largest(a)    the sum and the maximum of its numbers
    exp2(a)                 2ᵃ

The last axis of an array must be contiguous.
"""

from __future__ import annotations

import operator
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model
from numba.np.arrayobj import make_array
from numpy.polynomial import Chebyshev, Polynomial

features = llvmlite.binding.get_host_cpu_features()
LANES = 16 if features.get("avx512f") else 8 if features.get("avx2") else 4  # float32 numbers in a vector register
ROWS = max(8, LANES)  # of a tile: as many registers hold its sums


def vectorised(function):
    return numba.njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy")(function)


class Vector(types.Type):
    def __init__(self, dtype):
        self.dtype = dtype
        super().__init__(name=f"Vector({dtype})")


def of(dtype):
    return ir.VectorType({types.float32: ir.FloatType(), types.float64: ir.DoubleType()}[dtype], LANES)


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, of(kind.dtype))


I32 = ir.IntType(32)
BITS16, BITS32 = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(I32, LANES)


def constant(vector, value):
    return ir.Constant(vector, [value] * LANES)


def splat(builder, vector, value):
    undefined = ir.Constant(vector, ir.Undefined)
    return builder.shuffle_vector(
        builder.insert_element(undefined, value, I32(0)), undefined, constant(ir.VectorType(I32, LANES), 0)
    )


def call(builder, name, vector, *args, result=None):
    kind = ir.FunctionType(result or vector, [a.type for a in args])
    suffix = f"v{LANES}f{64 if isinstance(vector.element, ir.DoubleType) else 32}"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.{suffix}"), args)


def address(context, builder, kind, array, index):
    """The address of a number of an array, as an integer."""
    array = make_array(kind)(context, builder, array)
    strides = cgutils.unpack_tuple(builder, array.strides, kind.ndim)
    place = builder.ptrtoint(array.data, strides[0].type)
    for i, stride in zip(index, strides):
        place = builder.add(place, builder.mul(i, stride))
    return place


def pointer(builder, place, kind):
    return builder.inttoptr(place, kind.as_pointer())


def element(dtype):
    """The numbers in memory: floats, or the bits of a bfloat16."""
    return {
        types.float32: ir.FloatType(),
        types.float64: ir.DoubleType(),
        types.uint16: ir.IntType(16),
        types.int16: ir.HalfType(),
    }[dtype]


def wide(dtype):
    return types.float64 if dtype == types.float64 else types.float32


def indices(x):
    return types.UniTuple(types.intp, x.ndim)


@intrinsic
def load(typing, x, index):
    def code(context, builder, signature, args):
        place = address(context, builder, x, args[0], cgutils.unpack_tuple(builder, args[1], x.ndim))
        stored = ir.VectorType(element(x.dtype), LANES)
        a = builder.load(pointer(builder, place, stored), align=x.dtype.bitwidth // 8)
        if x.dtype == types.uint16:
            a = builder.bitcast(builder.shl(builder.zext(a, BITS32), constant(BITS32, 16)), of(types.float32))
        elif x.dtype == types.int16:
            a = builder.fpext(a, of(types.float32))
        return a

    return Vector(wide(x.dtype))(x, indices(x)), code


@intrinsic
def store(typing, x, index, a):
    def code(context, builder, signature, args):
        place = address(context, builder, x, args[0], cgutils.unpack_tuple(builder, args[1], x.ndim))
        a = args[2]
        if x.dtype == types.uint16:
            bits = builder.bitcast(a, BITS32)
            odd = builder.and_(builder.lshr(bits, constant(BITS32, 16)), constant(BITS32, 1))
            up = builder.lshr(builder.add(bits, builder.add(odd, constant(BITS32, 0x7FFF))), constant(BITS32, 16))
            quiet = builder.or_(builder.lshr(bits, constant(BITS32, 16)), constant(BITS32, 0x40))
            a = builder.trunc(builder.select(builder.fcmp_unordered("uno", a, a), quiet, up), BITS16)
        elif x.dtype == types.int16:
            a = builder.fptrunc(a, ir.VectorType(ir.HalfType(), LANES))
        builder.store(a, pointer(builder, place, a.type), align=x.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(x, indices(x), a), code


def binary(name):
    @intrinsic
    def op(typing, a, b):
        kind = a if isinstance(a, Vector) else b

        def code(context, builder, signature, args):
            a, b = (
                v if isinstance(t, Vector) else splat(builder, of(kind.dtype), v) for v, t in zip(args, signature.args)
            )
            if name == "larger":
                return builder.select(builder.fcmp_ordered(">", a, b), a, b)
            return getattr(builder, name)(a, b)

        return kind(*(t if isinstance(t, Vector) else kind.dtype for t in (a, b))), code

    return op


larger = binary("larger")


def operators():
    for symbol, name in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul")):
        code = binary(name)

        def define(symbol=symbol, code=code):
            @overload(symbol)
            def _(a, b):
                if isinstance(a, Vector) or isinstance(b, Vector):
                    return lambda a, b: code(a, b)

        define()


operators()


@intrinsic
def fma(typing, a, b, c):
    def code(context, builder, signature, args):
        return call(builder, "fma", of(a.dtype), *args)

    return a(a, b, c), code


@intrinsic
def filled(typing, x, value):
    def code(context, builder, signature, args):
        return splat(builder, of(wide(x.dtype)), args[1])

    return Vector(wide(x.dtype))(x, wide(x.dtype)), code


def reduction(name):
    @intrinsic
    def op(typing, a):
        def code(context, builder, signature, args):
            (a,) = args
            half = LANES
            while half > 1:  # the upper half onto the lower half
                half //= 2
                pick = ir.Constant(ir.VectorType(I32, half), list(range(half, 2 * half)))
                low = ir.Constant(ir.VectorType(I32, half), list(range(half)))
                x, y = (builder.shuffle_vector(a, a, which) for which in (pick, low))
                a = builder.fadd(x, y) if name == "total" else builder.select(builder.fcmp_ordered(">", x, y), x, y)
            return builder.extract_element(a, I32(0))

        return a.dtype(a), code

    return op


total, largest = reduction("total"), reduction("largest")


@intrinsic
def exp2(typing, a):
    def code(context, builder, signature, args):
        x, vector = args[0], of(a.dtype)
        double = a.dtype == types.float64
        digits, bias, degree = (52, 1023, 11) if double else (23, 127, 5)
        integers = ir.VectorType(ir.IntType(64 if double else 32), LANES)
        lowest, magic = constant(vector, -float(bias)), constant(vector, 1.5 * 2**digits + bias)
        x = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)
        shifted = builder.fadd(x, magic)
        f = builder.fsub(x, builder.fsub(shifted, magic))
        *lower, p = [
            constant(vector, float(c) if double else float(np.float32(c)))
            for c in Chebyshev.interpolate(np.exp2, degree, [-0.5, 0.5]).convert(kind=Polynomial).coef
        ]
        for c in reversed(lower):
            p = call(builder, "fma", vector, p, f, c)
        power = builder.shl(builder.bitcast(shifted, integers), constant(integers, digits))
        return builder.fmul(p, builder.bitcast(power, vector))

    return a(a), code


def emit(context, builder, signature, args, add):
    c, i, j, a, r, b, s, start, stop = args
    c_kind, a_kind, b_kind = signature.args[0], signature.args[3], signature.args[5]
    vector = of(c_kind.dtype)
    size = c_kind.dtype.bitwidth // 8
    integer = start.type
    strides = lambda kind, x: cgutils.unpack_tuple(builder, make_array(kind)(context, builder, x).strides, 2)
    to, (down, _) = address(context, builder, c_kind, c, (i, j)), strides(c_kind, c)
    left, (a_down, a_right) = address(context, builder, a_kind, a, (r, integer(0))), strides(a_kind, a)
    above, (b_down, _) = address(context, builder, b_kind, b, (integer(0), s)), strides(b_kind, b)
    places = [pointer(builder, builder.add(to, builder.mul(down, integer(row))), vector) for row in range(ROWS)]
    a_rows = [builder.add(left, builder.mul(a_down, integer(row))) for row in range(ROWS)]
    sums = [cgutils.alloca_once(builder, vector) for _ in range(ROWS)]
    for one, place in zip(sums, places):
        builder.store(builder.load(place, align=size) if add else vector(None), one)
    with cgutils.for_range_slice(builder, start, stop, integer(1), integer) as (x, _):
        row = builder.load(pointer(builder, builder.add(above, builder.mul(x, b_down)), vector), align=size)
        across = builder.mul(x, a_right)
        for one, a_row in zip(sums, a_rows):
            factor = builder.load(pointer(builder, builder.add(a_row, across), vector.element), align=size)
            builder.store(call(builder, "fma", vector, splat(builder, vector, factor), row, builder.load(one)), one)
    for one, place in zip(sums, places):
        builder.store(builder.load(one), place, align=size)


def in_registers(add):
    @intrinsic
    def code(typing, c, i, j, a, r, b, s, start, stop):
        def generate(context, builder, signature, args):
            emit(context, builder, signature, args, add)
            return context.get_dummy_value()

        n = types.intp
        return types.void(c, n, n, a, n, b, n, n, n), generate

    return code


product, add_product = in_registers(False), in_registers(True)
