"""check_torch and check_jax: what they accept, and what they say about each mistake."""

import sys
import warnings

import numpy as np
import pytest

from scratchformer.backend import DeviceError, get_device
from scratchformer.testing import GradientError, check_gradients, check_jax, check_torch

from .reports import complaint, names


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def jax():
    return pytest.importorskip("jax")


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(2, 3))


def slope(x, dy):
    return 3 * x**2 * dy


@pytest.fixture
def cube_of(torch):
    """cube_of(backward, forward) makes x³ as a torch.autograd.Function."""

    def make(backward, forward=lambda x: x**3):
        class Cube(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return forward(x)

            @staticmethod
            def backward(ctx, dy):
                return backward(*ctx.saved_tensors, dy)

        return Cube

    return make


@pytest.fixture
def rule_of(jax):
    """rule_of(backward, forward) makes x³ as a function of JAX with these rules."""

    def make(backward, forward=lambda x: (x**3, x)):
        @jax.custom_vjp
        def cube(x):
            return x**3

        cube.defvjp(forward, backward)
        return cube

    return make


def test_torch_a_function_is_checked_under_its_own_names(cube_of, torch, x):
    class Separate(torch.autograd.Function):
        forward = staticmethod(lambda x, power: x**power)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[0])

        @staticmethod
        def backward(ctx, dy):
            return slope(*ctx.saved_tensors, dy), None

    cube = cube_of(slope)
    for form in (cube, cube.apply, lambda x: cube.apply(x)):
        assert names(check_torch(form, torch.tensor(x, dtype=torch.bfloat16))) == ["x"]
    assert names(check_torch(Separate, torch.tensor(x), 3)) == ["x"]


def test_torch_a_wrong_gradient_is_reported_as_for_a_pair(cube_of, torch, x):
    said = complaint(check_torch, cube_of(lambda x, dy: 1.0001 * slope(x, dy)), torch.tensor(x), seed=3)
    assert said.startswith("Cube: wrong gradient at x[")
    assert said.endswith("check_torch(Cube, ..., seed=3)")
    assert "no gradient reaches" not in said


CONTRACT = {
    "in place": ("forward writes to x", lambda x, dy: 2 * slope(x, dy), lambda x: x.mul_(2) ** 3),
    "past autograd": ("forward writes to x", lambda x, dy: 2 * slope(x, dy), lambda x: x.data.mul_(2) ** 3),
    "backward in place": ("backward writes to x", lambda x, dy: x.pow_(2).mul_(3) * dy, None),
    "dy": ("backward writes to dy", lambda x, dy: dy.mul_(3 * x**2), None),
    "shared": ("it does not depend on dy", lambda x, dy: x.view_as(x), None),
    "noise": ("differs between two runs", lambda x, dy: slope(x, dy) * x.new_empty(1).normal_(), None),
    "layout": ("with dy broadcast from one number", lambda x, dy: slope(x, dy.as_strided(x.shape, (3, 1))), None),
    "clipped": ("backward is not linear in dy", lambda x, dy: slope(x, dy.clamp(-10, 10)), None),
    "type": ("y is float64 where all floating-point inputs are float32", slope, lambda x: x.double() ** 3),
    "number": ("incorrect number of gradients", lambda x, dy: (dy, dy), None),
    "shape": ("invalid gradient", lambda x, dy: dy[0, 0] + dy.new_zeros(7), None),
    "nan": ("is nan", lambda x, dy: dy * float("nan"), None),
}


@pytest.mark.parametrize("said, backward, forward", CONTRACT.values(), ids=CONTRACT)
def test_torch_the_contract_is_that_of_check_gradients(said, backward, forward, cube_of, torch, x):
    cube = cube_of(backward, forward) if forward else cube_of(backward)
    assert said in complaint(check_torch, cube, torch.tensor(x), rules=True)


def test_torch_a_forward_that_remembers_its_calls(cube_of, torch, x):
    calls = []
    cube = cube_of(slope, lambda x: calls.append(0) or x**3 + len(calls))
    assert "y: differs between two calls" in complaint(check_torch, cube, torch.tensor(x))


def test_torch_views_and_dy_as_a_gradient_are_allowed(torch, x):
    x = torch.tensor(x)
    check_torch(lambda a, b: ((a + b).T, a, b.sum()), x, x)


def test_torch_gets_no_empty_batch(torch, x):
    lengths = set()
    check_torch(lambda x: lengths.add(len(x)) or 2 * x, torch.tensor(x), rules=True)
    assert lengths == {2}


