"""Parameters, the flat arrays, moving, replicas, and saved weights."""

import copy
import pickle
import re

import numpy as np
import pytest

from scratchformer import checks, models, nn, ops
from scratchformer.backend import CPU, DeviceError, array_module, to_cpu, to_device
from scratchformer.dispatch import Twin
from scratchformer.models import LanguageModel
from scratchformer.nn import FlatParameters, Layer, Linear, Param
from scratchformer.nn.layer import LAYER_OBJECTS, Part, add_gradients, repeated
from scratchformer.rng import Key
from scratchformer.testing import check_layer
from scratchformer.testing.strict import STRICT
from scratchformer.training import SnapshotError, load_model, save_snapshot


class Tied(Layer):
    """Two affine layers in sequence that share their matrix."""

    def __init__(self):
        self.first, self.second = Linear(3, 3, key=Key(1)), Linear(3, 3, key=Key(2))
        self.second.w = self.first.w

    def forward(self, x):
        h, first = self.first.forward(x)
        y, second = self.second.forward(h)
        return y, (first, second)

    def backward(self, dy, cache):
        first, second = cache
        return self.first.backward(self.second.backward(dy, second), first)


def make_block(device=CPU, **options):
    return nn.TransformerBlock(6, 2, **options).to(device)


def are_views(layer):
    """Whether the flat arrays hold exactly the parameters and gradients, one after another."""
    flat, end = layer.flat, 0
    shares_memory = array_module(flat.data).shares_memory
    for p in layer.parameters():
        start, end = end, end + p.data.size
        for whole, view in ((flat.data, p.data), (flat.grad, p.grad)):
            if not shares_memory(whole[start:end], view) or shares_memory(whole[:start], view):
                return False
    return end == flat.data.size == flat.grad.size


# Flat arrays


def test_parameters_are_views_of_flat_arrays(device):
    block = make_block(device)
    before = block.state_dict()
    flat = block.flat
    assert are_views(block)
    assert block.flat is flat
    for name, value in block.state_dict().items():
        assert np.array_equal(value, before[name])
    flat.data[...] = 3
    flat.grad[...] = 4
    assert all((to_cpu(p.data) == 3).all() and (to_cpu(p.grad) == 4).all() for p in block.parameters())


def test_making_them_flat_keeps_gradients():
    layer = Linear(2, 3)
    layer.w.grad[...] = 7
    assert np.array_equal(np.sort(layer.flat.grad), [0, 0, 0, 7, 7, 7, 7, 7, 7])


def test_backward_and_zero_grad_act_on_the_flat_gradient(device):
    block = make_block(device)
    grad = block.flat.grad
    x = device.xp.ones((1, 2, 6), dtype=np.float32)
    _, cache = block.forward(x)
    block.backward(x, cache)
    assert to_cpu(grad).any()
    block.zero_grad()
    assert block.flat.grad is grad and not to_cpu(grad).any()


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_cast_and_load_leave_views(dtype, device):
    block = make_block(device)
    state = {name: 2 * value for name, value in block.state_dict().items()}
    assert are_views(block)
    block.to(dtype=dtype)
    assert are_views(block) and block.flat.data.dtype == dtype
    flat = block.flat
    block.load_state_dict(state)
    assert block.flat is flat and are_views(block)
    assert block.flat.data.dtype == dtype
    for name, p in block.named_parameters().items():
        assert np.array_equal(to_cpu(p.data), state[name].astype(dtype))


def test_flat_arrays_of_a_part_of_a_model_are_refused():
    block = make_block()
    assert block.flat
    with pytest.raises(ValueError, match="share the flat arrays of other parameters, as in a part of a model"):
        block.norm1.flat  # noqa: B018
    assert FlatParameters.of(reversed(block.parameters())) is block.flat  # whatever the order of the list


