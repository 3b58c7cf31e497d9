import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.models import Body
from scratchformer.records import Features, NGrams, Recall, ngram_buckets, recall
from scratchformer.rng import Key

V, C, T = 7, 6, 5
IDS = np.array([[1, 4, 2, 6, 0], [3, 3, 5, 1, 2]])


def make(device, **options):
    return Body(V, C, 2, 2, T, key=Key(1), **options).to(device, np.float64)


def forward_backward(body, ids, device, dy, **options):
    """y, and the gradient of all parameters."""
    body.zero_grad()
    y, cache = body.forward(to_device(ids, device), **options)
    body.backward(to_device(dy, device), cache)
    return to_cpu(y), to_cpu(body.flat.grad).copy()


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_without_positions_it_is_permutation_equivariant(norm, device):
    """Words in another order give the same vectors in that order, and the same gradients of all weights."""
    body = make(device, norm=norm, positions="none")
    order, dy = np.array([3, 0, 4, 2, 1]), np.random.default_rng(0).standard_normal((2, T, C))
    y, grad = forward_backward(body, IDS, device, dy)
    y_other, grad_other = forward_backward(body, IDS[:, order], device, dy[:, order])
    np.testing.assert_allclose(y_other, y[:, order], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(grad_other, grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "relative"])
def test_with_positions_the_order_matters(positions, device):
    body = make(device, positions=positions)
    order = np.array([3, 0, 4, 2, 1])
    y = to_cpu(body(to_device(IDS, device)))
    assert np.abs(to_cpu(body(to_device(IDS[:, order], device))) - y[:, order]).max() > 1e-3


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_equation(norm, device):
    body = make(device, norm=norm)
    assert (body.final_norm is None) == (norm == "post")
    x = body.positions(body.tokens(to_device(IDS, device)))
    for block in body.blocks:
        x = block(x)
    expected = x if norm == "post" else body.final_norm(x)
    assert np.array_equal(to_cpu(body(to_device(IDS, device))), to_cpu(expected))


def test_every_dropout_has_a_mask_of_its_own(monkeypatch):
    """One after the embedding and two in every block: all keys differ, also from those of other steps."""
    keys = []

    def dropout(x, p, key):
        keys.append(key)
        return x, ()

    monkeypatch.setattr(ops, "dropout", dropout)
    body = Body(V, C, 2, 3, T, dropout=0.5)
    for step in range(2):
        body(IDS, key=Key(0, step))
    assert len(keys) == len(set(keys)) == 2 * (1 + 2 * 3)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_recompute_changes_nothing(norm, device):
    """The names are the same and, even with dropout and a pattern, so are all vectors and gradients, bit for bit."""
    dy = np.random.default_rng(0).standard_normal((2, T, C))
    options = dict(pattern=ops.Padding(to_device(np.array([3, T]), device)), key=Key(2))
    plain, recomputed = (make(device, norm=norm, dropout=0.3, recompute=r) for r in (False, True))
    assert list(plain.named_parameters()) == list(recomputed.named_parameters())
    for a, b in zip(
        forward_backward(plain, IDS, device, dy, **options),
        forward_backward(recomputed, IDS, device, dy, **options),
        strict=True,
    ):
        assert np.array_equal(a, b)


def test_embedding_std():
    body = Body(500, 60, 2, 1, 100, embedding_std=0.02)
    for table in (body.tokens.table.data, body.positions.table.data):
        assert abs(table.std() / 0.02 - 1) < 0.1


def test_unknown_positions():
    with pytest.raises(
        ValueError, match="positions: expected one of learned, sinusoidal, relative, none, got 'rotary'"
    ):
        Body(V, C, 2, 1, T, positions="rotary")


def test_ids_that_do_not_fit(device):
    body = make(device)
    with pytest.raises(ValueError, match=r"ids: expected \(B, T\), got \(5,\)"):
        body(to_device(IDS[0], device))
    with pytest.raises(ValueError, match=r"ids: expected \(B, T\) with T >= 1, got \(2, 0\)"):
        body(to_device(IDS[:, :0], device))
    with pytest.raises(ValueError, match=r"ids: expected \(B, T\) with T up to 5, got 6 tokens"):
        body(to_device(np.zeros((2, 6), int), device))
    with pytest.raises(IndexError, match="ids: expected values from 0 to 6, got 7"):
        body(to_device(IDS + 1, device))
    with pytest.raises(TypeError, match="ids: expected integers, got float64"):
        body(to_device(IDS.astype(float), device))


def test_vectors_of_ngrams_are_added_to_those_of_tokens(device):
    """The first block gets the token's vector, and one for each n-gram that ends there."""
    body = make(device, positions="none", embeddings=[{"layer": NGrams, "orders": (2, 3), "buckets": 10}])
    x, _ = body.embedding.forward(*body.inputs(to_device(IDS, device)))
    table = to_cpu(body.further[0].table.data)
    rows = to_cpu(ngram_buckets(to_device(IDS, device), (2, 3), 10))
    expected = to_cpu(body.tokens.table.data)[IDS] + table[rows[:, :, 0]] + table[rows[:, :, 1]]
    np.testing.assert_allclose(to_cpu(x), expected, rtol=1e-12)
    assert table.shape == (20, C)