def test_torch_a_module_is_checked_with_its_parameters_and_does_not_change(torch, x):
    nn = torch.nn
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    module[4].bias.requires_grad_(False)
    before = {n: v.clone() for n, v in module.state_dict().items()}
    state = torch.get_rng_state()
    report = check_torch(module, torch.randn(5, 3))
    assert names(report) == ["input", "0.weight", "0.bias", "2.weight", "2.bias", "4.weight"]
    assert all(torch.equal(before[n], v) for n, v in module.state_dict().items())
    assert all(p.grad is None and p.dtype == torch.float32 for p in module.parameters())
    assert not torch.equal(state, torch.get_rng_state())  # by randn
    state = torch.get_rng_state()
    check_torch(module, torch.zeros(5, 3))
    assert torch.equal(state, torch.get_rng_state())


def test_torch_parameters_never_get_another_shape(torch, x):
    """An LSTM whose weights have lost rows reads memory that is not its own, and may end the process."""
    shapes = set()

    class Scale(torch.nn.Linear):
        def forward(self, x):
            shapes.add((self.weight.shape, self.bias.shape))
            return super().forward(x)

    check_torch(Scale(3, 2), torch.tensor(x))
    assert len(shapes) == 1


def test_torch_a_wrong_parameter_is_named(cube_of, torch, x):
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, weight):
            return weight * wrong.apply(self.weight)

    wrong = cube_of(lambda x, dy: 2 * x**2 * dy)
    assert "Scaled: wrong gradient at weight[" in complaint(check_torch, Scaled(), torch.tensor(x))
    wrong = cube_of(slope)
    assert names(check_torch(Scaled(), torch.tensor(x))) == ["input weight", "weight"]


def test_torch_only_tensors_that_require_a_gradient_are_checked(torch, x):
    x, mask = torch.tensor(x, requires_grad=True), torch.ones(3)
    assert names(check_torch(lambda x, mask, power, *, shift: (x * mask) ** power + shift, x, mask, 3, shift=mask)) == [
        "x"
    ]
    writing = lambda x, mask: x * mask.mul_(2)  # noqa: E731
    assert "forward writes to constant mask" in complaint(check_torch, writing, x, mask, rules=True)
    assert names(check_torch(writing, x, mask)) == ["x"]
    assert torch.equal(mask, torch.ones(3))


def test_torch_nested_arguments_and_results_that_are_integers(torch, x):
    def select(batch, ids):
        best = torch.cat([batch["x"], batch["more"][0]])[ids].max(dim=1)
        return {"best": best.values, "at": best.indices, "count": 3, "detached": batch["x"].detach()}

    batch = {"x": torch.tensor(x), "more": [torch.tensor(-x)]}
    assert names(check_torch(select, batch, torch.tensor([0, 3, 3]))) == ["batch['x']", "batch['more'][0]"]
    with pytest.raises(ValueError, match="nothing to check: expected a floating-point array, got ids: int64"):
        check_torch(lambda ids: ids, torch.tensor([1]))


def test_torch_a_gradient_that_is_cut_off_is_explained(torch, x):
    x = torch.tensor(x)
    said = complaint(check_torch, lambda x: x.detach() ** 2, x)
    assert "y does not depend on x through torch's autograd: look for detach()" in said
    said = complaint(check_torch, lambda x, w: x.detach() * w, x, x)
    assert "no gradient reaches x: look for detach()" in said
    assert names(check_torch(lambda x, unused: x, x, x)) == ["x", "unused"]


def test_torch_a_function_of_one_type_only(torch, x):
    def narrow(x):
        if x.dtype != torch.float32:
            raise RuntimeError("not compiled for float64")
        return 2 * x

    with pytest.raises(TypeError, match="accepts float32 but not float64: not compiled for float64"):
        check_torch(narrow, torch.tensor(x))
    with pytest.raises(TypeError, match="expected a floating-point tensor among the results, got int64"):
        check_torch(lambda x: x.argmax(), torch.ones(3))
    with pytest.raises(TypeError, match="expected tensors as results, got float"):
        check_torch(lambda x: 3.0, torch.tensor(x))


def test_torch_layouts_that_pytorch_cannot_share(cube_of, torch, x):
    """NumPy arrays are accepted too, as arguments and from the check."""
    from scratchformer.testing.adapters import _TorchPair

    pair = _TorchPair(cube_of(slope), (x,), {})
    fixed = x.copy()
    fixed.flags.writeable = False
    for layout in (fixed, x[::-1], np.asfortranarray(x)):
        (y,), cache = pair.forward({"x": layout})
        np.testing.assert_allclose(y, layout**3)
        np.testing.assert_allclose(pair.gradients((layout,), cache)["x"], 3 * layout**3)


def test_jax_a_custom_vjp(rule_of, jax, x):
    assert names(check_jax(rule_of(lambda x, dy: (slope(x, dy),)), jax.numpy.asarray(x, "bfloat16"))) == ["x"]
    said = complaint(check_jax, rule_of(lambda x, dy: (1.0001 * slope(x, dy),)), x, seed=3)
    assert said.startswith("cube: wrong gradient at x[")
    assert said.endswith("check_jax(cube, ..., seed=3)")
    assert not jax.config.jax_enable_x64


