"""check_layer: correct layers pass, and every breach of the contract is found."""

import copy

import numpy as np
import pytest

from scratchformer import nn
from scratchformer.backend import CPU, array_module, to_device
from scratchformer.nn import Layer
from scratchformer.testing import GradientError, check_layer

from .reports import complaint


class Param:
    def __init__(self, data):
        self.data, self.grad = data, np.zeros_like(data)


class Affine:
    """y = x w + b: a layer without the package's own base class."""

    def __init__(self, d_in=3, d_out=2):
        rng = np.random.default_rng(0)
        self.w = Param(rng.standard_normal((d_in, d_out), np.float32))
        self.b = Param(rng.standard_normal(d_out, np.float32))

    def named_parameters(self):
        return {"w": self.w, "b": self.b}

    def zero_grad(self):
        for p in self.named_parameters().values():
            p.grad[...] = 0

    def to(self, device=None, dtype=None):
        for p in self.named_parameters().values():
            p.data, p.grad = to_device(p.data, device, dtype), to_device(p.grad, device, dtype)
        return self

    def forward(self, x):
        return x @ self.w.data + self.b.data, x

    def backward(self, dy, x):
        self.w.grad += x.T @ dy
        self.b.grad += dy.sum(axis=0)
        return dy @ self.w.data.T


class Table(Affine):
    """A layer with integer input, so there is nothing to pass back."""

    def forward(self, ids):
        return self.w.data[ids], ids

    def backward(self, dy, ids):
        array_module(dy).add.at(self.w.grad, ids, dy)


class Bilinear(Affine):
    """Two inputs and a parameter each: y = (x w) * (memory w) + b."""

    def forward(self, x, memory, power=2):
        left, right = x @ self.w.data, memory @ self.w.data
        return left * right**power + self.b.data, (x, memory, left, right, power)

    def backward(self, dy, cache):
        x, memory, left, right, power = cache
        dleft, dright = dy * right**power, dy * left * power * right ** (power - 1)
        self.w.grad += x.T @ dleft + memory.T @ dright
        self.b.grad += dy.sum(axis=0)
        return dleft @ self.w.data.T, dright @ self.w.data.T


class Nested(Affine):
    """Full names with dots."""

    def named_parameters(self):
        return {"blocks.0.query.w": self.w, "blocks.0.query.b": self.b}


X = np.random.default_rng(1).standard_normal((4, 3))


def fails(layer, *inputs, **options):
    return complaint(check_layer, layer, *(inputs or [X]), **options)


def test_right_layers(device):
    assert [row.tensor for row in check_layer(Affine(), X, device=device)] == ["x", "w", "b"]
    assert [row.tensor for row in check_layer(Table(), np.array([0, 2, 2]), device=device)] == ["w", "b"]
    rows = check_layer(Bilinear(), X, X[::-1] * 1e-3, power=3, device=device)
    assert [row.tensor for row in rows] == ["x", "memory", "w", "b"]


@pytest.mark.parametrize("scale", [1e-3, 1e-1, 1.0, 1e2])
def test_scales(scale):
    check_layer(Affine(), X * scale)
    check_layer(Bilinear(), X * scale, X / scale)


def test_the_callers_layer_is_not_changed():
    layer = Affine()
    layer.w.grad += 3
    before = copy.deepcopy(layer)
    check_layer(layer, X)
    for name, p in layer.named_parameters().items():
        twin = before.named_parameters()[name]
        assert p.data.dtype == np.float32
        assert np.array_equal(p.data, twin.data) and np.array_equal(p.grad, twin.grad)


def test_message_names_parameter_and_element():
    class WrongOnce(Nested):
        def backward(self, dy, x):
            dw = x.T @ dy
            dw[2, 1] *= 1 + 1e-5
            self.w.grad += dw
            self.b.grad += dy.sum(axis=0)
            return dy @ self.w.data.T

    message = fails(WrongOnce(), seed=5)
    assert "WrongOnce: wrong gradient at blocks.0.query.w[2, 1]:" in message
    assert "check_layer(WrongOnce(...), ..., seed=5)" in message


