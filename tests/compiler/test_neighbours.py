"""Two operations as one: the derivation put together from theirs, the compiled loops, and the caches of the parts."""

from importlib.util import find_spec

import numpy as np
import pytest

from scratchformer import Key, compile, fast, nn, ops, reference_only
from scratchformer.backend import Array
from scratchformer.compiler.neighbours import fused
from scratchformer.compiler.twins import Kept
from scratchformer.dispatch import TwinCache, backward, has_twin, operation
from scratchformer.notation import DerivationError, check_derivation
from scratchformer.notation.run import docstring_of
from scratchformer.testing import check_gradients

loops = pytest.mark.skipif(not find_spec("numba"), reason="needs pip install -e '.[fast]'")
SILU = ops.silu, ops.silu_backward
NORM = ops.layernorm, ops.layernorm_backward
PAIRS = {"dropout_add": (ops.dropout_add, ops.dropout_add_backward)}
PAIRS["add_layernorm"] = fused("add_layernorm", (ops.add, ops.add_backward), NORM)
if find_spec("numba"):
    compile(*PAIRS["add_layernorm"])


def arrays(*shapes):
    generator = np.random.default_rng(3)
    return [generator.standard_normal(shape) for shape in shapes]


def test_names_that_both_derivations_use_are_told_apart():
    """Two norms in one, of which each has a mean, a scale and a sum over rows."""
    op, op_backward = fused("norm_of_norm", NORM, NORM)
    x, gamma, beta, gamma2, beta2 = arrays((3, 2, 6), 6, 6, 6, 6)
    args = x, gamma, beta, gamma2, beta2
    assert check_derivation(op.reference, op_backward.reference, *args).worst < 1e-12
    check_gradients(op, op_backward, *args)
    text, _ = docstring_of(op.reference)
    assert "s_c = γ_c" in text and "y_c = gamma2_c" in text


def halved(x: Array):
    """Half of each number; the gradient is wrong.

    Forward:

        y_i = x_i/2

    Backward:

        dx_i = dy_i
    """
    return x / 2, x


def halved_backward(dy: Array, x: Array):
    return dy / 2


def test_a_wrong_equation_of_a_part_is_found_in_the_whole():
    op, op_backward = fused("silu_of_half", (operation(halved), backward(halved_backward)), SILU)
    with pytest.raises(DerivationError, match="dx_i = ds_i"):
        check_derivation(op.reference, op_backward.reference, *arrays((2, 3)))


@loops
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (2, 3, 1), (2, 4, 1027)])
@pytest.mark.parametrize("name", PAIRS)
def test_the_loops_give_what_the_reference_gives(name, shape, dtype):
    """Widths that are no multiple of a word of random integers, and of more columns than are drawn at once."""
    op, op_backward = PAIRS[name]
    x, f, dy, gamma, beta = (a.astype(dtype) for a in arrays(shape, shape, shape, shape[-1], shape[-1]))
    args = (x, *((0.3, Key(2)) if "dropout" in name else ()), f, *((gamma, beta) if "norm" in name else ()))
    with reference_only():
        y, cache = op(*args)
        gradients = op_backward(dy, cache)
    with fast():
        found, kept = op(*args)
        assert type(kept) is TwinCache and type(kept.kept) is Kept
        compiled = op_backward(dy, kept)
    tolerance = 1e-5 if dtype == np.float32 else 1e-12
    for one, other in zip((found, *compiled), (y, *gradients), strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * max(1, abs(other).max()))


@loops
def test_a_fused_operation_can_be_a_part():
    """Its caches are those of its parts, and with them their backwards give what the fused one gives."""
    pair = fused("silu_of_sum", (ops.dropout_add, ops.dropout_add_backward), SILU)
    op, op_backward = compile(*pair)
    x, f, dy = arrays((3, 5), (3, 5), (3, 5))
    for way, kind in (reference_only, "DropoutAddCache"), (fast, "TwinCache"):
        with way():
            _, cache = op(x, 0.3, Key(2), f)
            first, second = (of(cache) for of in op.caches)
            assert type(first).__name__ == kind
            found = ops.dropout_add_backward(ops.silu_backward(dy, second), first)
            for one, other in zip(found, op_backward(dy, cache), strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


@loops
def test_what_is_kept_is_rounded_before_others_are_computed_from_it():
    """The norm subtracts the first number of the row, which the backward reads as it was rounded."""
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    x, f, gamma, beta = (a.astype(bfloat16) for a in arrays((40, 6), (40, 6), 6, 6))
    op, _ = PAIRS["add_layernorm"]
    with fast():
        y, cache = op(x, f, gamma, beta)
        s, _ = ops.add(x, f)
        expected, norm = ops.layernorm(s, gamma, beta)
        assert np.array_equal(y, expected)
        for name in ("x", "shift", "rstd"):
            assert np.array_equal(op.caches[1](cache).kept.values[name], norm.kept.values[name])


@loops
def test_after_an_overflow_the_parts_have_the_caches_of_their_references():
    x = np.full((2, 4), 1e30, np.float32)
    x[:, 0] = 0
    gamma, (op, op_backward) = np.ones(4, np.float32), PAIRS["add_layernorm"]
    with reference_only():
        y, cache = op(x, x, gamma, gamma)
        dx = op_backward(x, cache)[0]
    with fast():
        found, cache = op(x, x, gamma, gamma)
        assert np.array_equal(found, y)
        assert np.array_equal(ops.layernorm_backward(x, op.caches[1](cache))[0], dx)


class Doubled(nn.Dropout):
    """A dropout of a user: it drops nothing."""

    def forward(self, x, key=None):
        return 2 * x, None

    def backward(self, dy, cache):
        return 2 * dy


@loops
@pytest.mark.parametrize("order", ["post", "pre"])
@pytest.mark.parametrize("dropout", [nn.Dropout(0.3), nn.Dropout(0.0), Doubled(0.3), None])
def test_a_residual_gives_the_same_with_loops(order, dropout):
    """Also if the branch returns only the last positions, and with a dropout of the user's."""
    branch = nn.RelativeSelfAttention(6, 2, causal=True)
    layer = nn.Residual(branch, nn.LayerNorm(6), order, dropout)
    x, dy = (a.astype(np.float32) for a in arrays((2, 5, 6), (2, 3, 6)))
    found = []
    for way in (reference_only, fast):
        for parameter in layer.parameters():
            parameter.grad[...] = 0
        with way():
            y, cache = layer.forward(x, key=Key(1), queries=3)
            found.append([y, layer.backward(dy, cache), *(p.grad.copy() for p in layer.parameters())])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * max(1, abs(one).max()))


@loops
def test_a_residual_runs_the_fused_loops(monkeypatch):
    x = np.ones((2, 3, 4), np.float32)
    layer = nn.Residual(nn.FeedForward(4), nn.LayerNorm(4), "pre", nn.Dropout(0.5))
    with fast():
        assert has_twin(ops.dropout_add, x, 0.5, Key(0), x)
        monkeypatch.setattr(ops, "add", None)
        _, cache = layer.forward(x, key=Key(0))
        assert cache.dropout.twin.operation == "dropout"
        with reference_only():
            assert not has_twin(ops.dropout_add, x, 0.5, Key(0), x)
    assert not has_twin(ops.dropout_add, x, 0.5, Key(0), x)
