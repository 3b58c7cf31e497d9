import numpy as np
import pytest

from scratchformer import nn, ops
from scratchformer.backend import to_cpu, to_device
from scratchformer.nn.embedding import extend_by_token
from scratchformer.rng import Key


def test_tokens_look_their_rows_up_and_collect_gradients(device):
    layer = nn.TokenEmbedding(5, 3).to(device)
    ids = np.array([[4, 0, 4], [4, 2, 0]])
    y, cache = layer.forward(to_device(ids, device))
    assert np.array_equal(to_cpu(y), to_cpu(layer.table.data)[ids])
    assert layer.backward(device.xp.ones_like(y), cache) is None
    assert to_cpu(layer.table.grad)[:, 0].tolist() == [2, 0, 1, 0, 3]


def test_tokens_out_of_range(device):
    layer = nn.TokenEmbedding(5, 3).to(device)
    for wrong in (5, -1):
        with pytest.raises(IndexError, match=f"ids: expected values from 0 to 4, got {wrong}"):
            layer(to_device(np.array([[0, wrong]]), device))
    with pytest.raises(TypeError, match="ids: expected integers, got float32"):
        layer(to_device(np.zeros((1, 2)), device, np.float32))


@pytest.mark.parametrize("start", [0, 2])
def test_positions_are_added_from_start(start, device):
    """Unused positions get no gradient; used ones collect the gradients of every sequence."""
    layer = nn.PositionEmbedding(7, 4).to(device, np.float64)
    x = np.random.default_rng(0).standard_normal((2, 3, 4))
    y, cache = layer.forward(to_device(x, device), start)
    np.testing.assert_allclose(to_cpu(y), x + to_cpu(layer.table.data)[start : start + 3], rtol=1e-14)
    dy = np.random.default_rng(1).standard_normal((2, 3, 4))
    assert np.array_equal(to_cpu(layer.backward(to_device(dy, device), cache)), dy)
    expected = np.zeros((7, 4))
    expected[start : start + 3] = dy[0] + dy[1]
    np.testing.assert_allclose(to_cpu(layer.table.grad), expected, rtol=1e-14)


def test_position_gradient_runs_in_float32_for_float16(device):
    """A float16 sum over 5,000 sequences would stop growing at 2048."""
    for layer in nn.PositionEmbedding(1, 1), nn.GridPositions(1, 1, 1):
        layer.to(device, np.float16)
        y, cache = layer.forward(device.xp.ones((5000, 1, 1), dtype=np.float16))
        layer.backward(device.xp.ones_like(y), cache)
        for p in layer.parameters():
            assert p.grad.dtype == np.float16
            assert to_cpu(p.grad).tolist() == [[5000]]


def test_more_positions_than_the_table_has():
    layer = nn.PositionEmbedding(7, 4)
    with pytest.raises(ValueError, match=r"x: expected \(B, T, C\) with T up to 7, got T = 8"):
        layer(np.ones((2, 8, 4), np.float32))
    with pytest.raises(ValueError, match=r"x: expected \(B, T, C\) with start \+ T up to 7, got 6 \+ 3"):
        layer(np.ones((2, 3, 4), np.float32), start=6)


@pytest.mark.parametrize("start", [0, 2])
def test_a_grid_has_a_vector_for_each_row_and_each_column(start, device):
    """Positions 0 ... 6 in rows of 3; an unused row or column gets no gradient."""
    layer = nn.GridPositions(7, 4, 3, key=Key(1)).to(device, np.float64)
    rows, columns = to_cpu(layer.rows.data), to_cpu(layer.columns.data)
    assert rows.shape == columns.shape == (3, 4) and not np.array_equal(rows, columns)
    x, dy = (np.random.default_rng(i).standard_normal((2, 2, 4)) for i in (0, 1))
    y, cache = layer.forward(to_device(x, device), start)
    places = [divmod(t, 3) for t in (start, start + 1)]
    np.testing.assert_allclose(to_cpu(y), x + np.array([rows[r] + columns[c] for r, c in places]), rtol=1e-14)
    assert np.array_equal(to_cpu(layer.backward(to_device(dy, device), cache)), dy)
    expected = np.zeros((2, 3, 4))
    for i, (r, c) in enumerate(places):
        expected[0, r] += dy[0, i] + dy[1, i]
        expected[1, c] += dy[0, i] + dy[1, i]
    np.testing.assert_allclose(to_cpu(layer.rows.grad), expected[0], rtol=1e-14)
    np.testing.assert_allclose(to_cpu(layer.columns.grad), expected[1], rtol=1e-14)


