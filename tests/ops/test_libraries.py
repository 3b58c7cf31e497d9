"""Every operation on the arrays of other libraries: the references use nothing that is not in the Array API standard."""

import numpy as np
import pytest

from scratchformer.backend import CPU, Device, array_module, to_cpu
from scratchformer.catalogue import OPERATIONS, Draw
from scratchformer.dispatch import reference_only
from scratchformer.testing.contracts import as_tuple


@pytest.fixture(scope="module", params=["array_api_strict", "torch", "jax.numpy", "dask.array"])
def library(request):
    """The namespace of one library, in double precision."""
    xp = pytest.importorskip(request.param)
    if request.param == "jax.numpy":
        jax = pytest.importorskip("jax")
        with jax.enable_x64(True):
            yield array_module(xp.ones(2))
    else:
        yield array_module(xp.ones(2))


def results(name, device, dtype):
    """y and the gradients of a case, whose arrays are on a device."""
    case = OPERATIONS[name](Draw(3, 1.0, device))
    args = [
        device.xp.asarray(x if x.dtype != np.float64 else x.astype(dtype)) if isinstance(x, np.ndarray) else x
        for x in case.args
    ]
    y, cache = case.op(*args, **case.options)
    dy = np.random.default_rng(0).standard_normal(tuple(y.shape)).astype(dtype)
    return y, *as_tuple(case.op_backward(device.xp.asarray(dy), cache))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_reference_runs_on_other_libraries(name, library, dtype):
    """With the results that it has on NumPy, and in the precision of its arguments."""
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype is np.float32 else {"rtol": 1e-10, "atol": 1e-12}
    with reference_only():
        expected = results(name, CPU, dtype)
        for x, of_numpy in zip(results(name, Device("", library), dtype), expected, strict=True):
            assert array_module(x) is library
            assert to_cpu(x).dtype == dtype
            np.testing.assert_allclose(to_cpu(x), of_numpy, **tolerance)