RULES = {
    "another forward": ("the forward rule does not return the same values", slope, lambda x: (x**3 + 1, x)),
    "number": ("must produce a tuple of length", lambda x, dy: (dy, dy), None),
    "shape": ("shapes do not match", lambda x, dy: dy[0], None),
    "stopped": ("no gradient reaches x: look for stop_gradient", lambda x, dy: 0 * dy, None),
    "nan": ("is nan", lambda x, dy: dy * np.nan, None),
}


@pytest.mark.parametrize("said, backward, forward", RULES.values(), ids=RULES)
def test_jax_mistakes_in_rules(said, backward, forward, rule_of, x):
    def rule(x, dy):
        dx = backward(x, dy)
        return dx if isinstance(dx, tuple) else (dx,)

    assert said in complaint(check_jax, rule_of(rule, forward) if forward else rule_of(rule), x)


def test_jax_a_callback_may_not_write_or_remember(jax, x):
    def through(host):
        return lambda x: x * jax.pure_callback(host, jax.ShapeDtypeStruct((), x.dtype), jax.lax.stop_gradient(x))

    calls = []
    said = complaint(check_jax, through(lambda x: calls.append(0) or np.asarray(len(calls), x.dtype)), x)
    assert "y: differs between two calls" in said
    assert "the values agree, but y is float32 where all floating-point inputs are float64" in complaint(
        check_jax, lambda x: x.astype("f4"), x, rules=True
    )


def test_jax_pytrees_integers_keys_and_keyword_arguments(jax, x):
    def step(params, ids, key, *, shift, name):
        assert key.dtype == jax.random.key(0).dtype and ids.dtype.kind == "i" and name == "step"
        return {"y": params["w"] * params["b"][0] * shift, "ids": ids}

    params = {"w": x, "b": [jax.numpy.asarray(x, "float32")]}
    report = check_jax(step, params, np.array([1, 1]), jax.random.key(0), shift=jax.numpy.asarray(x), name="step")
    assert names(report) == ["params['b'][0]", "params['w']"]


# As functions are written.


AS_WRITTEN = {
    "a sum, squared": lambda torch, x: ((lambda x: x.sum() ** 2), [x]),
    "einsum": lambda torch, x: ((lambda x: torch.einsum("ij,kj->ik", x, x)), [x]),
    "tanh of a sum": lambda torch, x: ((lambda x: x.sum(-1).tanh()), [x]),
    "a result that is expanded": lambda torch, x: ((lambda x: x[:1].expand(4, 3)), [x]),
    "in place": lambda torch, x: (torch.nn.functional.relu_, [x]),
    "out of a slice": lambda torch, x: ((lambda x: x[0].mul_(2)), [x]),
    "an FFT": lambda torch, x: (torch.fft.fft, [x]),
    "a complex argument": lambda torch, x: ((lambda z: torch.fft.irfft(z * z)), [torch.complex(x, x.flip(0))]),
    "a conjugate": lambda torch, x: ((lambda z: z.conj() * z.real), [torch.complex(x, x.flip(0))]),
    "a sparse argument": lambda torch, x: ((lambda s, x: torch.sparse.mm(s, x.T)), [x.relu().to_sparse(), x]),
    "sparse rows": lambda torch, x: ((lambda s, x: s @ x.T), [x.relu().to_sparse_csr(), x]),
    "a sparse gradient": lambda torch, x: (
        (lambda ids, x: torch.nn.functional.embedding(ids, x, sparse=True)),
        [torch.tensor([1, 0, 1]), x],
    ),
    "a symmetric argument": lambda torch, x: (torch.linalg.cholesky, [x.T @ x + torch.eye(3)]),
    "eigenvalues": lambda torch, x: (torch.linalg.eigvalsh, [x.T @ x + torch.diag(torch.arange(3.0))]),
    "a linear layer in a closure": lambda torch, x: ((lambda x, f=torch.nn.Linear(3, 2): f(x)), [x]),
    "weights in a closure": lambda torch, x: ((lambda x, w=x.float(): (x @ w.T).tanh()), [x]),
    "ones": lambda torch, x: ((lambda x: x @ torch.ones(3, 1)), [x]),
    "dropout": lambda torch, x: ((lambda x: torch.nn.functional.dropout(x, 0.5)), [x.repeat(3, 3)]),
    "running statistics": lambda torch, x: (
        (lambda x, mean, var: torch.nn.functional.batch_norm(x, mean, var, training=True)),
        [torch.cat([x, 2 * x + 1]).requires_grad_(), torch.zeros(3), torch.ones(3)],
    ),
}


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_torch_as_it_is_written(name, torch, x):
    function, args = AS_WRITTEN[name](torch, torch.tensor(x))
    versions = [a._version for a in args]
    report = check_torch(function, *args)
    assert report and [a._version for a in args] == versions
    with pytest.raises(GradientError, match="wrong gradient at"):
        check_torch(lambda *args: scaled(torch, function(*args)), *args)


