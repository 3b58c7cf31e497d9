"""A training step in float32 is float32 throughout: no operation or layer returns a float64 array."""

import functools
from collections.abc import Mapping

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import CPU, array_module
from scratchformer.compiler.twins import PlannedCall
from scratchformer.dispatch import Twin
from scratchformer.optim import SGD, Adam, AdamW, Cosine, clip_by_global_norm
from scratchformer.rng import Key
from scratchformer.testing.strict import STRICT, DeviceArray
from scratchformer.training import Replicas

BODIES = [
    {"norm": "pre"},
    {"norm": "post", "activation": "gelu"},
    {"norm": "pre", "activation": "gelu_tanh", "positions": "sinusoidal", "recompute": True, "bias": True},
    {"norm": "post", "wide": True, "positions": "none"},
]


def arrays_in(x):
    """Every array in nested tuples, lists, mappings and objects with fields. (A twin's cache also names its code.)"""
    if isinstance(x, Twin | PlannedCall):
        return
    if isinstance(x, tuple | list):
        for part in x:
            yield from arrays_in(part)
    elif isinstance(x, Mapping):
        yield from arrays_in(list(x.values()))
    elif hasattr(x, "dtype"):
        yield x
    elif hasattr(x, "__dict__") and not isinstance(x, type):
        yield from arrays_in(list(vars(x).values()))


class Watch:
    """Wraps functions to inspect every array that they return."""

    def __init__(self):
        self.calls = set()

    def __call__(self, name, function):
        @functools.wraps(function)
        def watched(*args, **options):
            result = function(*args, **options)
            self.calls.add(name)
            for array in arrays_in(result):
                assert array.dtype not in (np.float64, np.complex128), f"{name} returns {array.dtype} {array.shape}"
            return result

        return watched


@pytest.fixture
def watch(monkeypatch):
    """Watches all operations; call it with a model to watch its layers too."""
    watch = Watch()
    for name in ops.__all__:
        if name[0].islower():
            monkeypatch.setattr(ops, name, watch(name, getattr(ops, name)))

    def watch_layers(model):
        for name, layer in model.named_layers():
            for method in "forward", "backward":
                layer.__dict__[method] = watch(f"{name}.{method}", getattr(layer, method))
        return watch

    return watch_layers


def test_the_watch_sees_an_array_however_deep():
    with pytest.raises(AssertionError, match="f returns float64"):
        Watch()("f", lambda: ([{"a": (1, np.float32(2), np.zeros(3))}],))()


@pytest.mark.parametrize("kind", ["LanguageModel", "Classifier"])
@pytest.mark.parametrize("body", BODIES, ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_whole_step_stays_in_float32(device, make_model, make_batches, watch, kind, body, dropout):
    options = {"pool": "max"} if kind == "Classifier" and body["norm"] == "post" else {}
    model = make_model(kind, device, dropout=dropout, **body, **options)
    for optimizer in Adam(model.parameters(), 0.01, weight_decay=0.1), AdamW(model.parameters(), 0.01):
        seen = watch(model)
        with Replicas(model, 1, micro_batch=3) as replicas:
            for step in range(2):
                loss = replicas.gradients(make_batches(kind).batch(step), Key(step))
                clip_by_global_norm(model.flat.grad, 0.1)
                optimizer.lr = Cosine(0.01, 2, 10)(step)
                optimizer.step()
                assert isinstance(loss, float) if device is CPU else loss.shape == ()
                flat = [model.flat.data, model.flat.grad, optimizer.m, optimizer.v]
                each = [a for p in model.parameters() for a in (p.data, p.grad)]
                assert {a.dtype for a in (*flat, *each)} == {np.dtype(np.float32)}
    assert {"linear", "linear_backward", "cross_entropy", "attention_backward", "layernorm"} <= seen.calls
    assert ("dropout" in seen.calls) == (dropout > 0)
    assert "body.blocks.1.feedforward.backward" in seen.calls


@pytest.mark.parametrize("kind", ["LanguageModel", "Classifier"])
def test_replicas_on_threads_stay_in_float32(make_model, make_batches, kind):
    model = make_model(kind, dropout=0.1)
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    with Replicas(model, 3, micro_batch=2) as replicas:
        replicas.gradients(make_batches(kind).batch(0), Key(0))
        clip_by_global_norm(model.flat.grad, 0.1)
        optimizer.step(replicas.map)
    grads = [m.flat.grad for m in replicas.models]
    assert {a.dtype for a in (model.flat.data, *grads, optimizer.velocity)} == {np.dtype(np.float32)}


@pytest.mark.parametrize("kind", ["LanguageModel", "Classifier"])
@pytest.mark.parametrize("body", BODIES, ids=str)
def test_nothing_in_between_is_wider_than_float32_either(monkeypatch, make_model, make_batches, kind, body):
    """Every array of the strict stand-in is made by its constructor, including the temporaries of an operation. The
    gradient of a bias alone is added up in float64.
    """
    model, batch = make_model(kind, STRICT, dropout=0.1, **body), make_batches(kind).batch(0)
    biases = {p.data.shape for name, p in model.named_parameters().items() if name.endswith(".b")}
    make_array, made = DeviceArray.__init__, set()

    def watched(self, host):
        make_array(self, host)
        made.add(host.dtype)
        assert host.dtype != np.float64 or host.shape in biases, f"float64 {host.shape}"

    monkeypatch.setattr(DeviceArray, "__init__", watched)
    replicas = Replicas(model, 1, micro_batch=3)
    replicas.gradients(batch, Key(0))
    assert np.dtype(np.float32) in made


def test_logits_of_new_tokens_stay_in_float32(device, make_model, watch):
    for options in BODIES:
        model = make_model("LanguageModel", device, **options)
        watch(model)
        xp = array_module(model.flat.data)
        stored = model.allocate(2)
        ids = xp.asarray([[1, 2, 3], [4, 5, 6]])
        assert model.extend(ids, stored, 0).dtype == model.extend(ids, stored, 3).dtype == np.float32