def test_flat_arrays_of_a_part_become_those_of_the_whole():
    block = make_block()
    part = block.norm1.flat
    part.data[...] = 3
    part.grad[...] = 4
    assert are_views(block) and block.flat is not part
    assert (block.norm1.gamma.data == 3).all() and (block.norm1.beta.grad == 4).all()


def test_parameters_of_several_types_are_not_mixed():
    block = make_block()
    block.norm1.to(dtype=np.float64)
    with pytest.raises(ValueError, match=r"several types \(float32, float64\)"):
        block.flat  # noqa: B018


def test_copies_of_flat_arrays_hold_copies_of_the_parameters():
    layer = Linear(2, 3)
    twin, twin_flat = copy.deepcopy((layer, layer.flat))
    assert twin.flat is twin_flat and are_views(twin) and are_views(layer)
    twin_flat.data[...] = 0
    assert not twin.w.data.any() and layer.w.data.any()


# Names, tied weights


def test_names_follow_the_attributes():
    assert list(make_block(bias=True).named_parameters()) == [
        *("attention.query.w", "attention.query.b", "attention.key.w", "attention.key.b"),
        *("attention.value.w", "attention.value.b", "attention.unify.w", "attention.unify.b"),
        *("norm1.gamma", "norm1.beta", "feedforward.up.w", "feedforward.up.b"),
        *("feedforward.down.w", "feedforward.down.b", "norm2.gamma", "norm2.beta"),
    ]
    model = models.LanguageModel(5, 4, 2, 2, 3, norm="pre")
    assert {"body.blocks.1.attention.key.w", "body.final_norm.gamma", "body.positions.table", "output.b"} <= set(
        model.named_parameters()
    )


def test_a_shared_parameter_is_listed_once_and_sums_its_gradients(device):
    """It is the sum of the gradients of the two matrices in an untied layer with the same weights."""
    tied = Tied().to(device)
    assert list(tied.named_parameters()) == ["first.w", "first.b", "second.b"]
    assert tied.flat.data.size == 9 + 3 + 3
    untied = copy.deepcopy(tied)
    untied.second.w = Param(untied.first.w.data.copy(), "w")
    assert len(untied.parameters()) == 4
    x = to_device(np.random.default_rng(0).standard_normal((4, 3)), device, np.float32)
    for layer in (tied, untied):
        y, cache = layer.forward(x)
        layer.backward(device.xp.ones_like(y), cache)
    both = to_cpu(untied.first.w.grad) + to_cpu(untied.second.w.grad)
    np.testing.assert_allclose(to_cpu(tied.first.w.grad), both, rtol=1e-5)
    assert np.abs(to_cpu(untied.second.w.grad)).max() > 0.1


def test_tied_weights_stay_tied(device):
    """In a deep copy, in a replica, and after moving and casting; but a copy is not tied to the original."""
    tied = Tied()
    moved = Tied().to(device, np.float64)
    for layer in (tied, moved, copy.deepcopy(tied), moved.replica()):
        assert layer.first.w is layer.second.w
        assert are_views(layer) and len(layer.parameters()) == 3
    assert copy.deepcopy(tied).first.w is not tied.first.w


# Moving


def test_to_moves_and_casts_data_and_gradients():
    layer = Linear(2, 3)
    weights = layer.state_dict()
    assert layer.device is CPU
    assert layer.to(STRICT) is layer
    assert layer.device == STRICT
    assert all(isinstance(a, STRICT.xp.ndarray) for p in layer.parameters() for a in (p.data, p.grad))
    layer.to(dtype=np.float64)
    assert layer.device == STRICT and {p.data.dtype for p in layer.parameters()} == {np.dtype(np.float64)}
    layer.to(CPU, np.float32)
    assert layer.device is CPU
    for name, value in layer.state_dict().items():
        assert value.dtype == np.float32 and np.array_equal(value, weights[name])