def scaled(torch, y):
    """y with 1.01 times its gradient."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            return 1.01 * dy

    return Scaled.apply(y if y.layout is torch.strided else y.to_dense())


def test_torch_keyword_arguments_of_any_kind(torch, x):
    x = torch.tensor(x)

    def function(x, *, dtype, size, module, weights, state, rtol, seed):
        assert dtype is torch.float64 and isinstance(size, torch.Size) and (rtol, seed) == (3, "seed")
        return module(x.to(dtype)).reshape(size) * weights[0] * state["w"]

    options = dict(dtype=torch.float64, size=torch.Size([2, 3]), module=torch.nn.Tanh(), weights=[x], state={"w": x})
    assert names(check_torch(function, x, **options, rtol=3, seed="seed", max_elements=2)) == ["x"]


def test_torch_what_is_computed_in_float32_is_said(torch, x):
    report = check_torch(lambda x: x.float().tanh().double(), torch.tensor(x))
    assert report.notes == (
        "y is computed in float32: compared to within its round-off, which may hide derivatives below 0.001",
    )


def test_jax_as_it_is_written(jax, x):
    import jax.numpy as jnp

    def by_value(x, ids):
        return x * int(ids.max())  # which cannot be compiled

    assert names(check_jax(by_value, x, np.array([1, 3])))
    for function in (jnp.fft.fft, jax.jit(jnp.tanh), lambda x: x.sum() ** 2, jnp.cumsum):
        assert names(check_jax(function, x))
        assert names(check_jax(function, x.astype(np.float32), rules=True))
    z = x + 1j * x[::-1]
    assert names(check_jax(lambda z: jnp.conj(z) * z.real, z)) == ["z.real", "z.imag"]
    assert names(check_jax(lambda x, *, w, axis: x @ w["w"][0], x, w={"w": [x.T]}, axis=None)) == ["x"]
    assert check_jax(lambda x: jnp.tanh(x.astype("float32")), x).notes


def test_jax_compiles_the_function_once(jax, x):
    calls = []
    check_jax(lambda x: calls.append(0) or jax.numpy.tanh(x), x, rules={"empty": False})
    assert len(calls) <= 4  # the results, and the forward rule and its linear part


def test_jax_chooses_the_device(x):
    pytest.importorskip("jax")
    with pytest.raises(ValueError, match="device: not an option of check_jax"):
        check_jax(lambda x: x, x, device=None)


@pytest.mark.parametrize("check, library", [(check_torch, "torch"), (check_jax, "jax")])
def test_a_library_that_is_missing(check, library, monkeypatch, x):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"is not installed; .*pip install 'scratchformer\[{library}\]'"):
        check(lambda x: x, x)


SWISH = """
extern "C" __global__ void swish(const REAL* x, REAL* y, int n) {
    int i = blockDim.x * blockIdx.x + threadIdx.x;
    if (i < n) y[i] = x[i] / (1 + exp(-x[i]));
}
"""


def test_a_kernel_on_a_gpu(x):
    try:
        gpu = get_device("gpu")
    except DeviceError as error:
        pytest.skip(str(error))
    cupy = gpu.xp
    slope = cupy.ElementwiseKernel(
        "T dy, T x", "T dx", "T s = 1 / (1 + exp(-x)); dx = dy * (s + x * s * (1 - s))", "swish_backward"
    )

    def swish(x):
        code = SWISH.replace("REAL", "double" if x.dtype == np.float64 else "float")
        y = cupy.empty_like(x)
        cupy.RawKernel(code, "swish")(((x.size + 127) // 128,), (128,), (x, y, np.int32(x.size)))
        return y, x

    assert names(check_gradients(swish, slope, x, device=gpu)) == ["x"]
    assert "wrong gradient at x[" in complaint(
        check_gradients, swish, lambda dy, x: 1.0001 * slope(dy, x), x, device=gpu
    )


@pytest.mark.diagnosis
def test_the_search_for_a_mistake_accepts_a_loss_of_pytorch():
    """The gradient of PyTorch's ctc_loss is that by the logits, whatever the argument's name says."""
    torch = pytest.importorskip("torch")
    log_p = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    targets, lengths = torch.tensor([[1, 2], [3, 1]]), torch.tensor([6, 6])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(GradientError, match="ctc_loss: wrong gradient at log_probs"):
            check_torch(torch.nn.functional.ctc_loss, log_p, targets, lengths, torch.tensor([2, 2]))
