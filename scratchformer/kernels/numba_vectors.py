"""Vector registers in compiled code, and a small matrix product that stays in them.

LLVM turns simple loops into vector instructions by itself, but neither a product of narrow matrices nor a maximum that
must not lose NaN. In functions decorated with `vectorised` a value can be a vector of LANES numbers:

    load(x, (i, j))         x[i, j], x[i, j + 1], ...; the bits of bfloat16 (unsigned integers) become float32
    prefetch(x, (i, j))     start reading x[i, j] into the second-level cache; there need not be such an element
    store(x, (i, j), a)     x[i, j], x[i, j + 1], ... = a, for bfloat16 rounded to nearest even
    filled(x, value)        a vector of one value, of the type that load(x, ...) gives
    a + b, a - b, a * b     number by number; one of the two may be a single number
    where_inside(...)       a, except where a key is outside a query's interval
    larger(a, b)            the larger of two numbers, NaN if b is NaN
    total(a), largest(a)    the sum and the maximum of a vector
    exp2(a)                 2ᵃ, for a ≤ 0

The last axis of an array must be contiguous. What follows is written in LLVM's intermediate representation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed
from numba.extending import models, overload, register_model
from numba.np.arrayobj import make_array
from numpy.polynomial import Chebyshev, Polynomial

from .numba_code import compiled, has

LANES = 16 if has("avx512f") else 8 if has("avx2") else 4  # float32 numbers in a vector register
# Of a tile of `product`, whose sums fill half of the registers: 16 of 32 with AVX-512, 8 of 16 otherwise.
ROWS, VECTORS = (16, 1) if LANES == 16 else (4, 2)
COLUMNS = VECTORS * LANES
TALL = ROWS * VECTORS  # rows of a tile that is one vector wide
INTEGER = ir.IntType(32)
intrinsic: Any = extending.intrinsic  # Any: a type checker would count `typing` among the arguments of a call
NUMBERS = {types.float32: ir.FloatType(), types.float64: ir.DoubleType(), types.uint16: ir.IntType(16)}
NUMBERS[types.uint32] = INTEGER
NUMBERS[types.intp] = ir.IntType(types.intp.bitwidth)


def vectorised(function: Callable) -> Any:
    """As `numba_code.compiled`, inline."""
    return compiled(function, inline=True)


class Vector(types.Type):
    """The type of a vector of LANES numbers."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        super().__init__(name=f"Vector({dtype})")


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, vector_of(kind.dtype))


def vector_of(dtype: Any) -> ir.VectorType:
    return ir.VectorType(NUMBERS[dtype], LANES)


def vector_type(x: Any) -> Vector:
    """The type of the vectors of an array."""
    return Vector(types.float64 if x.dtype == types.float64 else types.float32)


def constant(vector: ir.VectorType, value: Any) -> ir.Constant:
    return ir.Constant(vector, [value] * LANES)


def splat(builder: Any, vector: ir.VectorType, value: Any) -> Any:
    """A vector of one value."""
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, INTEGER(0))
    return builder.shuffle_vector(one, one, constant(ir.VectorType(INTEGER, LANES), 0))


def multiply_add(builder: Any, a: Any, b: Any, c: Any, once: bool = False) -> Any:
    """a b + c, rounded once if the processor has an instruction for that, or always: then without one, LLVM calls a
    function for each number.
    """
    name = f"llvm.{'fma' if once else 'fmuladd'}.v{LANES}f{64 if isinstance(a.type.element, ir.DoubleType) else 32}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name)
    return builder.call(function, (a, b, c))


def place(context: Any, builder: Any, kind: Any, array: Any, index: Sequence) -> tuple[Any, list]:
    """The address of an element of an array, as an integer, and the array's strides."""
    data = make_array(kind)(context, builder, array)
    strides = cgutils.unpack_tuple(builder, data.strides, kind.ndim)
    address = builder.ptrtoint(data.data, strides[0].type)
    for i, stride in zip(index, strides, strict=True):
        address = builder.add(address, builder.mul(i, stride))
    return address, strides


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def element(context: Any, builder: Any, kind: Any, array: Any, index: Any, *rest: Any) -> Any:
    """A pointer to the vector that begins at an element."""
    address, _ = place(context, builder, kind, array, cgutils.unpack_tuple(builder, index, kind.ndim))
    return pointer(builder, address, vector_of(kind.dtype))