@pytest.mark.parametrize("together", [2, 3, 100])
def test_a_small_wrong_gradient_moved_with_larger_ones_is_found(together):
    """A gradient a millionth of the others', wrong by a hundredth; it is compared by itself, and named."""

    class Wrong(Affine):
        def backward(self, dy, x):
            dx = super().backward(dy, x)
            self.b.grad += 0.01 * dy.sum(axis=0)
            return dx

    layer = Wrong()
    layer.b.data *= 1e-6  # its scale
    options = {"max_elements": 0, "directions": 1, "together": together}
    assert "wrong gradient at b along" in fails(layer, X, **options)
    assert [row.elements for row in check_layer(Affine(), X, **options)] == [0, 0, 0]


def test_wrong_input_gradient():
    class Wrong(Affine):
        def backward(self, dy, x):
            return super().backward(dy, x) * 1.001

    assert "wrong gradient at x[" in fails(Wrong())


def test_missing_and_superfluous_input_gradients():
    class Missing(Affine):
        def backward(self, dy, x):
            super().backward(dy, x)

    class Superfluous(Table):
        def backward(self, dy, ids):
            super().backward(dy, ids)
            return dy

    assert "0 gradient(s) for 1 floating-point argument(s): x" in fails(Missing())
    assert "1 gradient(s) for 0 floating-point argument(s): none" in fails(Superfluous(), np.array([0, 1]))


class Stateful(Affine):
    def forward(self, x):
        self.x = x
        return super().forward(x)

    def backward(self, dy, cache):
        return super().backward(dy, self.x)


def test_activation_kept_on_the_layer(device):
    assert "used twice before backward" in fails(Stateful(), device=device)


@pytest.mark.parametrize("x", [np.ones((4, 3)), np.zeros((4, 3)), np.full((1, 3), -2.0)])
def test_activation_kept_on_the_layer_where_all_of_them_are_equal(x, device):
    """The second use has other numbers even if reordering would not change anything."""
    assert "used twice before backward" in fails(Stateful(), x, device=device)


def test_one_mask_for_two_uses():
    class Mask(Affine):
        def forward(self, x):
            self.positive = x > 0
            return x * self.positive, None

        def backward(self, dy, cache):
            return dy * self.positive

    message = fails(Mask())
    assert "x: is wrong when the layer is used twice before backward" in message


def test_gradient_overwritten():
    class Overwrites(Affine):
        def backward(self, dy, x):
            self.w.grad[...] = 0
            return super().backward(dy, x)

    assert "w: backward does not add to the gradient" in fails(Overwrites())


def test_a_cache_that_keeps_the_first_dy(device):
    class Keeps(Affine):
        def forward(self, x):
            return super().forward(x)[0], {"x": x}

        def backward(self, dy, cache):
            dx = super().backward(cache.setdefault(self.kept, dy.copy()), cache["x"])
            return dx if self.kept == "dy" else dy @ self.w.data.T

    Keeps.kept = "dy"
    assert "x: backward gives a different gradient when called again" in fails(Keeps(), device=device)
    Keeps.kept = "for parameters"
    message = "w: backward does not add to the gradient, or adds a different one when called again with the same cache"
    assert message in fails(Keeps(), device=device)


def test_gradient_left_out():
    class Forgets(Affine):
        def backward(self, dy, x):
            self.w.grad += x.T @ dy
            return dy @ self.w.data.T

    assert "wrong gradient at b[" in fails(Forgets())


def test_tied_weights_with_one_of_two_gradients():
    class Half(Bilinear):
        def backward(self, dy, cache):
            x, _, _, right, power = cache
            dx, dmemory = super().backward(dy, cache)
            self.w.grad -= x.T @ (dy * right**power)
            return dx, dmemory

    assert "wrong gradient at w[" in fails(Half(), X, X[::-1].copy())


@pytest.mark.parametrize(
    "target, message", [("data", "forward writes to w"), ("grad", "forward writes to gradient of w")]
)
def test_forward_that_writes(target, message):
    class Writes(Affine):
        def forward(self, x):
            array = getattr(self.w, target)
            array += 1
            return super().forward(x)

    assert message in fails(Writes())