def test_more_positions_than_the_grid_has():
    layer = nn.GridPositions(7, 4, 3)
    with pytest.raises(ValueError, match=r"x: expected \(B, T, C\) with start \+ T up to 7, got 6 \+ 2"):
        layer(np.ones((2, 2, 4), np.float32), start=6)
    with pytest.raises(ValueError, match="width: expected a number >= 1, got 0"):
        nn.GridPositions(7, 4, 0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sinusoids_are_added_in_the_type_of_x(dtype, device):
    x = device.xp.ones((2, 3, 4), dtype=dtype)
    y = nn.SinusoidalPositions()(x, start=5)
    assert y.dtype == dtype
    np.testing.assert_allclose(to_cpu(y)[1], 1 + ops.sinusoidal_positions(8, 4, dtype=dtype)[5:], rtol=1e-6)


def test_std_at_the_start():
    """For token and position vectors, to within five standard errors."""
    grid = lambda n, C, std, key: nn.GridPositions(2 * n, C, 2, std, key)  # noqa: E731
    for make in (nn.TokenEmbedding, nn.PositionEmbedding, grid):
        for std in (1.0, 0.02):
            table = make(1000, 100, std, Key(1)).parameters()[0].data
            assert abs(table.std() / std - 1) < 5 / np.sqrt(2 * table.size)
            assert abs(table.mean()) < 5 * std / np.sqrt(table.size)


def test_x_of_another_shape():
    with pytest.raises(ValueError, match=r"x: expected \(B, T, 4\), got \(3, 4\)"):
        nn.PositionEmbedding(7, 4)(np.ones((3, 4), np.float32))
    with pytest.raises(ValueError, match=r"x: expected \(B, T, 4\), got \(2, 3, 1\)"):
        nn.PositionEmbedding(7, 4)(np.ones((2, 3, 1), np.float32))
    with pytest.raises(ValueError, match=r"x: expected \(B, T, C\), got \(3, 4\)"):
        nn.SinusoidalPositions()(np.ones((3, 4), np.float32))


@pytest.mark.parametrize("scale", [1, 2, 0.5])
@pytest.mark.parametrize("start", [0, 2])
def test_a_sum_of_embeddings_is_its_parts_one_after_another(scale, start, device):
    parts = [nn.Linear(3, 4, key=Key(1)), nn.TokenEmbedding(5, 4, key=Key(2))]
    after = [nn.PositionEmbedding(7, 4, key=Key(3)), nn.LayerNorm(4), nn.Dropout(0.5)]
    layer = nn.EmbeddingSum(parts, *after, scale=scale).to(device, np.float64)
    draw, key = np.random.default_rng(0), Key(4)
    units, ids = to_device(draw.standard_normal((2, 3, 3)), device), to_device(draw.integers(0, 5, (2, 3)), device)
    dy = to_device(draw.standard_normal((2, 3, 4)), device)
    y, cache = layer.forward(units, ids, key=key, start=start)
    a, positions = layer.positions.forward(scale * (parts[0](units) + parts[1](ids)), start)
    o, norm = layer.norm.forward(a)
    expected, dropout = layer.dropout.forward(o, key)
    np.testing.assert_array_equal(to_cpu(y), to_cpu(expected))
    layer.zero_grad()
    du = layer.backward(dy, cache)
    found = {name: to_cpu(p.grad).copy() for name, p in layer.named_parameters().items()}
    layer.zero_grad()
    dx = layer.positions.backward(layer.norm.backward(layer.dropout.backward(dy, dropout), norm), positions)
    np.testing.assert_array_equal(to_cpu(du), to_cpu(parts[0].backward(scale * dx, parts[0].forward(units)[1])))
    parts[1].backward(scale * dx, parts[1].forward(ids)[1])
    for name, p in layer.named_parameters().items():
        np.testing.assert_array_equal(found[name], to_cpu(p.grad))


def test_inputs_of_a_sum_that_do_not_fit():
    both = nn.EmbeddingSum([nn.TokenEmbedding(5, 4), nn.TokenEmbedding(5, 4)])
    with pytest.raises(ValueError, match="inputs: expected 2, one for each embedding, got 1"):
        both(np.zeros((1, 2), int))
    with pytest.raises(ValueError, match=r"inputs: expected vectors of one shape, got \(1, 2, 4\) and \(1, 3, 4\)"):
        both(np.zeros((1, 2), int), np.zeros((1, 3), int))


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("norm", [None, nn.LayerNorm, lambda C: nn.Frozen(nn.LayerNorm(C))])
@pytest.mark.parametrize("inputs", ["ids", "vectors", "both", "all"])
def test_the_gradients_of_a_sum(positions, norm, inputs):
    """For each input that is not ids; nothing passes through a frozen norm."""
    embeddings = {"ids": "i", "vectors": "v", "both": "iv", "all": "viv"}[inputs]
    layer = nn.EmbeddingSum(
        [nn.TokenEmbedding(5, 4) if kind == "i" else nn.Linear(3, 4) for kind in embeddings],
        nn.PositionEmbedding(6, 4) if positions else None,
        norm and norm(4),
    )
    given = [np.array([[1, 2]]) if kind == "i" else np.full((1, 2, 3), 0.5, np.float32) for kind in embeddings]
    dy = np.arange(8, dtype=np.float32).reshape(1, 2, 4) ** 2
    _, cache = layer.forward(*given)
    result = layer.backward(dy, cache)
    count = 0 if isinstance(layer.norm, nn.Frozen) else embeddings.count("v")
    assert (0 if result is None else len(result) if type(result) is tuple else 1) == count
    assert layer.backward(None, cache) is None
    if norm is None and count:
        linears = [e for e in layer.embeddings if isinstance(e, nn.Linear)]
        for e, dx in zip(linears, result if count > 1 else [result], strict=True):
            np.testing.assert_allclose(dx, dy @ e.w.data.T, rtol=1e-5)


def test_a_token_after_the_stored_ones_of_each_sequence():
    """What a GPU repeats for every token, from layers of any kind."""
    embedding = nn.EmbeddingSum([nn.TokenEmbedding(5, 4, key=Key(1))], nn.PositionEmbedding(6, 4, key=Key(2)))
    stack, output = nn.Stack([nn.TransformerBlock(4, 2, causal=True, key=Key(3))]), nn.Linear(4, 5, key=Key(4))
    ids = np.array([[0, 1, 2, 3], [4, 3, 1, 0], [2, 2, 2, 2]])
    x = embedding(ids)
    expected, stored = output(stack(x)), stack.allocate(x, 6)
    for t in range(4):
        y = extend_by_token(np.array([t, *ids[:, t]]), embedding, stack, output, stored)
        np.testing.assert_allclose(y, expected[:, t], rtol=1e-5, atol=1e-6)
