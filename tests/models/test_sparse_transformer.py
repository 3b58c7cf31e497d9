"""The sparse transformer: which positions see which, its initial weights, and that it is a language model."""

import math

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.models import LanguageModel, SparseTransformer
from scratchformer.rng import Key
from scratchformer.training import load_model, save_snapshot

V, T, STRIDE = 9, 11, 3
IDS = np.random.default_rng(0).integers(0, V, (2, T))
FIXED = {"kind": "fixed"}
KINDS = [{}, {"window": 2}, FIXED, FIXED | {"width": 2, "norm": "post"}]
every_kind = pytest.mark.parametrize("options", KINDS, ids=str)


def make(device, depth=2, **options):
    """With normal weights, large enough that everything seen changes the logits."""
    model = SparseTransformer(V, 8, 2, depth, T, STRIDE, key=Key(1), **options)
    draw = Key(2).generator()
    for p in model.parameters():
        p.data[...] = draw.standard_normal(p.data.shape)
    return model.to(device, np.float64)


def influence(model, device):
    """(T, T): whether the logits at t depend on token s."""
    y = to_cpu(model(to_device(IDS, device)))
    moved = np.zeros((T, T), bool)
    for s in range(T):
        changed = IDS.copy()
        changed[:, s] = (changed[:, s] + 1) % V
        moved[:, s] = np.abs(to_cpu(model(to_device(changed, device))) - y).max(axis=(0, 2)) > 1e-9
    return moved


def seen(kind="strided", width=1, window=STRIDE + 1, **_):
    """(T, T): the union of the two sets for each position t, which are the paper's unless `window` is given."""
    near = {"strided": lambda t, s: t - s < window, "fixed": lambda t, s: t // STRIDE == s // STRIDE}[kind]
    far = {
        "strided": lambda t, s: (t - s) % STRIDE == 0,
        "fixed": lambda t, s: s % STRIDE in range(STRIDE - width, STRIDE),
    }[kind]
    return np.array([[s <= t and (near(t, s) or far(t, s)) for s in range(T)] for t in range(T)])


@every_kind
def test_a_block_sees_what_the_paper_says_and_nothing_else(options, device):
    np.testing.assert_array_equal(influence(make(device, 1, **options), device), seen(**options))


@pytest.mark.parametrize("options", [options for options in KINDS if "window" not in options], ids=str)
def test_two_blocks_connect_every_position_to_all_later_ones_only(options, device):
    np.testing.assert_array_equal(influence(make(device, 2, **options), device), np.tri(T, dtype=bool))


def test_half_of_the_heads_take_each_pattern():
    model = SparseTransformer(V, 8, 4, 1, T, STRIDE, kind="fixed")
    assert model.pattern.of_heads(4) == [(slice(0, 2), ops.SameBlock(STRIDE)), (slice(2, 4), ops.BlockEnds(STRIDE, 1))]


def test_with_a_stride_as_long_as_the_context_it_is_the_language_model(device):
    """With all of a block as its end, every head sees everything; the same weights give the same gradients."""
    options = dict(norm="pre", activation="gelu", positions="learned")
    sparse = SparseTransformer(V, 8, 2, 2, T, T, kind="fixed", width=T, **options).to(device, np.float64)
    plain = LanguageModel(V, 8, 2, 2, T, key=Key(3), **options).to(device, np.float64)
    sparse.load_state_dict(plain.state_dict())
    batch = [to_device(x, device) for x in (IDS, np.roll(IDS, -1, axis=1))]
    gradients = []
    for model in sparse, plain:
        loss, cache = model.loss(*batch)
        model.loss_backward(1.0, cache)
        gradients.append((float(loss), to_cpu(model.flat.grad)))
    assert math.isclose(gradients[0][0], gradients[1][0], rel_tol=1e-12)
    np.testing.assert_allclose(gradients[0][1], gradients[1][1], rtol=1e-9, atol=1e-13)


def test_the_weights_at_the_start():
    """Standard deviations to within a few percent; the output map has that of any linear layer."""
    depth, C = 3, 64
    model = SparseTransformer(50, C, 2, depth, 100, 10, bias=True, key=Key(1))
    expected = {
        "tokens.table": 0.125 / math.sqrt(C),
        "positions.rows": 0.125 / math.sqrt(2 * C),
        "positions.columns": 0.125 / math.sqrt(2 * C),
        "attention.query.w": 0.125 / math.sqrt(C),
        "attention.unify.w": 0.125 / math.sqrt(C) / math.sqrt(2 * depth),
        "feedforward.up.w": 0.125 / math.sqrt(C),
        "feedforward.down.w": 0.125 / math.sqrt(4 * C) / math.sqrt(2 * depth),
        "output.w": 1 / math.sqrt(3 * C),
    }
    params = model.named_parameters()
    for ending, std in expected.items():
        found = [p.data for name, p in params.items() if name.endswith(ending)]
        assert found
        for data in found:
            assert abs(data.std() / std - 1) < 5 / math.sqrt(2 * data.size), ending
    assert not any(p.data.any() for name, p in params.items() if name.endswith(".b") and "output" not in name)
    weights = [p.data.ravel()[:16] for name, p in params.items() if name.endswith(".w")]
    assert len({tuple(w / np.abs(w).max()) for w in weights}) == len(weights)  # no two maps start the same


@every_kind
def test_a_snapshot_makes_the_same_model_again(options, tmp_path):
    model = make("cpu", **options).to(dtype=np.float32)
    save_snapshot(tmp_path / "model.safetensors", model)
    twin, _ = load_model(tmp_path / "model.safetensors")
    assert type(twin) is SparseTransformer and twin.config == model.config
    np.testing.assert_array_equal(model(IDS), twin(IDS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(kind="random"), "kind: expected one of strided, fixed, got 'random'"),
        (dict(heads=3), "heads: expected an even number, half for each pattern, got 3"),
        (dict(stride=0), "stride: expected a number >= 1, got 0"),
        (dict(kind="fixed", width=4), "width: expected at most the stride, 3, got 4"),
        (dict(width=9), "width: only for kind 'fixed', expected 1 for kind 'strided', got 9"),
        (dict(width=0), "width: expected a number >= 1, got 0"),
        (dict(window=0), "window: expected a number >= 1, got 0"),
        (dict(kind="fixed", window=2), "window: only for kind 'strided', expected None for kind 'fixed', got 2"),
        (dict(causal=False), "causal: a SparseTransformer always is, and takes no such option"),
        (dict(positions="rotary"), "positions: expected one of learned, sinusoidal, relative, none, got 'rotary'"),
        (dict(context=0), "context: expected a number >= 1, got 0"),
    ],
    ids=str,
)
def test_options_that_do_not_fit(options, message):
    sizes = dict(vocab_size=V, d_model=12, heads=2, depth=1, context=T, stride=STRIDE)
    with pytest.raises(ValueError, match=f"^{message}$"):
        SparseTransformer(**{**sizes, **options})


def test_inputs_that_do_not_fit(device):
    with pytest.raises(ValueError, match=r"ids: expected \(B, T\) with T up to 11, got 12 tokens"):
        make(device)(to_device(np.zeros((1, T + 1), int), device))
