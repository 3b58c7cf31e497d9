"""What holds for every layer and model, on every backend: the cases of `scratchformer.catalogue`."""

import copy
import functools
import inspect
import re

import numpy as np
import pytest

from scratchformer import models, nn
from scratchformer.backend import CPU, to_cpu, to_device
from scratchformer.catalogue import LAYERS, Draw, check
from scratchformer.catalogue.check import check_layer_case
from scratchformer.dispatch import reference_only
from scratchformer.testing import GradientError, check_layer
from scratchformer.testing.contracts import arrays_in, as_tuple, is_array, is_floating, labelled
from scratchformer.testing.strategies import SCALES

LARGE = ("MultiHeadLoop", "TransformerBlock", "DecoderBlock", "Recompute", "Block", "Stack")
MODELS = [name for name in LAYERS if name.partition(",")[0] in models.__all__]
BLOCKS = [name for name in LAYERS if name.startswith(LARGE)]
SMALL = [name for name in LAYERS if name not in MODELS + BLOCKS]


@pytest.fixture
def check_gradients(device, combinations, thorough):
    """A function that checks a case at `count` pairs of a scale of the inputs and one of the parameters, each with
    sizes of its own; on the strict device, which shows where arrays of two kinds meet, at one pair.

    On NumPy with the fast twins, and every second time with the plain references too.
    """

    def check(name, count, **options):
        options = {"max_elements": 40} if thorough else options
        count = count if device is CPU or thorough else 1
        for i, drawn in enumerate(combinations(count, scale=SCALES, parameter_scale=SCALES)):
            draw = functools.partial(Draw, drawn["seed"], drawn["scale"], device, drawn["parameter_scale"])
            check_layer_case(name, draw(), **options)
            if device is CPU and (i % 2 == 0 or thorough):
                with reference_only():
                    check_layer_case(name, draw(), **options)

    return check


@pytest.mark.quick
@pytest.mark.parametrize("name", SMALL)
def test_gradients_of_layers(name, check_gradients):
    """Elements of every tensor and random directions against central differences, and the contract of a layer."""
    check_gradients(name, 4, max_elements=5)


@pytest.mark.quick
@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_of_blocks(name, check_gradients):
    """Directions that move several tensors at once."""
    check_gradients(name, 4, max_elements=0, directions=1, together=8)


@pytest.mark.quick
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_models(name, check_gradients):
    """As for blocks."""
    check_gradients(name, 1, max_elements=0, directions=1, together=8)


@pytest.mark.parametrize("name", BLOCKS + MODELS)
def test_a_wrong_gradient_of_one_parameter_is_found(name, combinations):
    """Wrong by a hundredth, though the checks above move several parameters at once."""
    draw = Draw(1)
    layer, inputs, options = case = LAYERS[name](draw)
    for p in layer.parameters():
        p.data[...] = draw.generator.standard_normal(p.data.shape)
    gradients = run(layer, case, CPU, np.float64)
    size = {n: np.abs(gradients[n]).max() for n in layer.named_parameters()}
    not_zero = [n for n, s in size.items() if s > 1e-6 * max(size.values())]  # as a key's bias has
    for drawn in combinations(1, wrong=not_zero):

        class Wrong(type(layer)):
            def backward(self, dy, cache, name=drawn["wrong"]):
                p = self.named_parameters()[name]
                before = p.grad.copy()
                dx = super().backward(dy, cache)
                p.grad += 0.01 * (p.grad - before)
                return dx

        wrong = copy.deepcopy(layer)
        wrong.__class__ = Wrong
        with pytest.raises(GradientError, match=f"wrong gradient at {re.escape(drawn['wrong'])} along"):
            check_layer(wrong, *inputs, max_elements=0, directions=1, together=8, **options)


@pytest.mark.parametrize("name", LAYERS)
def test_parameters_are_drawn_at_their_scale(name, monkeypatch):
    """All of them, gamma and beta too."""
    checked = []
    monkeypatch.setattr(check, "check_layer", lambda layer, *_, **__: checked.append(layer))
    check_layer_case(name, Draw(parameter_scale=1e2))
    for p in checked[0].parameters():
        assert 3 < np.abs(p.data).mean() < 300


def test_every_layer_has_a_case():
    """So do the layers inside models. (A Frozen layer has none: its purpose is to pass no gradient.)"""
    checked = {type(layer) for name in LAYERS for _, layer in LAYERS[name](Draw()).layer.named_layers()}
    public = {getattr(module, name) for module in (nn, models) for name in module.__all__}
    layers = {c for c in public if isinstance(c, type) and issubclass(c, nn.Layer)}
    assert layers - {nn.Layer, nn.Frozen, models.Model} <= checked


def like(y, draw, move=lambda x: x):
    """Normal random numbers of the shape of y, an array or a tuple of arrays."""
    parts = tuple(move(draw.standard_normal(tuple(part.shape))) for part in as_tuple(y))
    return parts if isinstance(y, tuple) else parts[0]