def test_a_deep_copy_has_arrays_of_its_own():
    block = make_block()
    assert block.flat
    twin = copy.deepcopy(block)
    assert not np.shares_memory(twin.flat.data, block.flat.data)
    assert are_views(twin) and are_views(block)


def test_a_copy_of_a_parameter_has_arrays_of_its_own():
    """Its gradient and whether it is frozen are copied too; the copy is in no flat array."""
    layer = Linear(2, 3)
    assert layer.flat.params[0] is layer.w
    layer.w.grad[...] = 7
    layer.w.frozen = True
    for twin in copy.deepcopy(layer.w), pickle.loads(pickle.dumps(layer.w)):
        assert twin.name == "w" and twin.frozen is True and twin.flat is None
        np.testing.assert_array_equal(twin.data, layer.w.data)
        assert (twin.grad == 7).all()
        assert not np.shares_memory(twin.data, layer.w.data) and not np.shares_memory(twin.grad, layer.w.grad)
    data = np.ones((2, 3))
    twin = layer.w.twin(data)
    assert twin.data is data and twin.grad.shape == (2, 3) and not twin.grad.any() and twin.flat is None


# Replicas


def test_a_replica_shares_the_parameters_and_owns_its_gradients(device):
    block = make_block(device)
    replica = block.replica()
    assert replica.flat.data is block.flat.data
    assert are_views(block) and are_views(replica)
    assert not device.xp.shares_memory(replica.flat.grad, block.flat.grad)
    x = to_device(np.random.default_rng(0).standard_normal((2, 3, 6)), device, np.float32)
    _, cache = replica.forward(x)
    replica.backward(x, cache)
    assert to_cpu(replica.flat.grad).any() and not to_cpu(block.flat.grad).any()
    block.flat.data *= 0.5
    assert np.array_equal(to_cpu(replica(x)), to_cpu(block(x)))


def test_a_replica_starts_with_zero_gradient():
    layer = Linear(2, 3)
    layer.flat.grad[...] = 7
    assert not layer.replica().flat.grad.any()
    assert (layer.flat.grad == 7).all()


def test_gradients_of_replicas_add_up():
    """Two halves of a batch on two replicas, compared with the whole batch on one."""
    block = make_block().to(dtype=np.float64)
    x, dy = np.random.default_rng(0).standard_normal((2, 4, 3, 6))
    replicas = [block.replica(), block.replica()]
    for replica, half in zip(replicas, (slice(0, 2), slice(2, 4)), strict=True):
        replica.backward(dy[half], replica.forward(x[half])[1])
    block.backward(dy, block.forward(x)[1])
    np.testing.assert_allclose(sum(r.flat.grad for r in replicas), block.flat.grad, rtol=1e-9, atol=1e-12)


# Saved weights


def test_state_dict_round_trip(device):
    block, other = make_block(device, key=Key(1)), make_block(device, key=Key(2))
    state = block.state_dict()
    assert all(isinstance(value, np.ndarray) for value in state.values())
    x = to_device(np.random.default_rng(0).standard_normal((2, 3, 6)), device, np.float32)
    assert not np.array_equal(to_cpu(block(x)), to_cpu(other(x)))
    other.load_state_dict(state)
    assert np.array_equal(to_cpu(block(x)), to_cpu(other(x)))


