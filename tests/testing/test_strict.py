"""The strict stand-in: it computes like NumPy, and mixes with NumPy arrays only on request."""

import copy
import math
import operator
import pickle

import numpy as np
import pytest
from scipy import special

from scratchformer.backend import CPU, DeviceError, array_module, device_name, erf, scatter_add, to_cpu, to_device
from scratchformer.rng import Key, random_uint16
from scratchformer.testing import strict
from scratchformer.testing.strict import STRICT, DeviceArray, traffic
from scratchformer.testing.strict import library as xp

HOST = np.arange(6.0).reshape(2, 3)


def device_array(host=HOST):
    return to_device(host, STRICT)


def same(x, host):
    assert isinstance(x, DeviceArray)
    assert x.shape == np.shape(host) and x.dtype == np.asarray(host).dtype
    np.testing.assert_array_equal(x.get(), host)


# The backend.


def test_backend_moves_arrays_in_and_out():
    x = device_array()
    assert array_module(x) is xp and array_module(x, 2.0, None) is xp
    assert device_name(xp) == "gpu (strict)"
    assert isinstance(to_cpu(x), np.ndarray) and isinstance(to_device(x, CPU), np.ndarray)
    assert to_device(x, STRICT) is x
    assert to_device(x, STRICT, np.float32).dtype == np.float32
    with pytest.raises(DeviceError, match=r"cpu \(numpy\) and gpu \(strict\)"):
        array_module(HOST, x)


def test_moving_copies():
    host = HOST.copy()
    x = device_array(host)
    host += 1
    same(x, HOST)
    x.get()[...] = 7
    same(x, HOST)


def test_backend_functions():
    same(erf(device_array()), special.erf(HOST))
    target = device_array(np.zeros(3))
    scatter_add(target, device_array(np.array([1, 1, 2])), device_array(np.array([1.0, 2.0, 4.0])))
    same(target, np.array([0.0, 3.0, 4.0]))
    same(random_uint16(Key(3), 7, xp), random_uint16(Key(3), 7))


# Mixing with NumPy arrays is refused.

MIXED = {
    "asarray": lambda xp, x: np.asarray(x),
    "array of arrays": lambda xp, x: np.array([x, x]),
    "ufunc": lambda xp, x: np.exp(x),
    "function": lambda xp, x: np.sum(x),
    "concatenate": lambda xp, x: np.concatenate([x, x]),
    "NumPy's index": lambda xp, x: HOST[xp.astype(x, xp.int64) % 2],
    "NumPy's assignment": lambda xp, x: operator.setitem(HOST.copy(), ..., x),
    "NumPy's in-place": lambda xp, x: operator.iadd(HOST.copy(), x),
    "index": lambda xp, x: x[np.array([0, 1]), :],
    "mask": lambda xp, x: x[HOST > 2],
    "assigned": lambda xp, x: operator.setitem(x, ..., HOST),
    "assigned list": lambda xp, x: operator.setitem(x, 0, [1.0, 2.0, 3.0]),
    "assigned by index": lambda xp, x: operator.setitem(x, np.array([0]), 1.0),
    "method": lambda xp, x: x.dot(HOST.T),
    "method index": lambda xp, x: x.take(np.array([0])),
    "library": lambda xp, x: xp.add(x, HOST),
    "library of NumPy": lambda xp, x: xp.exp(HOST),
    "library list": lambda xp, x: xp.concat([x, HOST]),
    "library out": lambda xp, x: xp.exp(x, out=HOST.copy()),
    "library where": lambda xp, x: xp.where(HOST > 2, x, 0.0),
    "library einsum": lambda xp, x: xp.einsum("ij,ij->i", x, HOST),
    "add.at": lambda xp, x: xp.add.at(x, np.array([0]), 1.0),
    "0-d array": lambda xp, x: x + np.array(2.0),
}


# Mistakes that only a GPU's library, or a clock, would reveal otherwise.
OTHERS = {
    "not in CuPy": lambda xp, x: xp.vecdot(x, x),
    "a number for its index": lambda xp, x: range(xp.astype(xp.sum(x), xp.int64)),
    "float": lambda xp, x: float(xp.sum(x)),
    "if": lambda xp, x: bool(xp.sum(x) > 0),
    "iteration": lambda xp, x: [float(xp.sum(row)) for row in (x[0, :], x[1, :])],
    "mask of its own": lambda xp, x: x[x > 2],
    "nonzero": lambda xp, x: xp.nonzero(x),
    "a list in every step": lambda xp, x: xp.asarray([1.0, 2.0]),
}
PLANTED = MIXED | OTHERS

# What is right on a GPU.
RIGHT = {
    "a new array": lambda xp, x: x + xp.zeros((2, 3)),
    "a number of NumPy": lambda xp, x: np.float64(2) * x,
    "a sum over rows": lambda xp, x: xp.add.at(x, xp.zeros(1, dtype=xp.int64), 1.0),
    "einsum": lambda xp, x: xp.einsum("ij->i", x),
    "a copy": lambda xp, x: x.copy(),
}


