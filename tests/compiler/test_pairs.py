"""What `scratchformer.compile` takes, what it refuses, and how it notices that a docstring and its code differ."""

from functools import partial
from typing import NamedTuple

import numpy as np
import pytest

import scratchformer as sf
from scratchformer.compiler import pairs
from scratchformer.dispatch import TwinCache, backward, operation
from scratchformer.notation import DerivationError


def cube(x):
    """The third power.

    Forward and backward:

        y_i = x_i³        dx_i = 3 dy_i x_i²
    """
    return x**3, x


def cube_backward(dy, x):
    return 3 * dy * x * x


class Kept(NamedTuple):
    x: np.ndarray
    power: float


def raised(x, power=3.0):
    """A power of each number.

    Forward and backward:

        y_i = x_i^power        dx_i = dy_i power x_i^(power − 1)
    """
    return x**power, Kept(x, power)


def raised_backward(dy, cache: Kept):
    return dy * cache.power * cache.x ** (cache.power - 1)


def thrice(x, twice=False):
    """Three times each number, or twice; one of the equations is wrong.

    Forward and backward:

        y_i = 2 x_i where twice = True, 3 x_i elsewhere
        a := 2 where twice = True, 4 elsewhere
        dx_i = a dy_i
    """
    return (2 if twice else 3) * x, twice


def thrice_backward(dy, twice):
    return (2 if twice else 3) * dy


def nearly(x):
    """The sum of a row, which the code forgets to take.

    Forward and backward:

        y = Σ_c x_c        dx_c = dy
    """
    return x, None


def nearly_backward(dy, cache):
    return dy


def of_two(x, w):
    """A product, whose backward returns one gradient of two.

    Forward and backward:

        y_i = w_i x_i        dx_i = dy_i w_i        dw_i = dy_i x_i
    """
    return w * x, (x, w)


def of_two_backward(dy, cache):
    x, w = cache
    return dy * w * np.ones_like(x)


class AffineCache(NamedTuple):
    x: np.ndarray
    mu: np.ndarray
    rstd: np.ndarray
    gamma: np.ndarray


def affine(x, gamma, beta, eps=1e-5):
    """Each group of channels is normalised to mean 0 and variance 1, then scaled and shifted.

    x: (N, G, C). gamma, beta: (G, C). A row is a group g of an example n:

        μ_ng = mean_c(x_ngc)        rstd_ng = 1/√(mean_c((x_ngc − μ_ng)²) + eps)
        x̂_ngc = (x_ngc − μ_ng) rstd_ng        y_ngc = γ_gc x̂_ngc + β_gc

    Backward, as for layer norm, where every example n uses the same γ and β:

        dγ_gc = Σ_n dy_ngc x̂_ngc        dβ_gc = Σ_n dy_ngc
        w_ngc := dy_ngc γ_gc        dx_ngk = rstd_ng (w_ngk − mean_c(w_ngc) − x̂_ngk mean_c(w_ngc x̂_ngc))
    """
    mu = x.mean(axis=-1, keepdims=True)
    rstd = 1 / np.sqrt(((x - mu) ** 2).mean(axis=-1, keepdims=True) + eps)
    return gamma * (x - mu) * rstd + beta, AffineCache(x, mu, rstd, gamma)


def affine_backward(dy, cache: AffineCache):
    x, mu, rstd, gamma = cache
    xhat, rows = (x - mu) * rstd, tuple(range(dy.ndim - 2))
    w = dy * gamma
    dx = rstd * (w - w.mean(axis=-1, keepdims=True) - xhat * (w * xhat).mean(axis=-1, keepdims=True))
    return dx, (dy * xhat).sum(axis=rows), dy.sum(axis=rows)


@pytest.fixture(autouse=True)
def numba():
    pytest.importorskip("numba")


@pytest.mark.parametrize("pair", [(cube, cube_backward), (raised, raised_backward)])
def test_the_cache_may_be_an_array_or_a_named_tuple(pair):
    compiled, compiled_backward = sf.compile(*pair)
    x = np.array([[0.5, 1.0, 2.0]])
    expected, cache = pair[0](x)
    with sf.fast():
        y, kept = compiled(x)
    assert isinstance(kept, TwinCache)
    np.testing.assert_allclose(y, expected)
    np.testing.assert_allclose(compiled_backward(x, kept), pair[1](x, cache))
    with sf.fast():
        np.testing.assert_allclose(compiled(x, 2.0)[0] if pair[0] is raised else x * x, x * x)


