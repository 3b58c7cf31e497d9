"""What `scratchformer.compile` takes, what it refuses, and how it notices that a docstring and its code differ."""

import linecache
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


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ((thrice, thrice_backward), r"dx differs by 3\.3e-01 .*twice = False.*check_derivation\(thrice, "),
        ((nearly, nearly_backward), r"by the equations y has the shape \(3,\); the functions return \(3, 4\)"),
        ((of_two, of_two_backward), "the equations give the gradients dx, dw, and the backward returns others"),
    ],
)
def test_other_results_are_refused(pair, message):
    with pytest.raises(DerivationError, match=message):
        sf.compile(*pair)


WRONG = {  # each is right for most arguments: y and dx by the equations; what the functions return; other arguments
    "another number": ("scale x_i²", "dy_i scale² x_i", "scale * x * x", "2 * dy * scale * x", "scale=2.0"),
    "a large number": ("x_i where scale < 50, 3 x_i elsewhere", "dy_i", "x", "dy", "scale=2.0"),
    "a large x": ("x_i where x_i ≤ 100, 3 x_i elsewhere", "dy_i", "x", "dy", ""),
    "a large −x": ("x_i where x_i ≥ −1000, 3 x_i elsewhere", "dy_i", "x", "dy", ""),
    "x = 0": ("x_i where x_i ≠ 0, 3 elsewhere", "dy_i", "x", "dy", ""),
    "x = 7": ("x_i where x_i ≠ 7, 3 elsewhere", "dy_i", "x", "dy", ""),
    "an even size": ("x_i where C mod 2 = 1, 3 x_i elsewhere", "dy_i", "x", "dy", ""),
    "an odd size": ("x_i where C mod 2 = 0, 3 x_i elsewhere", "dy_i", "x", "dy", ""),
    "a size of 1": ("x_i where C > 1, 3 x_i elsewhere", "dy_i", "x", "dy", ""),
    "a large size": ("x_i where C < 300, 3 x_i elsewhere", "dy_i", "x", "dy", ""),
    "a far column": ("x_i where i < 90, 3 x_i elsewhere", "dy_i", "x", "dy", ""),
    "another step": ("x_i + ⌊C/8⌋", "dy_i", "1 * x", "dy", ""),
    "a row of zeros": ("x_i where Σ_j abs(x_j) > 0, 1 elsewhere", "dy_i", "x", "dy", ""),
    "a column after": ("x_i where i ≤ 90, 3 x_i elsewhere", "dy_i", "x", "dy", ""),
    "more rows": ("x_i where N ≤ C, 3 x_i elsewhere", "dy_i", "x", "dy", ""),
    "a bound": ("min(x_i, 5000)", "dy_i", "x", "dy", ""),
    "a negative number": ("x_i where scale > 0, 3 x_i elsewhere", "dy_i", "x", "dy", "scale=2.0"),
    "only the gradient": ("x_i", "dy_i where x_i < 40, 3 dy_i elsewhere", "x", "dy", ""),
    "an option": ("2 x_i where other = True, x_i elsewhere", "dy_i", "x", "dy", "other=False"),
    "a string": ("2 x_i where kind = odd, x_i elsewhere", "dy_i", "x", "dy", "kind='even'"),
    "a string without a name": ("2 x_i where kind = even, x_i elsewhere", "2 dy_i", "2 * x", "2 * dy", "kind='even'"),
    "a negative mean": (
        "exp(x_i)/Σ_j exp(x_j) + x_i",
        "dy_i + p_i (dy_i − Σ_j dy_j p_j)        p_i := exp(x_i)/Σ_j exp(x_j)",
        "np.exp(x - (m := x.max(-1, keepdims=True))) / np.exp(x - m).sum(-1, keepdims=True) + x",
        "dy + (p := np.exp(x - (m := x.max(-1, keepdims=True))) / np.exp(x - m).sum(-1, keepdims=True)) "
        "* (dy - (dy * p).sum(-1, keepdims=True))",
        "",
    ),
    "a large mean": (
        "x_i + mean_c(x_c²) − mean_c(x_c)²",
        "dy_i + 2/C (x_i − mean_c(x_c)) Σ_c dy_c",
        "x + x.var(-1, keepdims=True)",
        "dy + 2 / x.shape[-1] * (x - x.mean(-1, keepdims=True)) * dy.sum(-1, keepdims=True)",
        "",
    ),
}


