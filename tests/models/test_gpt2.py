import math

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import CPU, to_cpu, to_device
from scratchformer.generation import KeyValueCache
from scratchformer.models import GPT2, LanguageModel
from scratchformer.models.gpt2 import STD
from scratchformer.rng import Key, Zeros
from scratchformer.testing import check_layer
from scratchformer.training import load_model, save_snapshot

V, T = 9, 6
IDS = np.array([[1, 4, 2, 8, 0, 3], [3, 3, 5, 1, 7, 6]])


def make(device, **options):
    return GPT2(V, 8, 2, 2, T, key=Key(1), **options).to(device, np.float64)


def test_every_gradient_of_the_whole_model():
    """With dropout, repeated with the same key, and weights large enough for every part to matter."""
    model = make(CPU, dropout=0.2)
    model.flat.data[...] *= 10
    report = check_layer(model, IDS, max_elements=2, key=Key(2))
    assert {row.tensor.rpartition(" ")[2] for row in report} >= set(model.named_parameters())


def test_the_future_has_no_influence(device):
    """When the tokens from t + 1 on change, the logits up to t stay the same and those at t + 1 change."""
    model = make(device)
    model.flat.data[...] *= 10
    y = to_cpu(model(to_device(IDS, device)))
    for t in range(T - 1):
        changed = IDS.copy()
        changed[:, t + 1 :] = (changed[:, t + 1 :] + 1) % V
        y_changed = to_cpu(model(to_device(changed, device)))
        np.testing.assert_allclose(y_changed[:, : t + 1], y[:, : t + 1], rtol=1e-9, atol=1e-12)
        assert np.abs(y_changed[:, t + 1] - y[:, t + 1]).max() > 1e-3


def test_equation(device):
    """Pre-norm blocks, a final norm, and the token table again as the output."""
    model = make(device)
    body, ids = model.body, to_device(IDS, device)
    x = body.positions(body.tokens(ids))
    for block in body.blocks:
        x = x + block.attention(block.norm1(x), ops.Causal())
        x = x + block.feedforward(block.norm2(x))
    logits = body.final_norm(x) @ body.tokens.table.data.T
    np.testing.assert_allclose(to_cpu(model(ids)), to_cpu(logits), rtol=1e-9, atol=1e-12)


def test_the_table_gets_the_gradients_of_both_its_uses(device):
    """A token that does not occur in the input still learns from the output; one that does gets both gradients."""
    model, ids = make(device, dropout=0.0), np.array([[1, 2, 1]])
    _, cache = model.loss(to_device(ids, device), to_device(np.array([[2, 1, 4]]), device))
    model.loss_backward(1.0, cache)
    both = to_cpu(model.body.tokens.table.grad).copy()
    assert np.abs(both).max(axis=1).min() > 1e-6
    model.zero_grad()
    forward, cross_entropy = cache
    model.output.backward(ops.cross_entropy_backward(1.0, cross_entropy), forward.output)
    predicted = to_cpu(model.body.tokens.table.grad)
    assert {v for v in range(V) if np.abs(both[v] - predicted[v]).max() > 1e-9} == {1, 2}