def is_reported(code, xp, x):
    """Whether an error, or an entry of `traffic`, reports the code."""
    try:
        with traffic() as reported:
            code(xp, x)
    except (TypeError, ValueError, IndexError, AttributeError, RuntimeError):
        return True
    return bool(reported)


@pytest.mark.parametrize("mix", MIXED.values(), ids=MIXED)
def test_mixing_is_refused(mix):
    with pytest.raises(TypeError):
        mix(xp, device_array())


@pytest.mark.parametrize("code", [*PLANTED.values(), *RIGHT.values()], ids=[*PLANTED, *RIGHT])
def test_planted_mistakes_are_reported_and_right_code_is_not(code):
    assert is_reported(code, xp, device_array()) == (code in PLANTED.values())


ARITHMETIC = "add sub mul truediv floordiv mod pow".split()
COMPARISONS = "eq ne lt le gt ge".split()


@pytest.mark.parametrize("name", [*ARITHMETIC, *COMPARISONS, "matmul"])
def test_operators_refuse_numpy_arrays_and_name_both(name):
    apply = getattr(operator, name)
    both = r"numpy\.ndarray .* and scratchformer\.testing\.strict\.DeviceArray do not mix.*to_device"
    with pytest.raises(TypeError, match=both):
        apply(device_array(), HOST)
    with pytest.raises(TypeError, match=both):
        apply(HOST, device_array())


def test_explicit_conversion_is_advised():
    with pytest.raises(TypeError, match=r"Implicit conversion .*x\.get\(\)"):
        np.asarray(device_array())
    with pytest.raises(TypeError, match=r"numpy\.sum was called with a DeviceArray"):
        np.sum(device_array())
    assert not hasattr(DeviceArray, "__cuda_array_interface__")
    assert not hasattr(device_array(), "__array_interface__")


# It computes like NumPy.


@pytest.mark.parametrize("name", [*ARITHMETIC, *COMPARISONS])
@pytest.mark.parametrize("other", [2, 2.0, np.float32(2), np.float64(2), np.int64(2)], ids=repr)
def test_operators_with_numbers(name, other):
    apply = getattr(operator, name)
    host = HOST.astype(np.float32) + 1
    same(apply(device_array(host), other), apply(host, other))
    same(apply(other, device_array(host)), apply(other, host))


@pytest.mark.parametrize("name", ARITHMETIC)
def test_operators_with_arrays(name):
    apply, in_place = getattr(operator, name), getattr(operator, f"i{name}")
    a, b = HOST + 1, HOST[::-1] + 2
    same(apply(device_array(a), device_array(b)), apply(a, b))
    x = y = device_array(a)
    x = in_place(x, device_array(b))
    assert x is y
    same(x, apply(a, b))
    with pytest.raises(TypeError):
        in_place(x, HOST)


def test_bit_operators_and_unary():
    host = np.arange(4, dtype=np.uint64)
    x = device_array(host)
    same(x ^ (x >> np.uint64(1)), host ^ (host >> np.uint64(1)))
    same(-device_array(), -HOST)
    same(abs(device_array(-HOST)), HOST)
    same(~(device_array() > 2), HOST <= 2)
    same((device_array() > 2) & (device_array() < 4), (HOST > 2) & (HOST < 4))
    same(device_array() @ device_array(HOST.T), HOST @ HOST.T)
    for wrong in (None, [1.0, 2.0, 3.0], "a"):
        with pytest.raises(TypeError):
            device_array() + wrong


