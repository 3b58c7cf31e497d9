"""check of layers that keep what their backward needs."""

import numpy as np
import pytest

from scratchformer.testing import GradientError, check

from .reports import complaint, names


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(2, 3))


class Linear:
    """The gradients are in dW and db; `scale` plants a mistake."""

    scale = 1.0

    def __init__(self):
        self.W = np.random.default_rng(1).normal(size=(3, 3)).astype(np.float32)
        self.b = np.zeros(3, np.float32)

    def forward(self, x):
        self.x = x
        return x @ self.W + self.b

    def backward(self, dout):
        self.dW = self.scale * self.x.T @ dout
        self.db = dout.sum(axis=0)
        return dout @ self.W.T


class Adding(Linear):
    """Gradients are in a dict, and added to."""

    def __init__(self):
        super().__init__()
        self.params = {"W": self.W, "b": self.b}
        self.grads = {name: np.zeros_like(p) for name, p in self.params.items()}

    def backward(self, dout):
        self.grads["W"] += self.scale * self.x.T @ dout
        self.grads["b"] += dout.sum(axis=0)
        return dout @ self.W.T


class Cached(Linear):
    """forward returns (out, cache)."""

    def forward(self, x):
        return x @ self.W + self.b, (x, self.W)

    def backward(self, dout, cache):
        x, w = cache
        self.grads = [self.scale * x.T @ dout, dout.sum(axis=0)]
        return (dout @ w.T,)


class Dropout:
    def __call__(self, x, training=True):
        self.mask = np.random.rand(*x.shape) < 0.5 if training else True  # noqa: NPY002
        return x * self.mask

    def backward(self, dout):
        return dout * self.mask


class Loss:
    def forward(self, x, target):
        self.x, self.target = x, target
        return ((x - target) ** 2).sum()

    def backward(self):
        return 2 * (self.x - self.target)


class Network:
    def __init__(self, *layers):
        self.layers, self.dropout = list(layers), Dropout()

    def forward(self, x):
        for layer in self.layers:
            x = self.dropout(layer.forward(x))
        return x

    def backward(self, dout):
        for layer in reversed(self.layers):
            dout = layer.backward(self.dropout.mask * dout)
        return dout


class Resetting(Linear):
    """forward resets the gradients to a number, which other attributes share."""

    axis = None

    def forward(self, x):
        self.dW, self.db, self.axis = 0, 0, 0
        return super().forward(x)

    def backward(self, dout):
        self.dW = self.dW + self.scale * self.x.T @ dout
        self.db = self.db + dout.sum(axis=self.axis)
        return dout @ self.W.T


GRADIENTS = {
    Linear: {"W": "dW", "b": "db"},
    Adding: {"params.W": "grads.W", "params.b": "grads.b"},
    Cached: {"W": "grads.0", "b": "grads.1"},
    Resetting: {"W": "dW", "b": "db"},
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_a_layer_that_keeps_its_gradients(kind, x, monkeypatch):
    layer, gradients = kind(), GRADIENTS[kind]
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    report = check(layer, x, gradients=gradients)
    assert names(report) == ["x", *gradients] and not report.notes
    assert not hasattr(layer, "x") and np.array_equal(state, np.random.get_state()[1])  # noqa: NPY002
    layer.forward(x)
    assert names(check(layer, x, gradients=gradients)) == names(report)  # one that has run already
    monkeypatch.setattr(kind, "scale", 1.0001)
    said = complaint(check, layer, x, seed=3, gradients=gradients)
    assert f"{kind.__name__}: wrong gradient at {next(iter(gradients))}[" in said
    assert said.endswith(f"check({kind.__name__}, ..., seed=3)")
    assert names(check(layer, x)) == ["x"]  # the parameters are those that are named


def test_a_network_of_layers_and_a_loss(x):
    gradients = {"layers.0.W": "layers.0.dW", "layers.0.b": "layers.0.db"}
    network = Network(Linear(), Adding())
    assert "wrong gradient" in complaint(check, network, x)  # the mask of the first layer is that of the second
    network = Network(Linear())
    assert names(check(network, x, gradients=gradients)) == ["x", "layers.0.W", "layers.0.b"]
    network.layers[0].scale = 1.01
    assert "Network: wrong gradient at layers.0.W[" in complaint(check, network, x, gradients=gradients)
    assert names(check(Dropout(), x)) == names(check(Dropout(), x, training=False)) == ["x"]
    assert names(check(Loss(), x, target=-x)) == ["x"]
    message = "backward: expected 2 gradients, of x, target, got 1; pass an input without one by keyword"
    assert message in complaint(check, Loss(), x, -x)


def test_what_a_layer_remembers_of_an_earlier_call(x):
    class Stale(Linear):
        x = None

        def forward(self, x):
            self.x = x if self.x is None else self.x
            return x @ self.W + self.b

    assert "Stale: wrong gradient at W[" in complaint(check, Stale(), x, gradients={"W": "dW"})


def test_what_a_layer_may_not_return_or_be(x):
    with pytest.raises(TypeError, match=r"expected an object, got the class Linear: write Linear\(...\)"):
        check(Linear, x)
    with pytest.raises(ValueError, match=r"^order: expected 1, got 2$"):
        check(Linear(), x, order=2)

    class Stepping(Linear):
        def backward(self, dout, rate):
            return super().backward(dout)

    with pytest.raises(GradientError, match=r"whose backward takes dout and rate, must return the pair"):
        check(Stepping(), x)
    for gradients in ({"V": "dV"}, {"W": "dV"}):
        with pytest.raises(AttributeError, match=r"'Linear' object has no attribute '\w*V'"):
            check(Linear(), x, gradients=gradients)