def pair_of(y, dx, code, backward_code, given):
    """A pair with these equations and this code."""
    names = ["x", *(name.split("=")[0] for name in given.split() if name)]
    source = f'''def op(x{", " * bool(given)}{given}):
    """Wrong somewhere.

    Forward, then backward:

        y_i = {y}
        dx_i = {dx}
    """
    return ({code}) * 1, ({", ".join(names)},)

def op_backward(dy, cache):
    {", ".join(names)}, = cache
    return ({backward_code}) * 1
'''
    file = f"<{source}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    space = {"np": np}
    exec(compile(source, file, "exec"), space)
    return space["op"], space["op_backward"]


@pytest.mark.parametrize("where", WRONG)
def test_what_differs_for_some_arguments_only_is_refused(where):
    with pytest.raises(DerivationError, match="the derivation and the code differ"):
        sf.compile(*pair_of(*WRONG[where]))


def test_a_number_is_drawn_with_its_sign():
    def huber(x, delta=1.0):
        """Half the square of small numbers, and large ones linearly.

        Forward, then backward:

            y_i = ½ x_i² where abs(x_i) ≤ delta, delta (abs(x_i) − ½ delta) elsewhere
            dx_i = dy_i x_i where abs(x_i) ≤ delta, delta dy_i where x_i > 0, −delta dy_i elsewhere
        """
        return np.where(abs(x) <= delta, x * x / 2, delta * (abs(x) - delta / 2)), (x, delta)

    def huber_backward(dy, cache):
        x, delta = cache
        return dy * np.clip(x, -delta, delta)

    sf.compile(huber, huber_backward)


def rows_of(table, ids):
    """Twice the rows that integers choose.

    Forward, then backward:

        y_nc = 2 table_{ids_n,c}        dtable_vc = Σ_n [ids_n = v] 2 dy_nc
    """
    return 2 * table[ids], (table, ids)


def rows_of_backward(dy, cache):
    table, ids = cache
    dtable = np.zeros_like(table)
    np.add.at(dtable, ids, 2 * dy)
    return dtable


def test_integers_that_the_loops_do_not_take_go_to_the_function():
    op, op_backward = sf.compile(rows_of, rows_of_backward)
    args = np.arange(6.0).reshape(3, 2), np.array([0, -1])
    with sf.fast():
        y, cache = op(*args)
        np.testing.assert_array_equal(y, rows_of(*args)[0])
        np.testing.assert_array_equal(op_backward(y, cache), rows_of_backward(y, args))
        with pytest.raises(IndexError, match="out of bounds"):
            op(args[0], np.array([3]))


def test_code_for_matrices_need_not_take_a_single_row():
    def shift(x, beta):
        """The same numbers are added to all rows.

        Forward, then backward:

            y_nc = x_nc + β_c        dx_nc = dy_nc        dβ_c = Σ_n dy_nc
        """
        return x + beta, None

    def shift_backward(dy, cache):
        return dy.copy(), dy.sum(axis=0)

    sf.compile(shift, shift_backward)


def test_an_example_that_the_loops_do_not_take_is_refused():
    with pytest.raises(sf.CompileError, match=r"cube: the loops do not take the example, x = int64 \(3,\): expected"):
        sf.compile(cube, cube_backward, np.arange(3))


def test_without_arguments_to_compare_an_example_is_asked_for():
    def picky(x, name):
        """Twice, of whole hundreds.

        Forward, then backward:

            y_i = 2 x_i        dx_i = 2 dy_i
        """
        if name != "hundreds" or (x % 100).any():
            raise ValueError("expected hundreds")
        return 2 * x, None

    def picky_backward(dy, cache):
        return 2 * dy

    with pytest.raises(sf.CompileError, match=r"picky: .*\(ValueError: expected hundreds\): give an example"):
        sf.compile(picky, picky_backward)
    op, _ = sf.compile(picky, picky_backward, np.full((2, 3), 100.0), name="hundreds")
    with sf.fast():
        assert isinstance(op(np.full((2, 3), 100.0), "hundreds")[1], TwinCache)


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
