"""Every operation on arrays of other libraries: the references use nothing beyond the Array API standard."""

import re
from pathlib import Path

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import CPU, Device, array_module, to_cpu
from scratchformer.catalogue import OPERATIONS, Draw
from scratchformer.checks import checked_on_host
from scratchformer.dispatch import reference_only
from scratchformer.testing import GradientError, check_gradients
from scratchformer.testing.contracts import as_tuple

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
# (library, operations that do not run on it, what it lacks): the table of the page.
TABLE = [
    [re.findall("`(.*?)`", cell) for cell in row.split("|")[1:4]]
    for row in re.findall(r"^\| `.*", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
]
LIBRARIES = list(dict.fromkeys(library for (library,), _, _ in TABLE))


@pytest.fixture(scope="module", params=LIBRARIES)
def library(request):
    xp = pytest.importorskip(request.param)
    pytest.importorskip("array_api_compat")
    return array_module(xp.ones(2))


def results(name, device):
    """y and the gradients of a case, whose arrays are on a device, in float32. JAX's are compiled by jax.jit."""
    case = OPERATIONS[name](Draw(3, 1.0, device))
    args = [
        device.xp.asarray(x.astype(np.float32) if x.dtype == np.float64 else x) if isinstance(x, np.ndarray) else x
        for x in case.args
    ]

    def forward_and_backward(*args):
        y, cache = case.op(*args, **case.options)
        dy = np.random.default_rng(0).standard_normal(tuple(y.shape)).astype(np.float32)
        return y, *as_tuple(case.op_backward(device.xp.asarray(dy), cache))

    if device.xp.__name__ != "jax.numpy":
        return forward_and_backward(*args)
    import jax

    fixed = [i for i, x in enumerate(args) if not isinstance(x, jax.Array)]
    with checked_on_host():  # in a function that is being compiled, an array has no values that could be checked
        return jax.jit(forward_and_backward, static_argnums=fixed)(*args)


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_reference_runs_on_other_libraries(name, library):
    """With the results that it has on NumPy, in the precision of its arguments."""
    rows = [row for row in TABLE if library.__name__.endswith(row[0][0])]
    missing = [lacks[0] for _, names, lacks in rows if name.startswith(tuple(names))]
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


def test_a_pair_of_functions_is_checked_on_its_own_library(library):
    """PyTorch's tensors and array-api-strict's arrays reach the functions; a missing factor is found."""
    if not library.__name__.startswith(("array_api_strict", "array_api_compat.torch")):
        pytest.skip("its arrays count as NumPy's")

    def cube(x):
        assert array_module(x) is library
        return x * x * x, x

    x = library.asarray([[0.5, -1.0, 2.0]])
    check_gradients(cube, lambda dy, x: 3 * x * x * dy, x)
    check_gradients(ops.layernorm, ops.layernorm_backward, x, x[0, :], x[0, :])
    with pytest.raises(GradientError):
        check_gradients(cube, lambda dy, x: x * x * dy, x)


def test_tensors_that_require_a_gradient_are_for_another_check():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="a tensor of PyTorch that requires a gradient: use check_torch"):
        check_gradients(ops.relu, ops.relu_backward, torch.ones(2, requires_grad=True))


def test_the_table_names_every_library_and_only_operations_that_there_are():
    assert LIBRARIES == ["jax.numpy", "torch", "array_api_strict", "dask.array"]
    listed = [name for _, names, lacks in TABLE for name in names if lacks]
    assert not [name for name in listed if not any(case.startswith(name) for case in OPERATIONS)]
    assert len(listed) == sum(len(names) for _, names, _ in TABLE)
