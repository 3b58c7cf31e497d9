"""The compiled search for the nearest keys, compared with the plain one."""

import numpy as np
import pytest

from scratchformer import nn
from scratchformer.dispatch import fast
from scratchformer.records.neighbours import NeighbourOutput, nearest_keys

pytest.importorskip("numba")
with fast():
    numba_neighbours = pytest.importorskip("scratchformer.records.numba_neighbours")


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


@pytest.mark.parametrize("K", [1, 4])
def test_keys_in_clusters(K):
    """Of keys far from zero and close to each other, rounding changes the order of many. Few may be missed."""
    random = np.random.default_rng(K)
    centres = 3 * random.standard_normal((40, 64))
    keys = np.repeat(centres, 500, axis=0) + 0.1 * random.standard_normal((20_000, 64))
    keys = random.permutation(keys).astype(np.float32)
    layer = NeighbourOutput(nn.Linear(64, 3), keys, np.arange(len(keys)), K)
    x = keys[:100] - layer.mean + np.float32(0.05) * random.standard_normal((100, 64), np.float32)
    with fast():
        _, places = nearest_keys(x, layer)
    pairs = zip(places, nearest_keys(x, layer)[1], strict=True)
    assert sum(len({*found} & {*expected}) for found, expected in pairs) >= 0.99 * 100 * K


@pytest.mark.parametrize("change", [lambda x: x[:1], np.asfortranarray, lambda x: x[::-2]])
def test_one_vector_and_other_orders_of_memory(change):
    layer, x = make(700)
    with fast():
        _, places = nearest_keys(change(x), layer)
    assert np.array_equal(np.sort(places), np.sort(nearest_keys(change(x), layer)[1]))


@pytest.mark.parametrize("types", [("f8", "f8"), ("f8", "f4"), ("f4", "f8")])
def test_other_types_are_left_to_the_plain_search(types):
    layer, x = make(700, np.dtype(types[0]))
    x = x.astype(types[1])
    with fast():
        scores, places = nearest_keys(x, layer)
    expected_scores, expected = nearest_keys(x, layer)
    assert np.array_equal(scores, expected_scores) and np.array_equal(places, expected)


def test_vectors_of_another_width():
    layer, x = make(700)
    with fast(), pytest.raises(ValueError, match="mismatch"):
        nearest_keys(np.tile(x, 2), layer)


def test_maxima_of_rounded_keys():
    """Also where the products of bfloat16 are computed in float32."""
    layer, x = make(3000)
    bits, rounded_halves = numba_neighbours.rounded(layer)
    keys = (bits.reshape(-1, 4).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(keys, layer.keys.swapaxes(1, 2).reshape(-1, 4), rtol=2**-8, atol=1e-30)
    halves = (keys.astype(float) ** 2).sum(axis=1) / 2
    halves[3000:] = np.inf
    np.testing.assert_allclose(rounded_halves.ravel(), halves, rtol=1e-6)
    x_bits = numba_neighbours.half(x)
    scores = (x_bits.astype(np.uint32) << 16).view(np.float32) @ keys.T - halves
    found = np.empty((len(rounded_halves), 7), np.float32)
    library = numba_neighbours.products()._replace(bfloat16=0)
    numba_neighbours.write_maxima(library, x_bits, bits, rounded_halves, False, found)
    np.testing.assert_allclose(
        found.T, scores.reshape(7, -1, rounded_halves.shape[1]).max(axis=2), rtol=1e-5, atol=1e-5
    )


def test_two_layers_do_not_share_their_rounded_keys():
    (first, x), (second, _) = make(700), make(900)
    with fast():
        nearest_keys(x, first)
        _, places = nearest_keys(x, second)
    assert np.array_equal(np.sort(places), np.sort(nearest_keys(x, second)[1]))