def test_state_dict_is_a_copy():
    layer = Linear(2, 3)
    state = layer.state_dict()
    layer.w.data[...] = 0
    assert state["w"].any()
    layer.load_state_dict(state)
    state["w"][...] = 0
    assert layer.w.data.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("norm1.gamma"), "missing: norm1.gamma"),
        (lambda s: s.update(extra=np.ones(1)), "not in this model: extra"),
        (lambda s: s.update({"norm2.beta": np.ones(5)}), r"norm2.beta: expected \(6,\), got \(5,\)"),
        (lambda s: s.update({"norm2.beta": np.ones(6, int)}), "norm2.beta: expected floating-point numbers, got int64"),
        (lambda s: s.update({"norm2.beta": np.ones(6, complex)}), "norm2.beta: expected floating-.* got complex128"),
        (lambda s: s.update({"norm2.beta": np.array(["1"] * 6)}), "norm2.beta: expected floating-.* got <U1"),
        (lambda s: s.update({"norm2.beta": [1.0] * 6}), "norm2.beta: expected floating-point numbers, got list"),
        (
            lambda s: s.update({"norm2.gamma": s.pop("norm2.beta")[:2]}),
            r"missing: norm2.beta; norm2.gamma: expected \(6,\), got \(2,\)",
        ),
    ],
)
def test_weights_of_another_model_change_nothing(change, message):
    block = make_block()
    before = block.state_dict()
    state = {name: value + 1 for name, value in before.items()}
    change(state)
    with pytest.raises(ValueError, match=f"weights of another model: .*{message}"):
        block.load_state_dict(state)
    for name, value in block.state_dict().items():
        assert np.array_equal(value, before[name])


def test_a_layer_without_forward_or_backward():
    with pytest.raises(TypeError, match="Layer has no forward"):
        Layer()(1)
    with pytest.raises(TypeError, match="Layer has no backward"):
        Layer().backward(1, None)


def test_param_says_what_it_is():
    assert repr(Param(np.ones((2, 3), np.float32), "w")) == "Param(w, shape=(2, 3), dtype=float32)"


# Where parts are found


class Nested(Layer):
    """y = Σ x w over layers in a tuple, a dict and lists within them, with a bias in a dict."""

    def __init__(self):
        make = [Linear(3, 3, bias=False, key=Key(i)) for i in range(4)]
        self.pair = (make[0], [make[1]])
        self.table = {"inner": {"last": make[2]}, "shift": Param(np.ones(3, np.float32), "shift")}
        self.rows = [[make[3]]]

    def layers(self):
        return self.pair[0], self.pair[1][0], self.table["inner"]["last"], self.rows[0][0]

    def forward(self, x):
        outputs, caches = zip(*(layer.forward(x) for layer in self.layers()), strict=True)
        return sum(outputs) + self.table["shift"].data, caches

    def backward(self, dy, caches):
        self.table["shift"].grad += dy.sum(axis=0)
        return sum(layer.backward(dy, cache) for layer, cache in zip(self.layers(), caches, strict=True))


def test_parts_in_tuples_dicts_and_nested_lists_are_found():
    layer = Nested()
    names = ["pair.0.w", "pair.1.0.w", "table.inner.last.w", "table.shift", "rows.0.0.w"]
    assert sorted(layer.named_parameters()) == sorted(names)
    assert len(layer.parameters()) == 5
    assert [row.tensor for row in check_layer(layer, np.ones((2, 3)))] == ["x", *layer.named_parameters()]
    assert are_views(layer) and are_views(layer.replica())
    twin = Nested()
    twin.load_state_dict(layer.state_dict())


def test_a_layer_without_parameters_has_no_flat_arrays():
    with pytest.raises(ValueError, match="params: expected at least one parameter, got none"):
        nn.Dropout(0.1).flat  # noqa: B018


def test_to_takes_the_name_of_a_device():
    layer = Linear(2, 3).to(STRICT)
    assert layer.to("cpu").device is CPU
    with pytest.raises(DeviceError, match="device: expected auto, cpu, gpu or gpu:N, got 'tpu'"):
        layer.to("tpu")


