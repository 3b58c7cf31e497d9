"""check as a decorator, what it does not know, and gradients of kernels and C functions."""

import ctypes
import shutil
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

from scratchformer import Key, check, nn
from scratchformer.testing import GradientError, check_gradients

from .reports import complaint, names


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(2, 3))


# The decorator, and what is not known.


def test_a_decorated_autograd_function_is_checked_once(x):
    torch = pytest.importorskip("torch")
    calls = []

    @check
    class Cube(torch.autograd.Function):
        factor = 1.0

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            calls.append(0)
            return x**3

        @staticmethod
        def backward(ctx, dy):
            return Cube.factor * 3 * ctx.saved_tensors[0] ** 2 * dy

    x = torch.tensor(x, requires_grad=True)
    Cube.factor = 1.01
    for _ in range(2):
        with pytest.raises(GradientError, match="Cube: wrong gradient at x"):
            Cube.apply(x)
    Cube.factor = 1.0
    (gradient,) = torch.autograd.grad(Cube.apply(x).sum(), x)
    assert torch.allclose(gradient, 3 * x**2)
    calls.clear()
    Cube.apply(x)
    assert len(calls) == 1


def test_decorated_functions_and_layers(x):
    jax = pytest.importorskip("jax")

    @check
    def through(x, *, factor):
        return factor * jax.lax.stop_gradient(x)

    with pytest.raises(GradientError, match="no gradient reaches x"):
        through(jax.numpy.asarray(x), factor=2)

    @check
    class Double:
        def forward(self, x):
            return 2 * x

        def backward(self, dy):
            return dy

    with pytest.raises(GradientError, match="Double: wrong gradient at x"):
        Double().forward(x)


def test_a_call_inside_a_transformation_is_not_checked(x):
    jax, torch = pytest.importorskip("jax"), pytest.importorskip("torch")

    @check
    def of_jax(x):
        return jax.lax.stop_gradient(x).sum()

    @check
    def of_torch(x):
        return x.detach().sum()

    given = jax.numpy.asarray(x)
    assert not jax.grad(of_jax)(given).any() and jax.jit(of_jax)(given) == given.sum()
    assert not torch.func.grad(of_torch)(torch.tensor(x)).any()
    for function, array in (of_jax, given), (of_torch, torch.tensor(x)):
        with pytest.raises(GradientError):
            function(array)


def test_a_decorator_with_options(x):
    torch = pytest.importorskip("torch")

    @partial(check, order=2)
    class Saved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            ctx.save_for_backward(y * y)
            return y * y

        @staticmethod
        def backward(ctx, dy):
            return 2 * ctx.saved_tensors[0] * dy

    with pytest.raises(GradientError, match="the backward of Saved: wrong gradient at x"):
        Saved.apply(torch.tensor(x))


def test_what_is_checked_by_another_check(x):
    torch = pytest.importorskip("torch")
    assert names(check(torch.nn.Linear(3, 2), torch.tensor(x))) == ["input", "weight", "bias"]
    assert names(check(nn.Linear(3, 2, key=Key(0)), x)) == ["x", "w", "b"]
    with pytest.raises(TypeError, match=r"got double with ndarray; .* there is check_gradients\(op, op_backward"):

        def double(x):
            return 2 * x

        check(double, x)
    for alone in (nn.Linear(3, 2, key=Key(0)), 3):
        with pytest.raises(TypeError, match="expected arguments for"):
            check(alone)


# Kernels and C functions are called by a pair of functions of NumPy or PyTorch.


SOURCE = """
void swish(const double *x, double *y, int n) { for (int i = 0; i < n; i++) y[i] = x[i] / (1 + EXP(-x[i])); }
void swish_backward(const double *dy, const double *x, double *dx, int n) {
    for (int i = 0; i < n; i++) { double s = 1 / (1 + EXP(-x[i])); dx[i] = dy[i] * (s + x[i] * s * (1 - s)) * FACTOR; }
}
"""


@pytest.fixture
def compiled(tmp_path):
    """compiled(factor) compiles the functions, with a mistake unless it is 1."""
    if not shutil.which("cc"):
        pytest.skip("there is no C compiler")

    def make(factor):
        (tmp_path / "swish.c").write_text(SOURCE)
        made = tmp_path / f"swish{factor}.so"
        flags = [f"-DFACTOR={factor}", "-DEXP=__builtin_exp", "-shared", "-fPIC", "-O1"]
        subprocess.run(["cc", *flags, "-o", made, tmp_path / "swish.c", "-lm"], check=True)
        return made

    return make