def test_backward_that_writes_to_parameters_or_dy():
    class Steps(Affine):
        def backward(self, dy, x):
            dx = super().backward(dy, x)
            self.w.data -= 0.1 * self.w.grad
            return dx

    class Scales(Affine):
        def backward(self, dy, x):
            dy *= 1.5
            return super().backward(dy, x)

    assert "backward writes to w" in fails(Steps())
    assert "backward writes to dy" in fails(Scales())


def test_returned_arrays_that_are_parameters(device):
    class Whole(Affine):
        def forward(self, ids):
            return self.w.data, None

        def backward(self, dy, _):
            self.w.grad += dy

    class GradReturned(Affine):
        def forward(self, x):
            return x * self.b.data, x

        def backward(self, dy, x):
            self.b.grad += (x * dy).sum(axis=0)
            self.b.grad.reshape(1, -1)
            return self.b.grad.reshape(1, -1)

    assert "y shares memory with w" in fails(Whole(), np.array([1]), device=device)
    layer = GradReturned()
    layer.b.data[...] = 1
    message = fails(layer, np.ones((1, 2)), device=device)
    assert "gradient of x shares memory with gradient of b" in message


def test_shallow_deepcopy():
    class Shallow(Affine):
        def __deepcopy__(self, memo):
            return copy.copy(self)

    assert "w of a deep copy shares memory with w" in fails(Shallow())


def test_a_backward_that_writes_in_float32(device):
    class Writes(Affine):
        def backward(self, dy, x):
            if dy.dtype == np.float32:
                self.b.data += 1
            return super().backward(dy, x)

    assert "backward in float32 writes to b" in fails(Writes(), device=device)


def test_float64_leak():
    class Leaks(Affine):
        def forward(self, x):
            y, cache = super().forward(x)
            return y * np.sqrt(np.float64(4)), cache

        def backward(self, dy, x):
            return super().backward(2 * dy, x)

    assert "y is float64" in fails(Leaks())


class Rebinds(Affine):
    """Assigns a new gradient array, which an optimizer that holds the first one never sees."""

    def backward(self, dy, x):
        self.w.grad = self.w.grad + x.T @ dy
        self.b.grad += dy.sum(axis=0)
        return dy @ self.w.data.T


class RebindsLayer(Rebinds, Layer):
    """The same with the package's own base class, whose Params copy an assigned array into the first one."""

    def __init__(self):
        Affine.__init__(self)
        self.w, self.b = nn.Param(self.w.data, "w"), nn.Param(self.b.data, "b")

    named_parameters, zero_grad, to = Layer.named_parameters, Layer.zero_grad, Layer.to


class Exchanges(RebindsLayer):
    """Replaces the Param by a new one."""

    def backward(self, dy, x):
        dx = super().backward(dy, x)
        w, self.w = self.w, nn.Param(self.w.data, "w")
        self.w.grad[...] = w.grad
        return dx


def test_an_exchanged_gradient_is_found():
    assert "gradient of w was replaced by another array" in fails(Rebinds())
    assert "w was replaced by another array" in fails(Exchanges())
    layer = RebindsLayer()
    assert layer.flat
    check_layer(layer, np.ones((4, 3)))


def test_frozen_parameters_need_no_gradient():
    class HalfFrozen(RebindsLayer):
        def __init__(self):
            super().__init__()
            self.b.frozen = True

        def backward(self, dy, x):
            self.w.grad += x.T @ dy
            return dy @ self.w.data.T

    assert [row.tensor for row in check_layer(HalfFrozen(), np.ones((4, 3)))] == ["x", "w"]
    thawed = HalfFrozen()
    thawed.b.frozen = False
    assert "b[" in fails(thawed)


def test_hidden_randomness():
    class Noise(Affine):
        rng = np.random.default_rng(0)

        def forward(self, x):
            mask = self.rng.random(x.shape) < 0.5
            return x * mask, mask

        def backward(self, dy, mask):
            return dy * mask

    assert "Noise: " in fails(Noise())


