import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.models import Body
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