def test_layers_with_one_key_start_the_same():
    """See `Layer`; the parts of a composite layer start differently."""
    assert np.array_equal(Linear(4, 4).w.data, Linear(4, 4).w.data)
    assert not np.array_equal(Linear(4, 4).w.data, Linear(4, 4, key=Key(1)).w.data)
    attention = nn.SelfAttention(4, 2)
    assert not np.array_equal(attention.query.w.data, attention.key.w.data)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Linear(0, 3), "d_in"),
        (lambda: Linear(3, -1), "d_out"),
        (lambda: nn.LayerNorm(0), "d_model"),
        (lambda: nn.TokenEmbedding(0, 3), "vocab_size"),
        (lambda: nn.FeedForward(4, 0), "d_ff"),
        (lambda: nn.SingleHeadAttention(4, 0), "d_head"),
        (lambda: nn.SelfAttention(0, 2), "d_model"),
        (lambda: models.LanguageModel(5, 4, 2, 0, 3), "depth"),
        (lambda: models.LanguageModel(5, 4, 2, 1, 0), "context"),
        (lambda: models.Classifier(5, 0, 4, 2, 1, 3), "num_classes"),
    ],
)
def test_sizes_below_one(make, name):
    with pytest.raises(ValueError, match=f"^{name}: expected a number >= 1, got (0|-1)$"):
        make()


@pytest.mark.parametrize("kind", [int, np.int8])
def test_repeated_layers_must_fit_in_memory(monkeypatch, kind):
    """The first layer tells how much memory all of them need; if they do not fit, no other is made."""
    made = []

    def make(i):
        made.append(i)
        assert len(made) <= 3
        return Linear(2, 3)

    room = 4 * 3 * (9 + LAYER_OBJECTS)
    monkeypatch.setattr(checks, "memory", lambda: room)
    assert len(repeated(make, kind(3))) == 3 and made == [0, 1, 2]
    made.clear()
    monkeypatch.setattr(checks, "memory", lambda: room - 1)
    with pytest.raises(ValueError, match=r"^depth: expected weights that fit in 0 GB of memory, got 0 GB for depth 3$"):
        repeated(make, kind(3))
    assert made == [0]


def test_bfloat16_weights_are_copied_and_assigned_as_others_are(tmp_path):
    half = pytest.importorskip("ml_dtypes").bfloat16
    model, other = LanguageModel(11, 8, 2, 1, 6).to(dtype=half), LanguageModel(11, 8, 2, 1, 6)
    model.load_state_dict(model.state_dict())
    other.load_state_dict(model.state_dict())
    np.testing.assert_array_equal(other.flat.data, model.flat.data.astype(np.float32))
    model.flat.grad = model.flat.grad + model.flat.grad
    with pytest.raises(SnapshotError, match=r"is bfloat16; cast the model first: to\(dtype=np.float32\)"):
        save_snapshot(tmp_path / "m.safetensors", model)