def written(signature: Any, write: Callable) -> tuple[Any, Callable]:
    """What an intrinsic without a result returns: its signature, and what writes its code."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        write(context, builder, *args)
        return context.get_dummy_value()

    return signature, code


def index_of(x: Any) -> Any:
    """The type of the index of an element."""
    return types.UniTuple(types.intp, x.ndim)


@intrinsic
def on_boundary(typing: Any, x: Any) -> Any:
    """x from the first address on that is a multiple of a vector's size. Its last elements, fewer than a vector holds,
    then lie outside x's memory: the caller must cut them off.
    """
    size = LANES * x.dtype.bitwidth // 8

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = make_array(x)(context, builder, args[0])
        address = builder.ptrtoint(data.data, NUMBERS[types.intp])
        up = builder.and_(builder.add(address, address.type(size - 1)), address.type(-size))
        data.data = builder.inttoptr(up, data.data.type)
        return impl_ret_borrowed(context, builder, x, data._getvalue())

    return x(x), code


@intrinsic
def load(typing: Any, x: Any, index: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a = builder.load(element(context, builder, x, *args), align=x.dtype.bitwidth // 8)
        if x.dtype != types.uint16:
            return a
        bits = ir.VectorType(INTEGER, LANES)
        return builder.bitcast(builder.shl(builder.zext(a, bits), constant(bits, 16)), vector_of(types.float32))

    return vector_type(x)(x, index_of(x)), code


@intrinsic
def prefetch(typing: Any, x: Any, index: Any) -> Any:
    def write(context: Any, builder: Any, array: Any, index: Any) -> None:
        at = builder.bitcast(element(context, builder, x, array, index), ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [at.type, *[INTEGER] * 3])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, (at, INTEGER(0), INTEGER(2), INTEGER(1)))  # to read, into the second level, data

    return written(types.void(x, index_of(x)), write)


@intrinsic
def store(typing: Any, x: Any, index: Any, a: Any) -> Any:
    def write(context: Any, builder: Any, array: Any, index: Any, a: Any) -> None:
        a = a if x.dtype != types.uint16 else rounded(builder, a)
        builder.store(a, element(context, builder, x, array, index), align=x.dtype.bitwidth // 8)

    return written(types.void(x, index_of(x), a), write)


def rounded(builder: Any, a: Any) -> Any:
    """As `numba_code.rounded`, for a vector."""
    kind = ir.VectorType(INTEGER, LANES)
    bits, sixteen = builder.bitcast(a, kind), constant(kind, 16)
    upper = builder.lshr(bits, sixteen)
    odd = builder.and_(upper, constant(kind, 1))
    up = builder.lshr(builder.add(bits, builder.add(odd, constant(kind, 0x7FFF))), sixteen)
    quiet = builder.or_(upper, constant(kind, 0x40))
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", a, a), quiet, up), vector_of(types.uint16))


@intrinsic
def filled(typing: Any, x: Any, value: Any) -> Any:
    kind = vector_type(x)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return splat(builder, vector_of(kind.dtype), args[1])

    return kind(x, kind.dtype), code


@intrinsic
def where_inside(typing: Any, begin: Any, end: Any, index: Any, s: Any, a: Any, value: Any) -> Any:
    """a where begin ≤ s < end, for vectors of begin and end that start at the index; elsewhere value."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start, stop = (
            builder.load(element(context, builder, x, array, args[2]), align=types.intp.bitwidth // 8)
            for x, array in ((begin, args[0]), (end, args[1]))
        )
        place = splat(builder, vector_of(types.intp), args[3])
        inside = builder.and_(builder.icmp_signed("<=", start, place), builder.icmp_signed("<", place, stop))
        return builder.select(inside, args[4], splat(builder, vector_of(a.dtype), args[5]))

    return a(begin, end, types.UniTuple(types.intp, 2), types.intp, a, a.dtype), code


def of_two(combine: Callable) -> Any:
    """A function of two vectors, or of a vector and a number."""

    @intrinsic
    def function(typing: Any, a: Any, b: Any) -> Any:
        kind = a if isinstance(a, Vector) else b

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            vectors = (
                x if isinstance(given, Vector) else splat(builder, vector_of(kind.dtype), x)
                for x, given in zip(args, signature.args, strict=True)
            )
            return combine(builder, *vectors)

        return kind(*(x if isinstance(x, Vector) else kind.dtype for x in (a, b))), code

    return function