class Without(Affine):
    """No parameters."""

    def named_parameters(self):
        return {}

    def forward(self, x):
        return 2.0 * x, None

    def backward(self, dy, _):
        return None if dy.size == 3 else 7 * dy


@pytest.mark.parametrize(
    "layer, x, message",
    [
        (Without(), np.arange(3), "nothing to check: expected a floating-point array, got x: int64"),
        (Without(), np.zeros((0, 3)), "x: expected at least one element, got shape (0, 3)"),
        (Affine(0, 2), np.ones((4, 0)), "x: expected at least one element, got shape (4, 0)"),
        (Affine(3, 0), X, "w: expected at least one element, got shape (3, 0)"),
        (Table(), np.zeros(0, int), "y: expected at least one element, got (0, 2)"),
        (Affine(), X * np.nan, "x[0, 0] is nan (12 elements are not finite)"),
    ],
)
def test_nothing_to_compare(layer, x, message):
    with pytest.raises(ValueError) as caught:
        check_layer(layer, x)
    assert str(caught.value) == message


@pytest.mark.parametrize("options", [{"max_elements": 0, "directions": 0}, {"together": 0}], ids=str)
def test_options_with_which_any_gradient_would_pass(options):
    with pytest.raises(ValueError, match="expected"):
        check_layer(Affine(), X, **options)


def test_the_same_bits_twice_on_a_cpu(device):
    class Noisy(Affine):
        rng = np.random.default_rng(0)

        def backward(self, dy, x):
            dx = super().backward(dy, x)
            self.b.grad *= 1 + 1e-14 * self.rng.uniform(0.5, 1)
            return dx

    if device is CPU:
        assert "b: the last digits differ between two runs on the same numbers" in fails(Noisy())
        check_layer(Noisy(), X, rules={"same_bits": False})
    else:
        check_layer(Noisy(), X, device=device)


def test_faults_in_the_gradient_of_a_parameter(device):
    """A clipped one, and one that is wrong without rows."""

    class Clipped(Affine):
        def backward(self, dy, x):
            dw = x.T @ dy
            self.w.grad += dw.clip(-100, 100)
            self.b.grad += dy.sum(axis=0)
            return dy @ self.w.data.T

    class Mean(Affine):
        def backward(self, dy, x):
            self.w.grad += x.T @ dy
            self.b.grad += dy.sum(axis=0) / len(dy) * len(dy) if len(dy) else 1
            return dy @ self.w.data.T

    message = fails(Clipped(), device=device)
    assert "Clipped: the values agree, but backward is not linear in dy: for −1024 dy, gradient of w[" in message
    assert "with x of length 0, gradient of b[0] is 1, not 0" in fails(Mean(), device=device)
    check_layer(Mean(), X, rules={"empty": False}, device=device)


def test_outputs_in_a_list():
    class Two(Affine):
        def named_parameters(self):
            return {"w": self.w}

        def forward(self, x):
            return [x @ self.w.data, x * 2], x

        def backward(self, dy, x):
            self.w.grad += x.T @ dy[0]
            return dy[0] @ self.w.data.T + 2 * dy[1]

    check_layer(Two(), X)


def test_complex_inputs_are_refused_by_name():
    with pytest.raises(TypeError, match=r"^x: expected real numbers, got complex128$"):
        check_layer(nn.Linear(2, 3), np.ones((4, 2), complex))


class Kept:
    """No Layer, and no container in which parameters are looked for."""

    def __init__(self):
        self.linear = nn.Linear(3, 3)


@pytest.mark.parametrize("keep", [lambda linear: {linear}, lambda linear: Kept()])
def test_parameters_that_no_optimizer_would_find(keep):
    class Lost(Layer):
        def __init__(self):
            self.parts = keep(nn.Linear(3, 3))

        def forward(self, x):
            return 2 * x, None

        def backward(self, dy, cache):
            return 2 * dy

    with pytest.raises(GradientError, match=r"the parameter (w|b) \(3,.*\) is not among named_parameters\(\)"):
        check_layer(Lost(), np.ones((2, 3)))