def with_ctypes(path):
    library = ctypes.CDLL(str(path))
    array = np.ctypeslib.ndpointer(np.float64, flags="C_CONTIGUOUS")
    library.swish.argtypes = [array, array, ctypes.c_int]
    library.swish_backward.argtypes = [array, array, array, ctypes.c_int]
    return library.swish, library.swish_backward


def with_cffi(path):
    ffi = pytest.importorskip("cffi").FFI()
    ffi.cdef("void swish(double *, double *, int); void swish_backward(double *, double *, double *, int);")
    library = ffi.dlopen(str(path))

    def called(function):
        return lambda *arrays: function(*(ffi.from_buffer("double[]", x) for x in arrays[:-1]), arrays[-1])

    return called(library.swish), called(library.swish_backward)


@pytest.mark.parametrize("bind", [with_ctypes, with_cffi])
def test_a_c_function(bind, compiled, x):
    def pair(factor):
        forward, backward = bind(compiled(factor))

        def swish(x):
            x = np.ascontiguousarray(x)
            y = np.empty(x.shape)
            forward(x, y, x.size)
            return y, x

        def swish_backward(dy, x):
            dx = np.empty(x.shape)
            backward(np.ascontiguousarray(dy), x, dx, x.size)
            return dx

        return swish, swish_backward

    assert names(check_gradients(*pair(1), x)) == ["x"]
    with pytest.raises(GradientError, match="swish: wrong gradient at x"):
        check_gradients(*pair(1.0001), x)


def test_a_c_function_that_takes_any_memory_for_contiguous(compiled, x):
    forward, backward = (getattr(ctypes.CDLL(str(compiled(1))), n) for n in ("swish", "swish_backward"))

    def swish(x):
        y = np.empty(x.shape)
        forward(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), x.size)
        return y, x

    def swish_backward(dy, x):
        dx = np.empty(x.shape)
        backward(*(ctypes.c_void_p(array.ctypes.data) for array in (dy, x, dx)), x.size)
        return dx

    with pytest.raises(GradientError, match=r"the values agree, but with (x|dy) (in|broadcast)"):
        check_gradients(swish, swish_backward, x)


TRITON = """
@triton.jit
def cube(x, y, n, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    v = tl.load(x + i, mask=i < n)
    tl.store(y + i, v * v * v, mask=i < n)
"""


def test_a_triton_kernel(x, monkeypatch, tmp_path):
    """On a GPU if there is one, and otherwise in Triton's interpreter."""
    torch = pytest.importorskip("torch")
    triton = pytest.importorskip("triton")
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    (tmp_path / "kernels.py").write_text("import triton\nimport triton.language as tl\n" + TRITON)
    monkeypatch.syspath_prepend(tmp_path)
    import kernels

    class Cube(torch.autograd.Function):
        factor = 3.0

        @staticmethod
        def forward(ctx, x):
            x = x.contiguous()
            ctx.save_for_backward(x)
            y = torch.empty_like(x)
            kernels.cube[(triton.cdiv(x.numel(), 8),)](x, y, x.numel(), SIZE=8)
            return y

        @staticmethod
        def backward(ctx, dy):
            return Cube.factor * ctx.saved_tensors[0] ** 2 * dy

    x = torch.tensor(x, device="cuda" if on_gpu else "cpu")
    assert names(check(Cube, x)) == ["x"]
    Cube.factor = 3.001
    assert "Cube: wrong gradient at x[" in complaint(check, Cube, x)


NUMBA = """
import numpy as np
from numba import cuda
from scratchformer.testing import GradientError, check_gradients


@cuda.jit
def cube_kernel(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = x[i] ** 3


def cube(x):
    y = np.empty(x.size)
    cube_kernel[1, 32](x.ravel(), y)
    return y.reshape(x.shape), x


x = np.random.default_rng(0).normal(size=(2, 3))
check_gradients(cube, lambda dy, x: 3 * x**2 * dy, x)
try:
    check_gradients(cube, lambda dy, x: 3.001 * x**2 * dy, x)
except GradientError as error:
    print(error)
"""


def test_a_numba_cuda_kernel(monkeypatch):
    """On a GPU if there is one, and otherwise in Numba's simulator, which has to be chosen before the import."""
    cuda = pytest.importorskip("numba.cuda")
    if not cuda.is_available():
        monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    run = subprocess.run([sys.executable, "-c", NUMBA], capture_output=True, text=True, check=True, timeout=300)
    assert run.stdout.startswith("cube: wrong gradient at x[")
