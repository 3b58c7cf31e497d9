"""Muon and its orthogonalisation.

Groups, frozen parameters and states are in test_groups.py and test_optimizer.py, which are about all optimizers, and
training on several ranks is in tests/parallel/test_ranks.py.
"""

import operator
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest

from scratchformer.backend import CPU, to_cpu, to_device
from scratchformer.dispatch import fast
from scratchformer.models import LanguageModel
from scratchformer.nn import Param
from scratchformer.optim import AdamW, Group, Muon, newton_schulz
from scratchformer.optim.muon import normalized, to_bfloat16
from scratchformer.optim.optimizer import CHUNK
from scratchformer.rng import Key
from scratchformer.testing.strict import STRICT

LOWEST, HIGHEST = 0.68, 1.14  # where the iteration leads every singular value from 0.01 to 1
SHAPES = [(1, 1), (5, 5), (4, 9), (9, 4), (40, 30)]


def matrix(shape, seed=0, dtype=np.float64, smallest=0.05):
    """A matrix whose singular values lie between `smallest` and 1 times the largest."""
    generator = Key(seed).generator()
    u, _, vt = np.linalg.svd(generator.standard_normal(shape), full_matrices=False)
    s = np.append(generator.uniform(smallest, 1, min(shape) - 1), 1)
    return ((u * s) @ vt).astype(dtype)


def singular_values(x):
    return np.linalg.svd(x.astype(np.float64), compute_uv=False)


def language_model(**options):
    return LanguageModel(7, 4, 2, 2, 5, key=Key(1), **options)


def fill(model, step=0):
    for name, p in model.named_parameters().items():
        p.grad[...] = Key(step).fold(name).generator().standard_normal(p.data.shape)


# Newton-Schulz


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e6])
def test_all_singular_values_come_near_1_whatever_the_scale(device, shape, dtype, scale):
    g = matrix(shape, dtype=dtype)
    found = to_cpu(newton_schulz(to_device(scale * g, device).astype(dtype)))
    assert found.shape == shape and found.dtype == dtype
    values = singular_values(found)
    assert LOWEST < values.min() and values.max() < HIGHEST


@pytest.mark.parametrize("shape", SHAPES)
def test_the_singular_vectors_stay(shape):
    """With U and V of g, Uᵀ X V is diagonal; the signs are those of g, so its diagonal is positive."""
    g = matrix(shape)
    u, _, vt = np.linalg.svd(g, full_matrices=False)
    inner = u.T @ newton_schulz(g) @ vt.T
    np.testing.assert_allclose(inner, np.diag(np.diag(inner)), atol=1e-10)
    assert np.diag(inner).min() > LOWEST


def test_a_transposed_matrix_gives_the_transposed_result():
    g = matrix((4, 9))
    np.testing.assert_allclose(newton_schulz(g.T), newton_schulz(g).T, rtol=0, atol=1e-12)
    assert normalized(g).shape == normalized(g.T).shape == (4, 9)  # so that the products are small


def test_a_gradient_of_zero_gives_zero():
    assert not newton_schulz(np.zeros((3, 4), np.float32)).any()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_matrix_of_an_array_is_taken_by_itself(device, shape, precision):
    """Whatever the norms of the others are. On a CPU the bits are the same."""
    if precision == "bfloat16":
        pytest.importorskip("ml_dtypes")
        device = CPU  # the strict device has no bfloat16
    matrices = [10.0**i * matrix(shape, i, np.float32) for i in range(6)]
    g = to_device(np.reshape(matrices, (2, 3, *shape)), device)
    found = to_cpu(newton_schulz(g, precision=precision))
    assert found.shape == g.shape
    expected = [newton_schulz(each, precision=precision) for each in matrices]
    np.testing.assert_allclose(found.reshape(6, *shape), expected, rtol=0, atol=0 if device == CPU else 1e-3)


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_in_bfloat16_are_near_those_in_float32(shape, within):
    """Also inside `fast()`, where MKL computes them. bfloat16 has 8 bits, so each factor is off by at most 1/256."""
    pytest.importorskip("ml_dtypes")
    g = matrix(shape, dtype=np.float32)
    plain = newton_schulz(g)
    if within:
        pytest.importorskip("scratchformer.kernels")
        with fast():
            found = newton_schulz(g, precision="bfloat16")
    else:
        found = newton_schulz(g, precision="bfloat16")
    assert found.dtype == np.float32 and found.shape == shape
    values = singular_values(found)
    assert LOWEST - 0.04 < values.min() and values.max() < HIGHEST + 0.04
    assert np.linalg.norm(found - plain) < 0.1 * np.linalg.norm(plain)
    assert not np.array_equal(found, plain)