def run(layer, case, device, dtype):
    """The outputs, and all gradients by name, of a copy of `layer` on `device` and in `dtype`."""
    layer = copy.deepcopy(layer).to(device, dtype)
    move = lambda x: to_device(x, device, dtype if is_floating(x) else None) if is_array(x) else x  # noqa: E731
    inputs = [move(x) for x in case.inputs]
    y, cache = layer.forward(*inputs, **{name: move(x) for name, x in case.options.items()})
    dy = like(y, np.random.default_rng(0), lambda x: to_device(x, device, dtype))
    returned = as_tuple(layer.backward(dy, cache))
    names = [f"input {i}" for i, x in enumerate(inputs) if is_floating(x)]
    gradients = dict(zip(names, returned, strict=True))
    return labelled("y", as_tuple(y)) | gradients | {name: p.grad for name, p in layer.named_parameters().items()}


@pytest.mark.parametrize("name", LAYERS)
def test_float32_stays_float32_and_is_near_float64(name, device):
    case = LAYERS[name](Draw(3, 1.0, device))
    single, double = (run(case.layer, case, device, dtype) for dtype in (np.float32, np.float64))
    for tensor, x in single.items():
        expected = double[tensor]
        assert x.dtype == np.float32 and expected.dtype == np.float64, tensor
        x, expected = to_cpu(x), to_cpu(expected)
        size = np.abs(expected).max()
        floor = 1e-7 if size > 1e-12 else 1e-6  # a gradient that is zero up to rounding, as for the bias of keys
        np.testing.assert_allclose(x, expected, rtol=0, atol=2e-5 * size + floor, err_msg=tensor)


def rms(x):
    return np.sqrt(np.mean(x * x))


def step(case, dtype, moved=0):
    """The choices of forward, such as the signs at ReLU, and the gradients of a copy of the case's layer by name.

    moved: first change every number of the arguments and parameters by up to a unit of float32, drawn with this seed.
    """
    rng = np.random.default_rng(moved)
    move = lambda x: x * (1 + 2**-24 * rng.uniform(-1, 1, x.shape)) if moved else x  # noqa: E731
    arguments = lambda x: move(x.astype(np.float32)).astype(dtype) if is_floating(x) else x  # noqa: E731
    layer = copy.deepcopy(case.layer).to(dtype=dtype)
    for p in layer.parameters():
        p.data[...] = move(p.data)
    inputs, options = map(arguments, case.inputs), {name: arguments(x) for name, x in case.options.items()}
    y, cache = layer.forward(*inputs, **options)
    layer.backward(like(y, np.random.default_rng(0), lambda x: x.astype(np.float32).astype(dtype)), cache)
    chosen = [x.tobytes() for x in arrays_in("cache", cache).values() if not is_floating(x)]
    return chosen, {name: p.grad for name, p in layer.named_parameters().items()}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_in_float32_keep_their_digits(name, combinations):
    """A gradient is about as far from that in float64 as it moves when the last digits of all numbers move. It may be
    further away if the two choose differently, as where a number is so near ReLU's corner that rounding decides.
    """
    compared = 0
    for drawn in combinations(3):
        case = LAYERS[name](Draw(drawn["seed"]))
        with reference_only():
            (chosen, single), (expected, double) = step(case, np.float32), step(case, np.float64)
            _, moved = step(case, np.float64, moved=1)
        if chosen == expected:
            compared += 1
            least = max(map(rms, double.values())) / 100  # the gradient of a key's bias is 0 but for rounding
            for tensor, x in double.items():
                unit = rms(moved[tensor] - x) + 2**-24 * max(rms(x), least)
                assert rms(single[tensor] - x) <= 64 * unit, tensor  # 30 in 40 draws of each model, mostly 1.3
    assert compared


@pytest.mark.parametrize("name", LAYERS)
def test_parameters_start_as_float32(name):
    assert {p.data.dtype for p in LAYERS[name](Draw()).layer.parameters()} <= {np.dtype(np.float32)}


@pytest.mark.parametrize("name", LAYERS)
def test_inputs_are_not_written_to(name):
    """Inputs, parameters and dy may be read-only."""
    case = LAYERS[name](Draw(1))
    for p in case.layer.parameters():
        p.data.flags.writeable = False
    inputs = [x.astype(np.float32) if is_floating(x) else x for x in case.inputs]
    for x in inputs:
        x.flags.writeable = False
    y, cache = case.layer.forward(*inputs, **case.options)
    dy = like(y, np.random.default_rng(0))
    for part in as_tuple(dy):
        part.flags.writeable = False
    case.layer.backward(dy, cache)


