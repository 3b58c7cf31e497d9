"""Runs the kernels that are made from derivations on a CPU, and compares them with the references: see `emulator.py`.

    python tests/kernels/on_cpu/compiled.py                      # two types for each case
    python tests/kernels/on_cpu/compiled.py all                  # all four
    python tests/kernels/on_cpu/compiled.py softmax OLD NEW      # one operation, with a mistake planted in its programs

All cases run twice: first to find the kernels that they need, which are then compiled together. It prints a line for
each case and type.
"""

import sys
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import run
from emulator import compile_what_is_called
from run import RNG, Array, as_array, draw, on_gpu

from scratchformer import Key, ops
from scratchformer.catalogue import OPERATIONS, Draw
from scratchformer.compiler import CompileError, cuda_target
from scratchformer.compiler.twins import CompiledTwin
from scratchformer.dispatch import reference_only
from scratchformer.testing.contracts import as_tuple, is_array

TOLERANCE = {"float64": 1e-13, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
cuda_target.BLOCKS = 2  # with sums over rows: some cases have more rows than blocks have


def shifted(*shape):
    """An array that starts one number after a multiple of 16 bytes."""
    return draw(*shape, start=1)


def apart(*shape):
    """An array whose rows are apart."""
    return draw(*shape[:-1], shape[-1] + 3)[..., : shape[-1]]


def turned(*shape):
    """An array whose columns are apart."""
    return draw(*shape[:-2], shape[-1], shape[-2]).swapaxes(-1, -2)


SHAPES = [  # of rows: how an array is drawn, and its shape
    (draw, (3, 1)),
    (draw, (7,)),
    (shifted, (2, 3, 37)),
    (draw, (19, 64)),
    (apart, (5, 2, 130)),
    (turned, (6, 33)),
    (draw, (2, 2100)),
    (draw, (2, 50_257)),
]
ROWS = {
    ops.add: lambda x: (x, draw(*x.shape)),
    ops.dropout: lambda x: (x, 0.3, Key(1)),
    ops.gelu: lambda x: (x,),
    ops.layernorm: lambda x: (x, shifted(x.shape[-1]), draw(x.shape[-1])),
    ops.log_softmax: lambda x: (x,),
    ops.relu: lambda x: (x,),
    ops.rmsnorm: lambda x: (
        np.add(x, np.sign(x), out=x),
        draw(x.shape[-1]),
    ),  # the smaller ρ, the larger rounding errors
    ops.softmax: lambda x: (x,),
    ops.cross_entropy: lambda x: (x, RNG.integers(-1, x.shape[-1], x.shape[:-1]), -1, 0.1),
}


def cases():
    """The name, operation, arguments and options of each case."""
    for op, arguments in ROWS.items():
        for how, shape in SHAPES:
            if shape != (7,) or op not in (ops.cross_entropy,):
                yield f"{op.__name__} {how.__name__} {shape}", op, arguments(how(*shape)), {}
    for name, make in OPERATIONS.items():
        case = make(Draw(1))
        yield name, case.op, tuple(case.args), case.options


@cache
def twin_of(op):
    """The twin of an operation on the stand-in for a GPU; None for one whose derivation cannot be compiled."""
    twin = CompiledTwin(op, getattr(ops, f"{op.__name__}_backward", None), cuda_target.CudaTarget())
    try:
        twin.derivation.compile()
    except (CompileError, AttributeError):
        return None
    return twin


def computed(twin, args, options, dtype):
    """The result and the gradients of a twin, and those of the reference in float64 for the same numbers."""
    there = [on_gpu(x, dtype) for x in args]
    assert twin.fits(*there, **options), "the kernels do not take it"
    y, kept = twin.forward(*there, **options)
    y = np.asarray(y)
    generator = np.random.default_rng(0)
    dy = generator.standard_normal(y.shape).astype(dtype) if y.shape else np.array(0.7, y.dtype)
    gradients = as_tuple(twin.backward(as_array(dy), kept))
    plus, *into = (as_array(RNG.standard_normal(d.shape).astype(d.dtype)) for d in gradients)
    given = [np.array(x, np.float64) for x in (plus, *into)]
    sums = as_tuple(twin.backward(as_array(dy), kept, into=into, plus=plus))
    assert all(s is x for s, x in zip(sums[1:], into, strict=True)), "a sum is in another array"
    found = y, *gradients, *sums
    here = [np.asarray(x, np.float64) if is_array(x) and x.dtype == dtype else x for x in there]
    here = [x.view(np.ndarray) if isinstance(x, Array) else x for x in here]
    with reference_only():
        y, cache = twin.op(*here, **options)
        gradients = as_tuple(twin.op_backward(dy.astype(np.float64), cache))
        return found, (y, *gradients, *(d + x for d, x in zip(gradients, given, strict=True)))


def compare(found, right, dtype):
    for f, r in zip(found, right, strict=True):
        assert f.shape == np.shape(r), f"expected the shape {np.shape(r)}, got {f.shape}"
        assert f.dtype in (dtype, run.cupy_code.real(dtype)), f"got {f.dtype}"
        error = np.abs(f.astype(np.float64) - r).max() / max(1e-2, np.abs(r).max())
        assert error < TOLERANCE[dtype.name], f"relative error {error:.1e}"


def plant(old, new):
    """Make the programs that contain a text wrong."""
    program = cuda_target.program
    cuda_target.program = lambda text, *args, **constants: program(text, *args, **constants).replace(old, new)


def main(which, *mistake):
    if mistake:
        plant(*mistake)
    halves = [np.dtype(import_module("ml_dtypes").bfloat16)] if find_spec("ml_dtypes") else []
    types = [np.dtype(np.float32), *halves, np.dtype(np.float64), np.dtype(np.float16)]
    checks = []
    for i, (name, op, args, options) in enumerate(cases()):
        twin = twin_of(op)
        if twin is None or which not in ("some", "all", op.__name__):
            continue
        some = [types[i % len(types)], types[(i + 1) % len(types)]]
        chosen = types[:1] if mistake else types if which == "all" else some
        checks += [(name, twin, args, options, dtype) for dtype in chosen]
    compile_what_is_called(partial(computed, *check) for _, *check in checks)
    with np.errstate(all="ignore"):
        failed = False
        for name, *check in checks:
            try:
                compare(*computed(*check), check[-1])
                print("ok", name, check[-1].name, flush=True)
            except AssertionError as error:
                failed = True
                print("FAILED", name, check[-1].name, error, flush=True)
                if mistake:
                    break
    sys.exit(3 if failed else 0)


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["some"]))