def test_float64_is_not_rounded_to_bfloat16():
    g = matrix((4, 9))
    np.testing.assert_array_equal(newton_schulz(g, precision="bfloat16"), newton_schulz(g))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(g=np.ones(3)), r"g: expected \(\.\.\., I, J\), with at least one matrix, got \(3,\)"),
        (dict(g=np.ones((0, 2, 3))), r"g: expected \(\.\.\., I, J\), with at least one matrix, got \(0, 2, 3\)"),
        (dict(g=np.ones((2, 3), int)), "g: expected a floating-point array, got"),
        (dict(steps=-1), "steps: expected a number >= 0, got -1"),
        (dict(precision="float16"), "precision: expected one of float32, bfloat16, got 'float16'"),
    ],
)
def test_wrong_arguments_of_newton_schulz(options, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        newton_schulz(**{"g": np.ones((2, 3))} | options)


# The optimizer


def test_a_step_has_singular_values_near_the_learning_rate():
    """Times √(J/I) for a matrix with more outputs than inputs, whatever the size of its gradient."""
    for shape, factor, options in ((9, 4), 0.1, dict(lr=0.1)), ((4, 9), 0.15, dict(lr=0.1)), ((9, 4), 0.02, {}):
        w = Param(np.zeros(shape), "w")
        w.grad[...] = 1e3 * matrix(shape)
        Muon([w], hidden="*", **options).step()
        values = singular_values(w.data) / factor
        assert LOWEST < values.min() and values.max() < HIGHEST
        assert np.sum(w.data * w.grad) < 0  # downhill


def test_what_is_hidden_is_stepped_by_muon_and_everything_else_by_adamw():
    """AdamW's are tables, the output layer, biases and gains, and the biases of relative positions, with two axes."""
    model, twin = (language_model(positions="relative") for _ in range(2))
    muon = Muon(model.parameters(), 0.02, 3e-3, betas=(0.8, 0.9), weight_decay=0.1)
    adamw = AdamW(twin.parameters(), 3e-3, betas=(0.8, 0.9), weight_decay=0.1)
    for step in range(3):
        fill(model, step), fill(twin, step)
        muon.step(), adamw.step()
    expected = twin.state_dict()
    differing = {name for name, value in model.state_dict().items() if not np.array_equal(value, expected[name])}
    assert differing == {name for name in expected if ".blocks." in name and name.endswith(".w")}
    assert {name.rsplit(".", 2)[1] for name in differing} >= {"query", "key", "value", "unify", "up", "down"}


def test_a_pattern_says_what_is_hidden():
    model = language_model()
    groups = Muon(model.parameters(), hidden="*.up.w").settings()["groups"]
    names = {name for group in groups if group["whole"] for name in group["parameters"]}
    assert names == {name for name in model.named_parameters() if name.endswith(".up.w")}


def test_a_schedule_changes_both_rates_in_proportion():
    """In the first step AdamW moves each number by its rate."""
    for factor in 1.0, 0.25:
        w, b = Param(np.zeros((3, 3)), "w"), Param(np.zeros(3), "b")
        muon = Muon([w, b], lr=0.02, adam_lr=1e-3, weight_decay=0.0, hidden="*")
        muon.lr *= factor
        w.grad[...], b.grad[...] = matrix((3, 3)), 1.0
        muon.step()
        np.testing.assert_allclose(b.data, -1e-3 * factor, rtol=1e-6)
        np.testing.assert_allclose(w.data, -0.02 * factor * newton_schulz(w.grad), rtol=1e-9)


def test_weight_decay_is_decoupled_and_groups_set_rates_of_their_own():
    model = language_model()
    groups = [Group("*.up.w", lr=0.2, weight_decay=0.4), Group("*.up.b", lr=0.1, weight_decay=0.3)]
    muon = Muon(model.parameters(), 0.02, 3e-3, weight_decay=0.5, groups=groups)
    before = model.state_dict()
    muon.zero_grad()
    muon.step()
    for name, value in model.state_dict().items():
        rate = 0.02 if ".blocks." in name and name.endswith(".w") else 3e-3
        decay = 0.5 if value.ndim == 2 else 0.0
        if ".up." in name:
            rate, decay = (0.2, 0.4) if name.endswith("w") else (0.1, 0.3)
        np.testing.assert_allclose(value, before[name] * np.float32(1 - rate * decay), rtol=1e-6, err_msg=name)


def test_threads_step_whole_matrices():
    """One is longer than a piece of the flat arrays. The bits are those without threads."""
    shapes = (300, 400), (70_000,), (4, 9), (3,)
    assert 300 * 400 > CHUNK
    params = [
        [Param(matrix(s) if len(s) == 2 else np.ones(s), f"p{i}") for i, s in enumerate(shapes)] for _ in range(2)
    ]
    optimizers = [Muon(own, hidden="*") for own in params]
    with ThreadPoolExecutor(3) as pool:
        for own, optimizer, map_ in zip(params, optimizers, (map, pool.map), strict=True):
            for p in own:
                p.grad[...] = matrix(p.data.shape, 1) if p.data.ndim == 2 else 1.0
            optimizer.step(map_)
    for p, twin in zip(*params, strict=True):
        np.testing.assert_array_equal(p.data, twin.data)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_slices_take_about_equally_long_and_cut_no_matrix(count):
    """Vectors of the table of embeddings, 192,000 numbers, are stepped by AdamW, twenty times as fast as matrices."""
    model = LanguageModel(2000, d_model=96, heads=2, depth=3, context=8, key=Key(1))
    muon = Muon(model.parameters())
    slices = muon.slices(count)
    assert slices[0].start == 0 and slices[-1].stop == model.flat.data.size
    places, whole = model.flat.slices(), dict(zip(muon.names, muon.treatments, strict=True))
    costs = np.zeros(model.flat.data.size)
    for name, p in model.named_parameters().items():
        costs[places[id(p)]] = 20 if whole[name].whole else 1
    largest = max(costs[places[id(p)]].sum() for p in model.parameters())
    assert all(abs(costs[part].sum() - costs.sum() / count) <= largest for part in slices)
    for part, following in pairwise(slices):
        assert part.stop == following.start
        for name, p in model.named_parameters().items():
            place = places[id(p)]
            assert not (place.start < part.stop < place.stop) or not name.endswith(".w")


def test_gradients_on_a_device_are_few_arrays():
    """Each is clipped by calls of its own. On a CPU no matrix is cut between processes, so each is an array."""
    counts = []
    for frozen in (), (Group("*.0.feedforward.up.w", frozen=True),):
        for device in CPU, STRICT:
            model = language_model().to(device)
            assert model.flat.data.size
            muon = Muon(model.parameters(), groups=frozen)
            gradients = muon.gradients()
            assert sum(g.size for g in gradients) == sum(p.data.size for p in muon.stepped)
            assert all(map(operator.is_, gradients, muon.gradients()))  # the views are made once
            counts.append(len(gradients))
    assert counts[1] == 1 and counts[3] == 2 and min(counts[0], counts[2]) > 10


def test_it_converges_where_gradients_differ_in_size():
    """Least squares whose inputs differ in size by a factor of 100: W must be right for the small ones too.

    Near the end its bits are chance, since the noise of small gradients is scaled up too; but the rate falls so slowly
    that whatever they are, W is an order of magnitude closer than asked.
    """
    generator = Key(3).generator()
    x = generator.standard_normal((200, 6)) * np.geomspace(0.01, 1, 6)
    target = generator.standard_normal((6, 5))
    w = Param(np.zeros((6, 5)), "w")
    muon = Muon([w], lr=0.1, weight_decay=0.0, hidden="*")
    for step in range(1000):
        muon.lr = 0.1 * (1 - step / 1000)
        w.grad[...] = x.T @ (x @ (w.data - target)) / len(x)
        muon.step()
    assert np.abs(w.data - target).max() < 0.05 * np.abs(target).max()


def test_v_is_not_used_for_matrices():
    w, b = Param(matrix((3, 4)), "w"), Param(np.ones(3), "b")
    muon = Muon([w, b], hidden="*")
    w.grad[...], b.grad[...] = matrix((3, 4), 1), 1.0
    muon.step()
    assert muon.m[:12].all() and not muon.v[:12].any() and muon.v[12:].all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(lr=0), "lr: expected a finite number > 0, got 0"),
        (dict(adam_lr=-1.0), "adam_lr: expected a finite number >= 0, got -1.0"),
        (dict(adam_lr="1"), "adam_lr: expected a number, got '1'"),
        (dict(momentum=1.0), "momentum: expected 0 <= momentum < 1, got 1.0"),
        (dict(precision="float16"), "precision: expected one of float32, bfloat16, got 'float16'"),
        (dict(hidden=3), "hidden: expected a str, got 3"),
        (
            dict(hidden="*blocks.*"),
            r"hidden: '\*blocks\.\*' matches no matrix that is not frozen; the last parameters are w, b",
        ),
        (dict(hidden="b"), "hidden: 'b' matches no matrix"),
        (dict(groups=[Group("w", frozen=True)]), r"hidden: '\*' matches no matrix that is not frozen"),
        (dict(betas=(0.9, 1.0)), "betas: expected 0 <= beta < 1, got 1.0"),
    ],
    ids=str,
)
def test_arguments_out_of_range(options, message):
    params = [Param(np.ones((2, 3)), "w"), Param(np.ones(3), "b")]
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        Muon(params, **{"hidden": "*"} | options)