def test_vectors_of_what_is_recalled_are_added_to_those_of_tokens(device):
    """With tokens alone, what they recall is found in them."""
    body = make(device, positions="none", embeddings=[{"layer": Recall, "orders": (1, 2, 1)}])
    table = to_cpu(body.further[0].table.data).reshape(3, V + 1, C)
    ids = np.array([[3, 1, 3, 1, 3], [0, 0, 0, 6, 0]])
    found = to_cpu(recall(to_device(ids, device), (1, 2, 1)))
    np.testing.assert_array_equal(found[:, :, 0], [[0, 0, 2, 4, 2], [0, 1, 1, 0, 7]])
    given = np.random.default_rng(0).integers(0, V + 1, (2, 5, 3))
    for inputs, recalled in (ids, found), (np.concatenate([ids[:, :, None], given], axis=2), given):
        x, _ = body.embedding.forward(*body.inputs(to_device(inputs, device)))
        expected = to_cpu(body.tokens.table.data)[ids] + sum(table[k][recalled[:, :, k]] for k in range(3))
        np.testing.assert_allclose(to_cpu(x), expected, rtol=1e-12)
        y, _ = body.stack.forward(x)
        np.testing.assert_array_equal(to_cpu(body(to_device(inputs, device))), to_cpu(y))


def test_what_is_recalled_must_fit(device):
    body, ids = make(device, embeddings=[{"layer": Recall, "orders": (1, 2)}]), np.zeros((2, 5, 3), int)
    body(to_device(ids, device))
    with pytest.raises(ValueError, match=r"ids: expected \(B, T, 3\), got \(2, 5, 2\)"):
        body(to_device(ids[:, :, :2], device))
    with pytest.raises(IndexError, match=r"ids recalled: expected values from 0 to 7, got 8"):
        body(to_device(ids + np.array([0, 0, 8]), device))
    with pytest.raises(IndexError, match=r"ids: expected values from 0 to 6, got 7"):
        body(to_device(ids + np.array([7, 0, 0]), device))
    with pytest.raises(ValueError, match=r"ids: expected \(B, T\), got \(2, 5, 3\)"):
        make(device)(to_device(ids, device))
    causal = make(device, embeddings=[{"layer": Recall, "orders": (1, 2)}], causal=True)
    np.testing.assert_allclose(
        to_cpu(causal.extend(to_device(ids, device), causal.allocate(2), 0)),
        to_cpu(causal(to_device(ids, device))),
        rtol=1e-12,
    )


@pytest.mark.parametrize("layer", [NGrams, Recall])
def test_units_have_no_ngrams(layer):
    with pytest.raises(ValueError, match=f"{layer.name}: expected None for units"):
        Body(None, C, 2, 2, T, units=3, embeddings=[{"layer": layer, "orders": [2]}])


@pytest.mark.parametrize("wrong", [[{"orders": [2]}], [NGrams], [{"layer": "NGrams"}], {"layer": NGrams}])
def test_what_is_no_embedding_is_refused(wrong):
    with pytest.raises(TypeError, match="embeddings: expected "):
        Body(V, C, 2, 1, T, embeddings=wrong)


def test_a_linear_map_of_features_is_added_to_tokens(device):
    """The gradient of the features comes back, and matches a finite difference."""
    body = make(device, positions="none", embeddings=[{"layer": Features, "width": 3}])
    features = to_device(np.random.default_rng(0).standard_normal((2, T, 3)), device)
    ids, dy = to_device(IDS, device), to_device(np.random.default_rng(1).standard_normal((2, T, C)), device)
    x, _ = body.embedding.forward(*body.inputs(ids, features=features))
    expected = to_cpu(body.tokens.table.data)[IDS] + to_cpu(features) @ to_cpu(body.further[0].w.data)
    np.testing.assert_allclose(to_cpu(x), expected, rtol=1e-12)
    _, cache = body.forward(ids, features=features)
    dfeatures = to_cpu(body.backward(dy, cache))
    assert dfeatures.shape == (2, T, 3)
    step = np.random.default_rng(2).standard_normal((2, T, 3))
    ahead, behind = (body(ids, features=features + to_device(h * step, device)) for h in (1e-6, -1e-6))
    np.testing.assert_allclose((dfeatures * step).sum(), to_cpu((dy * (ahead - behind)).sum()) / 2e-6, rtol=1e-6)


def test_features_that_do_not_fit(device):
    ids, features = to_device(IDS, device), to_device(np.ones((2, T, 3)), device)
    body = make(device, embeddings=[{"layer": Features, "width": 3}], causal=True)
    for wrong in (features[:1], features[:, :4], features[:, :, :2], features[0]):
        with pytest.raises(ValueError, match=r"features: expected \(2, 5, 3\), got "):
            body(ids, features=wrong)
    with pytest.raises(TypeError, match=r"features: expected an array \(B, T, I\), got None"):
        body(ids)
    with pytest.raises(
        ValueError, match="features: expected none, since the model was made without an embedding of features"
    ):
        make(device)(ids, features=features)
    with pytest.raises(ValueError, match="features: a new token has none, so this body cannot generate"):
        body.allocate(2)
