"""check of layers that keep what their backward needs, and of values that remember how they were computed."""

import numpy as np
import pytest

from scratchformer.testing import GradientError, check


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(2, 3))


def complaint(*args, **options):
    with pytest.raises(GradientError) as caught:
        check(*args, **options)
    return str(caught.value)


def names(report):
    return [row.tensor for row in report]


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


class Listed(Linear):
    """Gradients are in a list, and written into."""

    def __init__(self):
        super().__init__()
        self.params = [self.W, self.b]
        self.grads = [np.zeros_like(self.W), np.zeros_like(self.b)]

    def backward(self, dout):
        self.grads[0][...] = self.scale * self.x.T @ dout
        self.grads[1][...] = dout.sum(axis=0)
        return dout @ self.W.T


class Cached(Linear):
    """forward returns (out, cache)."""

    def forward(self, x):
        return x @ self.W + self.b, (x, self.W)

    def backward(self, dout, cache):
        x, w = cache
        self.grads = {"W": self.scale * x.T @ dout, "b": dout.sum(axis=0)}
        return (dout @ w.T,)


class Silent(Linear):
    """Nothing is returned."""

    def forward(self, inputs):
        self.output = super().forward(inputs)

    def backward(self, dvalues):
        self.dinputs = super().backward(dvalues)


class Parameter:
    def __init__(self, data):
        self.data, self.grad = data, None


class Boxed(Linear):
    """Parameters are objects."""

    def __init__(self):
        super().__init__()
        self.W, self.b = Parameter(self.W), Parameter(self.b)

    def forward(self, x):
        self.x = x
        return x @ self.W.data + self.b.data

    def backward(self, dout):
        self.W.grad, self.b.grad = self.scale * self.x.T @ dout, dout.sum(axis=0)
        return dout @ self.W.data.T


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


PARAMETERS = {
    Linear: ("W", "b"),
    Adding: ("W", "b"),
    Listed: ("params[0]", "params[1]"),
    Cached: ("W", "b"),
    Silent: ("W", "b"),
    Boxed: ("W.data", "b.data"),
}


@pytest.mark.parametrize("kind", PARAMETERS)
def test_a_layer_that_keeps_its_gradients(kind, x, monkeypatch):
    layer = kind()
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    report = check(layer, x)
    assert set(names(report)[1:]) == set(PARAMETERS[kind]) and not report.notes
    assert not hasattr(layer, "x") and np.array_equal(state, np.random.get_state()[1])  # noqa: NPY002
    layer.forward(x)
    assert names(check(layer, x)) == names(report)  # one that has run already
    monkeypatch.setattr(kind, "scale", 1.0001)
    said = complaint(layer, x, seed=3)
    assert f"{kind.__name__}: wrong gradient at {PARAMETERS[kind][0]}[" in said
    assert said.endswith(f"check({kind.__name__}, ..., seed=3)")


def test_a_network_of_layers_and_a_loss(x):
    network = Network(Linear(), Adding())
    assert "wrong gradient" in complaint(network, x)  # the mask of the first layer is that of the second
    network = Network(Linear())
    assert names(check(network, x)) == ["x", "layers[0].W", "layers[0].b"]
    network.layers[0].scale = 1.01
    assert "Network: wrong gradient at layers[0].W[" in complaint(network, x)
    assert names(check(Dropout(), x)) == names(check(Dropout(), x, training=False)) == ["x"]
    report = check(Loss(), x, -x)
    assert names(report) == ["x"] and report.notes == ("target: not checked, since backward gives no gradient for it",)


def test_what_a_layer_remembers_of_an_earlier_call(x):
    class Stale(Linear):
        x = None

        def forward(self, x):
            self.x = x if self.x is None else self.x
            return x @ self.W + self.b

    assert "Stale: wrong gradient at W[" in complaint(Stale(), x)


def test_an_array_without_a_gradient_is_named(x):
    class Scaled(Linear):
        def __init__(self):
            super().__init__()
            self.gain, self.unused = np.full(3, 2.0), np.ones(3)

        def forward(self, x):
            return self.gain * super().forward(x)

        def backward(self, dout):
            return super().backward(self.gain * dout)

    report = check(Scaled(), x)
    assert names(report) == ["x", "W", "b"]
    assert report.notes == ("gain: not checked, since backward gives no gradient for it",)


def test_an_array_with_a_gradient_that_does_not_matter_is_named(x):
    class Dead(Linear):
        def forward(self, x):
            return 0 * super().forward(x)

        def backward(self, dout):
            return super().backward(0 * dout)

    report = check(Dead(), x)
    assert names(report) == ["x"]
    assert report.notes == tuple(f"{n}: not checked, since y does not change with it" for n in ("W", "b"))