def test_bfloat16_needs_a_package(device, monkeypatch):
    params = [Param(device.xp.ones((2, 3), np.float32), "w")]
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    Muon(params, hidden="*")
    extra = "fast" if device is CPU else "cuda13"
    with pytest.raises(
        ImportError, match=rf"^bfloat16 needs the package ml_dtypes: pip install 'scratchformer\[{extra}\]'"
    ):
        Muon(params, hidden="*", precision="bfloat16")


def test_the_state_of_muon_is_not_for_adamw():
    """Its v is 0 for matrices, by which AdamW would divide."""
    model = LanguageModel(11, 8, 2, 1, 6)
    muon, adamw = Muon(model.parameters()), AdamW(model.parameters(), 1e-3)
    with pytest.raises(ValueError, match="state of another optimizer: matrices: expected none"):
        adamw.load_state_dict(muon.state_dict())
    fewer = Muon(model.parameters(), hidden="*query.w")
    with pytest.raises(ValueError, match="state of another optimizer: matrices: expected 1, got 6"):
        fewer.load_state_dict(muon.state_dict())


def test_rounding_to_bfloat16_keeps_eight_digits():
    """Half of the last one is rounded to even."""
    pytest.importorskip("ml_dtypes")
    last = 2.0**-7
    x = np.array([1 + last / 2, -1 - 1.5 * last, 1 + 0.6 * last, -3], np.float32)
    rounded = to_bfloat16(x)
    assert rounded.dtype == np.float32
    np.testing.assert_array_equal(rounded, np.array([1, -1 - 2 * last, 1 + last, -3], np.float32))