METHODS = {
    "sum": lambda x: x.sum(),
    "sum of an axis": lambda x: x.sum(axis=1, keepdims=True),
    "argmax": lambda x: x.argmax(axis=-1),
    "take": lambda x: x.take([0, 2], axis=1),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "astype": lambda x: x.astype(np.int32),
    "T": lambda x: x.T,
    "conj": lambda x: (x + 1j).conj(),
    "imag": lambda x: (x + 1j).imag,
    "nonzero": lambda x: x.nonzero()[1],
    "element": lambda x: x[1, 2],
    "newaxis": lambda x: x[:, None, ::2],
    "list": lambda x: x[:, [0, 2, 0]],
    "own index": lambda x: x[x[:, 0].astype(np.int64) // 3],
    "own mask": lambda x: x[x > 2],
}


@pytest.mark.parametrize("apply", METHODS.values(), ids=METHODS)
def test_methods_and_indexing(apply):
    same(apply(device_array()), apply(HOST))


def test_numbers_come_out_only_when_asked():
    x = device_array()
    total = x.sum()
    assert isinstance(total, DeviceArray) and total.shape == ()
    assert (float(total), int(total), total.item(), bool(total)) == (15.0, 15, 15.0, True)
    assert math.sqrt(x[1, 1]) == 2.0 and f"{x[1, 1]:.2f}" == "4.00"
    assert x.tolist() == HOST.tolist() and len(x) == 2
    assert [row.shape for row in x] == [(3,), (3,)]
    assert (x.ndim, x.size, x.nbytes, x.itemsize) == (2, 6, 48, 8)
    assert x.flags.c_contiguous and not x.T.flags.c_contiguous
    assert "DeviceArray" in repr(x) and str(x) == str(HOST)
    with pytest.raises(ValueError):
        bool(x > 2)
    with pytest.raises(ValueError):
        float(x)
    with pytest.raises(TypeError):
        range(total.astype(np.int64))
    with pytest.raises(TypeError):
        hash(x)


def test_views_share_memory():
    flat = xp.zeros(10)
    a, b = flat[:6].reshape(2, 3), flat[6:]
    a += 1
    b[...] = 2
    a[0, 1] = 5
    element = a[1, 1]
    element += 3
    same(flat, np.array([1.0, 5, 1, 1, 4, 1, 2, 2, 2, 2]))
    assert xp.shares_memory(flat, a) and not xp.shares_memory(a, b)
    assert xp.may_share_memory(flat, b)
    assert not xp.shares_memory(flat, flat.copy())
    assert xp.shares_memory(a, a.T) and xp.shares_memory(a, a.ravel()) and not xp.shares_memory(a, a.T.reshape(-1))
    a.fill(0)
    assert float(flat.sum()) == 8


def test_deepcopy_and_pickle():
    x = device_array()
    for twin in (copy.deepcopy(x), copy.copy(x), pickle.loads(pickle.dumps(x))):
        same(twin, HOST)
        assert not xp.shares_memory(x, twin)
    assert copy.deepcopy(STRICT) is STRICT


# The library.

CALLS = {
    "exp": lambda xp, x: xp.exp(x),
    "where": lambda xp, x: xp.where(x > 2, x, -xp.inf),
    "where with one argument": lambda xp, x: xp.where(x > 2)[0],
    "einsum": lambda xp, x: xp.einsum("ij,kj->ik", x, x),
    "full": lambda xp, x: xp.full(3, 2.5),
    "ones_like": lambda xp, x: xp.ones_like(x, dtype=xp.int32),
    "stack": lambda xp, x: xp.stack((x, x)),
    "split": lambda xp, x: xp.split(x, [1, 2], axis=1)[1],
    "take_along_axis": lambda xp, x: xp.take_along_axis(x, x.argsort(axis=1), axis=1),
    "reduceat": lambda xp, x: xp.add.reduceat(x, xp.asarray([0, 1]), axis=0),
    "norm": lambda xp, x: xp.linalg.norm(x),
    "windows": lambda xp, x: xp.lib.stride_tricks.sliding_window_view(x, 2, axis=1),
    "as_strided": lambda xp, x: xp.lib.stride_tricks.as_strided(x, (2, 2), x.strides),
    "divmod": lambda xp, x: xp.divmod(x, 2.0)[1],
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_library(call):
    same(call(xp, device_array()), call(np, HOST))


def test_out_comes_back_itself():
    x, out = device_array(), xp.empty((2, 2))
    assert xp.matmul(x, x.T, out=out) is out
    same(out, HOST @ HOST.T)
    assert xp.exp(x, out=x) is x
    assert xp.asarray(x) is x and x.astype(x.dtype, copy=False) is x


def test_answers_are_plain():
    x = device_array()
    assert xp.shape(x) == (2, 3) and xp.size(x) == 6 and xp.result_type(x, xp.float32) == np.float64
    assert isinstance(xp.allclose(x, x), DeviceArray) and isinstance(xp.count_nonzero(x), DeviceArray)


@pytest.mark.parametrize("name", ["errstate", "frompyfunc", "nditer", "vecdot", "block", "insert", "no_such_thing"])
def test_what_cupy_lacks(name):
    with pytest.raises(AttributeError, match=f"no '{name}'"):
        getattr(xp, name)


def test_limits_of_cupy():
    x = device_array()
    with pytest.raises(AttributeError, match=r"maximum\.reduceat"):
        xp.maximum.reduceat  # noqa: B018
    with pytest.raises(TypeError, match="int64"):
        xp.add.at(xp.zeros(3, np.int64), xp.asarray([0]), 1)
    for refused in (
        lambda: xp.sum(x, where=x > 2),
        lambda: x.sum(initial=1.0),
        lambda: xp.max(x, initial=0.0),
        lambda: xp.einsum("ij->i", x, out=xp.empty(2)),
        lambda: xp.sum([1.0, 2.0]),
        lambda: xp.exp([1.0, 2.0]),
        lambda: xp.where(True, x, x),
        lambda: xp.concatenate([[1.0], [2.0]]),
        lambda: xp.asarray(["a"]),
        lambda: xp.asarray([None]),
        lambda: DeviceArray([1.0]),
    ):
        with pytest.raises(TypeError):
            refused()


def test_every_name_is_in_cupy():
    cupy = pytest.importorskip("cupy")
    names = [name for name in vars(xp) if not name.startswith("__") and name != "erf"]
    assert [name for name in names if not hasattr(cupy, name)] == []
    assert [name for name in strict._LINALG.split() if not hasattr(cupy.linalg, name)] == []
    public = [name for name in dir(DeviceArray) if not name.startswith("_")]
    assert [name for name in public if not hasattr(cupy.ndarray, name)] == []