class Returning(Linear):
    """The gradients of parameters are returned after those of the inputs, in `form`."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def backward(self, dout):
        dx, dw, db = dout @ self.W.T, self.x.T @ dout, dout.sum(axis=0)
        return self.form(dx, dw, db)


class Keeping(Returning):
    def backward(self, dout):
        super(Returning, self).backward(dout)
        return super().backward(dout)


FORMS = [
    lambda dx, dw, db: (dx, dw, db),
    lambda dx, dw, db: (dx, db, dw),
    lambda dx, dw, db: [dx, dw, db],
    lambda dx, dw, db: (dx, {"b": db, "W": dw}),
    lambda dx, dw, db: (dx, {"dW": dw, "db": db}),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [Returning, Keeping])
def test_a_layer_that_returns_the_gradients_of_its_parameters(kind, form, x):
    report = check(kind(form), x)
    assert names(report) == ["x", "W", "b"] and not report.notes
    for wrong in (1.0001, 2), (1, 1.0001):
        said = complaint(kind(lambda dx, dw, db, wrong=wrong: form(dx, wrong[0] * dw, wrong[1] * db)), x)
        which = "W" if wrong[0] != 1 else "b"
        kept = f"backward returns another gradient of {which} than it keeps in d{which}"
        assert (kept if kind is Keeping else f"wrong gradient at {'b' if wrong[1] != 1 else 'W'}[") in said


def test_returned_gradients_of_arrays_of_one_shape(x):
    class Gate(Linear):
        """Two parameters of one shape: their gradients come in the order in which they were made."""

        def __init__(self, exchanged=False):
            super().__init__()
            self.V, self.exchanged = 2 * self.W.T.copy(), exchanged

        def forward(self, x):
            self.x = x
            return (x @ self.W) * (x @ self.V)

        def backward(self, dout):
            dw, dv = self.x.T @ (dout * (self.x @ self.V)), self.x.T @ (dout * (self.x @ self.W))
            dx = (dout * (self.x @ self.V)) @ self.W.T + (dout * (self.x @ self.W)) @ self.V.T
            return (dx, dv, dw) if self.exchanged else (dx, dw, dv)

    assert names(check(Gate(), x)) == ["x", "W", "V"]
    assert "and others of W (9)" in complaint(Gate(exchanged=True), x)

    class Scaled(Returning):
        def forward(self, x):
            return super().forward(x) + self.shift

    def scaled(form):
        layer = Scaled(form)
        layer.shift = np.ones(3)
        return layer

    with pytest.raises(TypeError, match=r"cannot tell of which of b, shift the returned gradient of shape \(3,\) is"):
        check(scaled(FORMS[0]), x)
    report = check(scaled(FORMS[3]), x)
    assert names(report) == ["x", "W", "b"]
    assert report.notes == ("shift: not checked, since backward gives no gradient for it",)


def test_what_a_layer_may_not_return_or_be(x):
    with pytest.raises(
        GradientError, match=r"returned a gradient of shape \(3, 3\) that is of no .* input and no param"
    ):
        check(Returning(lambda dx, dw, db: (dx, dw, db, dw)), x)
    with pytest.raises(TypeError, match=r"expected an object, got the class Linear: write Linear\(...\)"):
        check(Linear, x)
    with pytest.raises(ValueError, match=r"^order: expected 1, got 2$"):
        check(Linear(), x, order=2)

    class Stepping(Linear):
        def backward(self, dout, rate):
            return super().backward(dout)

    with pytest.raises(GradientError, match=r"^forward, whose backward takes dout and rate, must return the pair"):
        check(Stepping(), x)


def test_private_parameters_and_slots(x):
    class Private:
        __slots__ = ("_W", "_dW", "x")

        def __init__(self):
            self._W = np.random.default_rng(1).normal(size=(3, 3))

        def forward(self, x):
            self.x = x
            return x @ self._W

        def backward(self, dout):
            self._dW = self.x.T @ dout
            return dout @ self._W.T

    assert names(check(Private(), x)) == ["x", "_W"]


# Values that remember how they were computed.


class Value:
    def __init__(self, data, parents=()):
        self.data, self.grad, self.parents, self.push = data, 0, parents, lambda: None

    def __add__(self, other):
        y = type(self)(self.data + other.data, (self, other))
        y.push = lambda: [x.add(y.grad) for x in (self, other)]
        return y

    def __mul__(self, other):
        y = type(self)(self.data * other.data, (self, other))
        y.push = lambda: (self.add(other.data * y.grad), other.add(self.data * y.grad))
        return y

    def add(self, gradient):
        self.grad += gradient

    def backward(self):
        order = []

        def visit(x):
            if x not in order:
                [visit(parent) for parent in x.parents]
                order.append(x)

        visit(self)
        self.grad = 1
        for x in reversed(order):
            x.push()


class Forgetful(Value):
    def add(self, gradient):
        self.grad = gradient


class Seeded(Value):
    """backward gets dy."""

    def backward(self, dy):
        super().backward()
        for x in self.parents:
            x.grad = x.grad * dy


def polynomial(a, b):
    return [a * b[0] + a, {"square": b[0] * b[0]}, 3]


def test_values():
    assert names(check(polynomial, Value(2.0), [Value(3)])) == ["a", "b[0]"]  # also whole numbers
    assert "polynomial: wrong gradient at b[0]:" in complaint(polynomial, Forgetful(2.0), [Forgetful(3.0)])
    assert names(check(lambda a, b: a * b, Seeded(np.ones((2, 3))), Seeded(np.arange(3.0)[None] + np.ones((2, 1)))))
    with pytest.raises(TypeError, match=r"expected values with backward\(\) as results"):
        check(lambda a: 3, Value(2.0))
    with pytest.raises(TypeError, match=r"y\[0\]: expected a number as the result, got shape \(2,\): .* sum"):
        check(lambda a: [a * a], Value(np.ones(2)))


@pytest.mark.parametrize("kind", [Value, Forgetful])
def test_a_network_of_values(kind):
    class Neuron:
        def __init__(self):
            self.w = [kind(1.0), kind(-2.0)]

        def __call__(self, x):
            return self.w[0] * x + self.w[1] * x

        def parameters(self):
            return self.w

    neuron = Neuron()
    if kind is Value:
        assert names(check(neuron, Value(3.0))) == ["x", "parameters()[0]", "parameters()[1]"]
        neuron.__class__.__call__ = lambda self: self.w[0] * self.w[1]
        assert names(check(neuron)) == ["parameters()[0]", "parameters()[1]"]  # a loss without arguments
    else:
        assert "Neuron: wrong gradient at x:" in complaint(neuron, Forgetful(3.0))
    assert [w.data for w in neuron.w] == [1.0, -2.0] and not any(w.grad for w in neuron.w)