def test_initialisation():
    """Normal with STD; biases 0; the maps onto the residual path smaller by 1/√(2 depth)."""
    depth = 8
    model = GPT2(500, 64, 4, depth, 200, key=Key(0))
    smaller = 0
    for name, p in model.named_parameters().items():
        if name.endswith("gamma"):
            assert (p.data == 1).all()
        elif name.endswith((".b", "beta")):
            assert not p.data.any(), name
        else:
            on_residual = "unify" in name or "down" in name
            smaller += on_residual
            std = STD / math.sqrt(2 * depth) if on_residual else STD
            assert p.data.std() == pytest.approx(std, rel=0.05), name
            assert abs(p.data.mean()) < 0.1 * std, name
    assert smaller == 2 * depth
    first, again, other = (GPT2(20, 8, 2, 1, 4, key=Key(i)).flat.data for i in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert not np.array_equal(*(model.body.blocks[i].attention.query.w.data for i in range(2)))


def test_the_initial_loss_is_that_of_guessing():
    model = GPT2(1000, 64, 4, 4, 32, key=Key(0))
    ids = Key(1).generator().integers(0, 1000, (8, 33))
    loss, _ = model.loss(ids[:, :-1], ids[:, 1:])
    assert float(loss) == pytest.approx(math.log(1000), rel=0.02)


@pytest.mark.parametrize(
    ("sizes", "parameters"),
    [
        ({}, 124_439_808),
        (dict(d_model=1024, heads=16, depth=24), 354_823_168),
        (dict(d_model=1280, heads=20, depth=36), 774_030_080),
        (dict(d_model=1600, heads=25, depth=48), 1_557_611_200),
    ],
)
def test_the_sizes_that_were_published(sizes, parameters):
    """The smallest is the default. With `Zeros` nothing is drawn, so the memory is not even touched."""
    model = GPT2(**sizes, key=Zeros())
    assert sum(p.data.size for p in model.parameters()) == parameters
    assert not model.body.blocks[-1].norm1.beta.data.any()


def test_a_new_token_gives_the_logits_of_the_full_forward(device):
    model = make(device)
    y = to_cpu(model(to_device(IDS, device)))
    cache = KeyValueCache(model, 2)
    assert cache.logits(to_device(IDS[:, :2], device)).shape == (2, V)
    for t in range(2, T):
        found = cache.logits(to_device(IDS[:, t : t + 1], device))
        np.testing.assert_allclose(to_cpu(found), y[:, t], rtol=1e-9, atol=1e-12)


def test_snapshot(tmp_path):
    model = GPT2(V, 8, 2, 2, T, d_ff=12, eps=1e-3, key=Key(1))
    assert isinstance(model, LanguageModel)
    save_snapshot(tmp_path / "model.safetensors", model, step=3)
    loaded, state = load_model(tmp_path / "model.safetensors")
    assert type(loaded) is GPT2 and loaded.config == model.config and state == {"step": 3}
    assert loaded.body.blocks[0].norm1.eps == 1e-3
    assert np.array_equal(loaded(IDS), model(IDS))


def test_ids_that_do_not_fit(device):
    model = make(device)
    with pytest.raises(ValueError, match=r"ids: expected \(B, T\) with T up to 6, got 7 tokens"):
        model(to_device(np.zeros((1, 7), int), device))
    with pytest.raises(IndexError, match="ids: expected values from 0 to 8, got 9"):
        model(to_device(IDS + 1, device))


def test_an_output_that_is_not_tied(device, check_loss_backward, tmp_path):
    """It has its own weights, which start like the table, and the table gets only the gradient of the input."""
    model = make(device, tied=False, dropout=0.2)
    assert "output.w" in model.named_parameters()
    check_loss_backward(model, IDS, np.roll(IDS, -1, axis=1))
    drawn = GPT2(500, 64, 4, 1, 200, tied=False, key=Key(0)).output.w.data
    assert drawn.std() == pytest.approx(STD, rel=0.05)
    cache, ids = KeyValueCache(model, 2), to_device(IDS, device)
    expected = to_cpu(model(ids))
    for t in range(T):
        np.testing.assert_allclose(to_cpu(cache.logits(ids[:, t : t + 1])), expected[:, t], rtol=1e-9, atol=1e-12)
    model = GPT2(V, 8, 2, 2, T, tied=False, key=Key(1))
    save_snapshot(tmp_path / "model.safetensors", model)
    loaded, _ = load_model(tmp_path / "model.safetensors")
    assert loaded.config == model.config and np.array_equal(loaded(IDS), model(IDS))
    assert GPT2(V, 8, 2, 2, T).config["tied"] is True
