"""Every operation on arrays of other libraries: the references use nothing beyond the Array API standard."""

import numpy as np
import pytest

from scratchformer.backend import CPU, Device, array_module, to_cpu
from scratchformer.catalogue import OPERATIONS, Draw
from scratchformer.dispatch import reference_only
from scratchformer.testing.contracts import as_tuple

# What Dask does not have, and the operations that need it.
NOT_IN_DASK = {
    "take_along_axis": ("gather", "max_pool", "relative_shift", "relative_attention", "cross_entropy"),
    "reshape": ("attention, grouped, a pattern for each head",),  # if it moves the limits of its pieces
}


@pytest.fixture(scope="module", params=["array_api_strict", "torch", "jax.numpy", "dask.array"])
def library(request):
    xp = pytest.importorskip(request.param)
    pytest.importorskip("array_api_compat")
    return array_module(xp.ones(2))


def results(name, device):
    """y and the gradients of a case, whose arrays are on a device, in float32."""
    case = OPERATIONS[name](Draw(3, 1.0, device))
    args = [
        device.xp.asarray(x.astype(np.float32) if x.dtype == np.float64 else x) if isinstance(x, np.ndarray) else x
        for x in case.args
    ]
    y, cache = case.op(*args, **case.options)
    dy = np.random.default_rng(0).standard_normal(tuple(y.shape)).astype(np.float32)
    return y, *as_tuple(case.op_backward(device.xp.asarray(dy), cache))


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_reference_runs_on_other_libraries(name, library):
    """With the results that it has on NumPy, in the precision of its arguments."""
    dask = library.__name__.endswith("dask.array")
    missing = [lack for lack, names in NOT_IN_DASK.items() if dask and name.startswith(names)]
    with reference_only():
        expected = results(name, CPU)
        if missing:
            with pytest.raises((AttributeError, NotImplementedError), match=missing[0]):
                results(name, Device("", library))
            return
        for x, of_numpy in zip(results(name, Device("", library)), expected, strict=True):
            assert array_module(x) is library
            assert to_cpu(x).dtype == np.float32
            np.testing.assert_allclose(to_cpu(x), of_numpy, rtol=1e-4, atol=1e-5)