def define(symbol: Callable, function: Any) -> None:
    @overload(symbol)
    def chosen(a, b):  # type: ignore[no-untyped-def]  # annotations would differ from those of the lambda
        if isinstance(a, Vector) or isinstance(b, Vector):
            return lambda a, b: function(a, b)
        return None


define(operator.add, of_two(lambda builder, a, b: builder.fadd(a, b)))
define(operator.sub, of_two(lambda builder, a, b: builder.fsub(a, b)))
define(operator.mul, of_two(lambda builder, a, b: builder.fmul(a, b)))


def maximum(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


larger = of_two(maximum)


def reduction(combine: Callable) -> Any:
    """A function of a vector that combines its halves until a single number is left."""

    @intrinsic
    def function(typing: Any, a: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            (left,) = args
            size = LANES
            while size > 1:
                size //= 2
                picks = (list(range(size)), list(range(size, 2 * size)))
                halves = (ir.Constant(ir.VectorType(INTEGER, size), pick) for pick in picks)
                left = combine(builder, *(builder.shuffle_vector(left, left, half) for half in halves))
            return builder.extract_element(left, INTEGER(0))

        return a.dtype(a), code

    return function


total, largest = reduction(lambda builder, a, b: builder.fadd(a, b)), reduction(maximum)


@intrinsic
def transpose_tile(typing: Any, x: Any, i: Any, j: Any, to: Any, r: Any, s: Any) -> Any:
    """Write the LANES x LANES numbers of x from row i and column j on, transposed, to `to` from row r, column s on.

    Squares of 1, 2, 4, ... rows and columns beside the diagonal change places, in all pairs of such rows at once.
    """
    vector, size = vector_of(x.dtype), x.dtype.bitwidth // 8

    def write(context: Any, builder: Any, *args: Any) -> None:
        corner, (down, _) = place(context, builder, x, args[0], args[1:3])
        goal, (below, _) = place(context, builder, to, args[3], args[4:6])
        from_rows, to_rows = (
            [pointer(builder, builder.add(start, builder.mul(step, step.type(row))), vector) for row in range(LANES)]
            for start, step in ((corner, down), (goal, below))
        )
        rows = [builder.load(row, align=size) for row in from_rows]
        step = 1
        while step < LANES:
            upper = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
            lower = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
            kind = ir.VectorType(INTEGER, LANES)
            for row in range(LANES):
                if not row & step:
                    a, b = rows[row], rows[row + step]
                    rows[row] = builder.shuffle_vector(a, b, ir.Constant(kind, upper))
                    rows[row + step] = builder.shuffle_vector(a, b, ir.Constant(kind, lower))
            step *= 2
        for row in range(LANES):
            builder.store(rows[row], to_rows[row], align=size)

    n = types.intp
    return written(types.void(x, n, n, to, n, n), write)


@intrinsic
def exp2(typing: Any, a: Any) -> Any:
    """2ᵃ for a ≤ 0, to an error of 2⁻²² (2⁻⁵⁰ in float64); 0 below the smallest exponent; NaN stays NaN.

    With n the integer next to a, 2ᵃ = 2ⁿ 2ᶠ and |f| ≤ ½. 2ᶠ is a polynomial, which interpolates it at Chebyshev's
    points. Adding 1.5 · 2²³ to a rounds it to n, which is then in the last bits of the sum; with the bias of an
    exponent added too, these bits, moved to where a float has its exponent, are 2ⁿ, and 0 for n = −127.
    """
    digits, bias, degree, size = (52, 1023, 12, 64) if a.dtype == types.float64 else (23, 127, 6, 32)
    powers = Chebyshev.interpolate(np.exp2, degree, [-0.5, 0.5]).convert(kind=Polynomial).coef
    vector, integers = vector_of(a.dtype), ir.VectorType(ir.IntType(size), LANES)
    number = np.float64 if size == 64 else np.float32

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lowest = constant(vector, -float(bias))
        x = builder.select(builder.fcmp_ordered("<", args[0], lowest), lowest, args[0])
        shifted = builder.fadd(x, constant(vector, 1.5 * 2**digits + bias))
        f = builder.fsub(x, builder.fsub(shifted, constant(vector, 1.5 * 2**digits + bias)))
        *others, value = (constant(vector, float(number(power))) for power in powers)
        for power in reversed(others):
            value = multiply_add(builder, value, f, power)
        exponent = builder.shl(builder.bitcast(shifted, integers), constant(integers, digits))
        return builder.fmul(value, builder.bitcast(exponent, vector))

    return a(a), code


@intrinsic
def product(
    typing: Any, c: Any, i: Any, j: Any, a: Any, r: Any, b: Any, s: Any, start: Any, stop: Any
) -> Any:  # fmt: skip
    """A tile of ROWS rows and COLUMNS columns of a product, written to c from row i and column j on.

        c_{i+x,j+y} = Σ_{z, start ≤ z < stop} a_{r+x,z} b_{z,s+y}

    For each z, VECTORS registers hold numbers of b for all rows. With AVX-512 an instruction multiplies such a register
    by a number of a in memory. AVX2 first fills a register with the number, which pays when it is multiplied by more
    than one. No instruction computes the address of a number of a if the distance between rows of a is a constant of
    the code: if a is a transposed array, or a row of it has a constant length.
    """
    return tile(c, a, b)


@intrinsic
def add_product(typing: Any, c: Any, i: Any, j: Any, a: Any, r: Any, b: Any, s: Any, start: Any, stop: Any) -> Any:
    """As `product`, added to what c holds."""
    return tile(c, a, b, added=True)


@intrinsic
def add_narrow_product(
    typing: Any, c: Any, i: Any, j: Any, a: Any, r: Any, b: Any, s: Any, start: Any, stop: Any
) -> Any:  # fmt: skip
    """As `add_product`, for TALL rows and LANES columns."""
    return tile(c, a, b, TALL, 1, added=True)


def tile(
    c: Any, a: Any, b: Any, rows: int = ROWS, across: int = VECTORS, added: bool = False, once: bool = False
) -> Any:  # fmt: skip
    """What `product` and the others return, for a tile of so many rows, each of so many vectors. For `once` see
    `multiply_add`.
    """
    vector, size = vector_of(c.dtype), c.dtype.bitwidth // 8

    def write(
        context: Any, builder: Any, to: Any, i: Any, j: Any, left: Any, r: Any, right: Any, s: Any, start: Any,
        stop: Any,
    ) -> None:  # fmt: skip
        zero = start.type(0)
        corner, (down, _) = place(context, builder, c, to, (i, j))
        a_corner, (a_down, a_across) = place(context, builder, a, left, (r, zero))
        b_corner, (b_down, _) = place(context, builder, b, right, (zero, s))

        def vectors(address: Any) -> list:
            starts = (builder.add(address, zero.type(v * LANES * size)) for v in range(across))
            return [pointer(builder, start, vector) for start in starts]

        height = rows if size == 4 else rows // 2  # a vector of float64 takes two registers
        for top in range(0, rows, height):
            goals, factors, sums = [], [], []
            for row in range(top, top + height):
                goals += vectors(builder.add(corner, builder.mul(down, zero.type(row))))
                factors.append(builder.add(a_corner, builder.mul(a_down, zero.type(row))))
            for goal in goals:
                sums.append(cgutils.alloca_once(builder, vector))  # LLVM keeps them in registers
                builder.store(builder.load(goal, align=size) if added else vector(None), sums[-1])
            with cgutils.for_range_slice(builder, start, stop, start.type(1), start.type) as (x, _):
                b_row = builder.add(b_corner, builder.mul(x, b_down))
                numbers = [builder.load(each, align=size) for each in vectors(b_row)]
                shift = builder.mul(x, a_across)
                for row, address in enumerate(factors):
                    factor = builder.load(pointer(builder, builder.add(address, shift), vector.element))
                    factor = splat(builder, vector, factor)
                    for one, number in zip(sums[row * across :], numbers, strict=False):
                        builder.store(multiply_add(builder, factor, number, builder.load(one), once), one)
            for goal, one in zip(goals, sums, strict=True):
                builder.store(builder.load(one), goal, align=size)

    n = types.intp
    return written(types.void(c, n, n, a, n, b, n, n, n), write)