def test_numpy_numbers_among_the_arguments(tmp_path):
    """They do not overflow, and the model can be saved."""
    model = LanguageModel(np.int8(11), np.int8(8), 2, 1, np.int16(400), dropout=np.float32(0.5))
    model(np.ones((1, 300), int))
    save_snapshot(tmp_path / "m.safetensors", model)
    found, _ = load_model(tmp_path / "m.safetensors")
    assert found.config == model.config


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("plus", [None, np.float32, np.float64])
def test_gradients_are_added_by_a_twin_that_can_or_to_what_it_returns(monkeypatch, adds, plus):
    """A dy or a plus of another type than y is no case for the twin's own sum."""
    calls = []

    def backward(dy, cache, into=None, plus=None):
        dx, *gradients = ops.linear_backward.reference(dy, cache)
        if into is None:
            return dx, *gradients
        calls.append(1)
        for grad, gradient in zip(into, gradients, strict=True):
            grad += gradient
        return dx if plus is None else dx + plus, *into

    twin = Twin("linear", lambda *_: True, ops.linear.reference, backward, adds=adds)
    monkeypatch.setitem(ops.linear.chosen[False], np.ndarray, [twin])
    draw = np.random.default_rng(0).standard_normal
    x, w, b, dy = (draw(shape).astype(np.float32) for shape in ((4, 3), (3, 2), 2, (4, 2)))
    more = None if plus is None else draw((4, 3)).astype(plus)
    dx, dw, db = ops.linear_backward.reference(dy, ops.linear.reference(x, w, b)[1])
    for cast, direct in (np.float32, adds and plus is not np.float64), (np.float64, False):
        grads = [np.ones_like(w), np.ones_like(b)]
        calls.clear()
        _, cache = ops.linear(x, w, b)
        result = add_gradients(ops.linear_backward, dy.astype(cast), cache, grads, more)
        assert len(calls) == direct
        np.testing.assert_allclose(result, dx if plus is None else dx + more, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(grads[0], dw + 1, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(grads[1], db + 1, rtol=1e-5, atol=1e-6)


def test_a_part_is_read_and_assigned_wherever_it_is():
    """Also in a list; and on the class it is the `Part` itself."""

    class Outer(Layer):
        inner, first = Part("two.b", "one.w"), Part("layers.0")

        def __init__(self):
            self.one, self.two, self.layers = Linear(2, 2), Linear(2, 2), [Linear(2, 2)]

    outer, w, linear = Outer(), Param(np.ones((2, 2)), "w"), Linear(2, 3)
    assert isinstance(Outer.inner, Part)
    outer.inner, outer.first = w, linear
    assert outer.two.b is outer.one.w is outer.inner is w and outer.layers == [outer.first] == [linear]
    outer.layers.clear()
    assert outer.first is None


def test_a_replica_with_arrays_of_its_own():
    layer = Linear(2, 3)
    half, grad = layer.flat.data.astype(np.float16), np.ones(9, np.float32)
    twin = layer.replica(half, grad)
    assert twin.flat.data is half and twin.flat.grad is grad
    twin.zero_grad()
    assert not grad.any() and np.array_equal(twin.w.data, layer.w.data.astype(np.float16))


def test_adding_in_place_to_the_flat_gradient():
    layer = Linear(2, 3)
    grad = layer.flat.grad
    layer.flat.grad += 1
    assert layer.flat.grad is grad and (grad == 1).all() and (layer.w.grad == 1).all()


def test_an_assignment_copies_into_the_array():
    layer = Linear(2, 3)
    for owner in layer.w, layer.flat:
        for name in "data", "grad":
            array = getattr(owner, name)
            value = np.full(array.shape, 5, np.float64)
            setattr(owner, name, value)
            assert getattr(owner, name) is array and (array == 5).all() and array.dtype == np.float32
            array.flags.writeable = False
            setattr(owner, name, array)  # as `+=` does at its end: nothing is copied
            array.flags.writeable = True
            full, shape = f"{'flat' if owner is layer.flat else 'w'}.{name}", re.escape(str(array.shape))
            for wrong, error, message in (
                (5.0, TypeError, rf"^{full}: expected an array {shape}, got float"),
                (np.full(array.shape, 6), TypeError, f"^{full}: expected floating-point numbers, got int64"),
                (np.full(2, 6.0), ValueError, rf"^{full}: expected {shape}, got \(2,\)"),
                (STRICT.xp.asarray(value + 1), DeviceError, "strict"),
            ):
                with pytest.raises(error, match=message):
                    setattr(owner, name, wrong)
            assert (array == 5).all()


def test_gradients_take_no_memory_before_they_are_asked_for(device):
    """Nor do those of a layer that is moved, cast or copied; they are zero then, and not forgotten afterwards."""
    layer = Linear(2, 3)
    for each in layer, layer.to(device, np.float64), copy.deepcopy(layer), pickle.loads(pickle.dumps(Linear(2, 3))):
        assert all(p.written is None for p in each.parameters())
    w = layer.w
    assert w.grad is w.grad and w.grad.shape == (2, 3) and w.grad.dtype == np.float64 and not w.grad.any()
    w.grad += 2
    for each in layer.to(CPU, np.float32), copy.deepcopy(layer):
        assert (each.w.grad == 2).all() and each.b.written is None
    assert (layer.flat.grad == np.repeat([2, 0], [6, 3])).all()