@pytest.mark.parametrize("name", LAYERS)
def test_used_twice_the_gradients_add_up(name):
    """Two forwards with different inputs and keys, then both backwards: the sum of what each use gives alone."""
    case = LAYERS[name](Draw(2))
    layer = copy.deepcopy(case.layer).to(dtype=np.float64)
    options = {name: x.astype(np.float64) if is_floating(x) else x for name, x in case.options.items()}
    other = tuple(np.flip(x, axis=1).copy() if x.ndim > 1 else x for x in case.inputs)
    other_options = options if options.get("key") is None else options | {"key": options["key"].fold("other")}
    uses = [(case.inputs, options), (other, other_options)]
    dy = [like(layer(*inputs, **o), np.random.default_rng(i)) for i, (inputs, o) in enumerate(uses)]

    def forward_backward(chosen):
        """The gradients of inputs and parameters after all forwards and then all backwards of the `chosen` uses."""
        layer.zero_grad()
        caches = [layer.forward(*uses[i][0], **uses[i][1])[1] for i in chosen]
        dx = [as_tuple(layer.backward(dy[i], cache)) for i, cache in zip(chosen, caches, strict=True)]
        return dx, [p.grad.copy() for p in layer.parameters()]

    ([dx0], first), ([dx1], second), (dx, both) = (forward_backward(chosen) for chosen in ([0], [1], [0, 1]))
    for found, alone in zip([*dx[0], *dx[1]], [*dx0, *dx1], strict=True):
        np.testing.assert_allclose(found, alone, rtol=1e-9, atol=1e-12)
    for found, a, b in zip(both, first, second, strict=True):
        np.testing.assert_allclose(found, a + b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_calling_a_layer_gives_only_the_output(name):
    case = LAYERS[name](Draw(1))
    y, _ = case.layer.forward(*case.inputs, **case.options)
    for found, expected in zip(as_tuple(case.layer(*case.inputs, **case.options)), as_tuple(y), strict=True):
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("name", [name for name in LAYERS if any(map(is_floating, LAYERS[name](Draw()).inputs))])
def test_inputs_that_are_not_floating_point_arrays(name):
    """Integers and lists are rejected with the name of the input; a layer does not convert them."""
    case = LAYERS[name](Draw(1))
    layer = case.layer.layer if isinstance(case.layer, nn.Recompute) else case.layer
    forward = layer.logits if isinstance(layer, models.Classifier) else layer.forward
    names = [n.replace("ids", "units") for n in inspect.signature(forward).parameters]
    if type(layer) in (nn.Stack, nn.EmbeddingSum):
        names = ["x", "memory"]  # as the parts call their inputs
    for i, x in enumerate(case.inputs):
        if is_floating(x):
            for wrong, found in ((np.ones(x.shape, np.int64), "int64"), (x.tolist(), "list")):
                inputs = (*case.inputs[:i], wrong, *case.inputs[i + 1 :])
                with pytest.raises(TypeError, match=f"^{names[i]}: expected a floating-point array, got {found}"):
                    case.layer.forward(*inputs, **case.options)


@pytest.mark.parametrize("name", LAYERS)
def test_what_a_layer_returned_is_not_written_to(name, monkeypatch):
    """y may be x itself, dx may be dy, and both may be in a cache; so everything returned is made read-only here."""

    def read_only(method):
        @functools.wraps(method)
        def returning(*args, **options):
            result = method(*args, **options)
            returned = result[0] if method.__name__ == "forward" else result
            for part in as_tuple(returned):
                if is_array(part):
                    part.flags.writeable = False
            return result

        return returning

    case = LAYERS[name](Draw(1))
    for cls in {base for _, layer in parts(case.layer) for base in type(layer).__mro__}:
        for method in {"forward", "backward"} & vars(cls).keys():
            monkeypatch.setattr(cls, method, read_only(vars(cls)[method]))
    y, cache = case.layer.forward(*case.inputs, **case.options)
    case.layer.backward(like(y, np.random.default_rng(0)), cache)


def parts(layer):
    """A layer and all layers inside it, including those that it does not list among its children."""
    for name, part in layer.named_layers():
        yield name, part
        if isinstance(part, nn.Recompute):
            yield from parts(part.layer)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_stays_half_between_layers(dtype):
    """In a replica with gradients in float32. In NumPy, a bfloat16 array times a number is float32."""
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16

    def narrow(x):
        return x.astype(dtype) if is_floating(x) else x

    def watch(layer, method):
        function = getattr(layer, method)

        def watched(*args, **options):
            result = function(*args, **options)
            found = result[0] if method == "forward" else result
            wide = [x.dtype for x in as_tuple(found) if is_floating(x) and x.dtype != dtype]
            assert not wide, f"{method} of {type(layer).__name__} in {name} returns {wide}"
            return result

        layer.__dict__[method] = watched

    for name in LAYERS:
        case = LAYERS[name](Draw(0))
        if not case.layer.parameters():
            continue
        master = case.layer.to(dtype=np.float32)
        layer = master.replica(master.flat.data.astype(dtype), master.flat.grad)
        for _, part in layer.named_layers():
            watch(part, "forward")
            watch(part, "backward")
        y, cache = layer.forward(*map(narrow, case.inputs), **{k: narrow(x) for k, x in case.options.items()})
        layer.backward(tuple(map(np.ones_like, y)) if isinstance(y, tuple) else np.ones_like(y), cache)
        assert master.flat.grad.dtype == np.float32 and master.flat.grad.any()
