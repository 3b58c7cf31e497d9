"""The compiled search for the nearest keys, compared with the plain one."""

import numpy as np
import pytest

from scratchformer import nn
from scratchformer.dispatch import fast
from scratchformer.generation.neighbours import NeighbourOutput, nearest_keys

pytest.importorskip("numba")
with fast():
    numba_neighbours = pytest.importorskip("scratchformer.kernels.numba_neighbours")


@pytest.fixture(params=["float32", "as measured"], autouse=True)
def precision(request, monkeypatch):
    """Products of float32, and those of bfloat16 if they are faster on this processor."""
    found = numba_neighbours.products()
    if found is None:
        pytest.skip("there is no library with 64-bit sizes")
    if request.param == "float32":
        monkeypatch.setattr(numba_neighbours, "products", lambda: found._replace(bfloat16=0))


def make(N, dtype=np.float32, K=8, C=4):
    """A layer and 7 vectors."""
    random = np.random.default_rng(N)
    keys, x = (random.standard_normal((rows, C)).astype(dtype) for rows in (N, 7))
    return NeighbourOutput(nn.Linear(C, 3), keys, np.arange(N), K), x


@pytest.mark.parametrize("N", [8, 128, 700, 30_000])
def test_the_compiled_search_finds_the_same_keys(N):
    """Fewer keys than a block, several products, and so many keys that some blocks change their order when rounded."""
    layer, x = make(N)
    with fast():
        scores, places = nearest_keys(x, layer)
    expected_scores, expected = nearest_keys(x, layer)
    assert np.array_equal(np.sort(places), np.sort(expected)) and places.shape == (7, 8)
    np.testing.assert_allclose(np.sort(scores), np.sort(expected_scores), rtol=1e-5, atol=1e-5)


def test_each_score_belongs_to_its_key():
    layer, x = make(700)
    with fast():
        scores, places = nearest_keys(x, layer)
    keys = layer.keys.swapaxes(1, 2).reshape(-1, 4)[places]  # (n, K, C)
    np.testing.assert_allclose(scores, (keys * x[:, None]).sum(2) - (keys**2).sum(2) / 2, rtol=1e-5, atol=1e-5)


def test_float64_is_left_to_the_plain_search():
    layer, x = make(700, np.float64)
    with fast():
        scores, places = nearest_keys(x, layer)
    expected_scores, expected = nearest_keys(x, layer)
    assert np.array_equal(scores, expected_scores) and np.array_equal(places, expected)


def test_two_layers_do_not_share_their_rounded_keys():
    (first, x), (second, _) = make(700), make(900)
    with fast():
        nearest_keys(x, first)
        _, places = nearest_keys(x, second)
    assert np.array_equal(np.sort(places), np.sort(nearest_keys(x, second)[1]))