def test_rows_may_have_several_axes():
    compiled, compiled_backward = sf.compile(affine, affine_backward)
    generator = np.random.default_rng(0)
    args = tuple(generator.standard_normal(shape) for shape in ((2, 6, 3, 5), (3, 5), (3, 5)))
    expected, cache = affine(*args)
    with sf.fast():
        y, kept = compiled(*args)
    np.testing.assert_allclose(y, expected, atol=1e-12)
    for gradient, other in zip(compiled_backward(y, kept), affine_backward(y, cache), strict=True):
        np.testing.assert_allclose(gradient, other, atol=1e-12)


def test_numbers_that_are_not_finite_go_to_the_functions():
    compiled, compiled_backward = sf.compile(affine, affine_backward)
    args = np.full((2, 3, 4), np.inf, np.float32), np.ones((3, 4), np.float32), np.ones((3, 4), np.float32)
    with np.errstate(all="ignore"), sf.fast():
        y, cache = compiled(*args)
        assert np.isnan(y).all()
        assert np.isnan(compiled_backward(y, cache)[0]).all()


def test_arguments_that_the_function_does_not_have_are_refused():
    compiled, _ = sf.compile(raised, raised_backward)
    x = np.ones(3)
    with sf.fast():
        for args, kwargs in (((x,), {"powr": 2}), ((x, 2), {"power": 2}), ((x, 2, 3), {}), ((), {"power": 2})):
            with pytest.raises(TypeError):
                compiled(*args, **kwargs)


def test_a_decorated_pair_gets_the_loops_itself():
    op, op_backward = operation(cube), backward(cube_backward)
    assert sf.compile(op, op_backward) == (op, op_backward)
    with sf.fast():
        assert isinstance(op(np.ones(3))[1], TwinCache)


def test_outside_of_fast_the_functions_run():
    x = np.array([0.1, 0.7])
    assert np.array_equal(sf.compile(cube, cube_backward)[0](x)[0], cube(x)[0])
    with sf.fast(), sf.reference_only():
        assert sf.compile(cube, cube_backward)[0](x)[1] is x


@pytest.mark.parametrize("x", [np.ones((0, 3)), np.ones(3, np.int64), np.float64(2)])
def test_what_the_loops_do_not_take_goes_to_the_functions(x):
    compiled, _ = sf.compile(cube, cube_backward)
    with sf.fast():
        y, cache = compiled(x)
    assert cache is x
    assert np.array_equal(y, x**3)


def test_the_first_call_notices_a_wrong_equation_in_each_set_of_options():
    compiled, _ = sf.compile(thrice, thrice_backward)
    x = np.ones((2, 3), np.float32)
    with sf.fast():
        np.testing.assert_array_equal(compiled(x, twice=True)[0], 2 * x)
        for _ in range(2):
            with pytest.raises(DerivationError, match=r"dx differs by 3\.3e-01 .*check_derivation\(thrice, "):
                compiled(x)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ((nearly, nearly_backward), r"by the equations y has the shape \(2,\); the functions return \(2, 3\)"),
        ((of_two, of_two_backward), "the equations give the gradients dx, dw, and the backward returns others"),
    ],
)
def test_the_first_call_notices_other_results(pair, message):
    compiled, _ = sf.compile(*pair)
    with sf.fast(), pytest.raises(DerivationError, match=message):
        compiled(*[np.ones((2, 3))] * (2 if pair[0] is of_two else 1))


def test_a_result_that_is_zero_is_no_difference():
    """A norm of rows of one number: 0, but for rounding."""

    def centred(x):
        """Each row without its mean.

        Forward and backward:

            y_c = 3 (x_c − mean_c(x_c))/3        dx_k = dy_k − mean_c(dy_c)
        """
        return x - x.mean(axis=-1, keepdims=True), None

    def centred_backward(dy, cache):
        return dy - dy.mean(axis=-1, keepdims=True)

    compiled, _ = sf.compile(centred, centred_backward)
    with sf.fast():
        assert np.allclose(compiled(np.array([[0.1], [0.7]]))[0], 0)


def test_only_functions_with_fitting_names_are_taken():
    with pytest.raises(TypeError, match="op: expected a function with a name, got partial"):
        sf.compile(partial(cube), cube_backward)
    with pytest.raises(TypeError, match="op_backward: expected a function with a name, got int"):
        sf.compile(cube, 3)
    with pytest.raises(
        sf.CompileError, match="cube: expected a backward with the name cube_backward, got raised_backward"
    ):
        sf.compile(cube, raised_backward)


def test_without_numba_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(pairs, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs Numba, of the extra fast: pip install 'scratchformer\[fast\]'"):
        sf.compile(cube, cube_backward)


def test_the_environment_turns_the_loops_off(monkeypatch):
    monkeypatch.setenv("SCRATCHFORMER_FAST", "0")
    compiled, _ = sf.compile(cube, cube_backward)
    with sf.fast():
        assert not isinstance(compiled(np.ones(3))[1], TwinCache)
    with pytest.raises(sf.CompileError):
        sf.compile(len, len)
