"""Mistakes planted in the equations of every derivation: the check must find them, except those that change nothing."""

import inspect

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.catalogue import Sizes
from scratchformer.catalogue.derivations import CASES, plant
from scratchformer.notation.check import read_and_run
from scratchformer.notation.consequences import consequences
from scratchformer.notation.mistakes import mistakes
from scratchformer.notation.spelling import spelled

SHORT = "round_into", "scale"  # out_i = x_i and x_i = share x0_i, in which nothing can be changed
NAMES = [name for name in dict.fromkeys(name.partition(",")[0] for name in CASES) if name not in SHORT]

# Equations that are changed and still true, each with the reason.
EQUAL: dict[str, dict[str, str]] = {
    "linear": {
        "dx_ni = Σ_{n', o} dy_no ∂y_n'o/∂x_ni": "∂y_n'o/∂x_ni is 0 unless n' = n",
    },
    "softmax": {
        "∂y_i/∂z_k = (δ_ik exp(z_k) Z − exp(z_i) exp(z_k))/Z² = y_i (δ_ik − y_k)": "δ_ik is 0 unless i = k",
    },
    "layernorm": {
        f"∂σ/∂x_k = 1/(2 σ) 2/C Σ_c {first} {second} = 1/C (x_k − μ)/σ = x̂_k/C": why
        for first, second, why in [
            ("(x_c)", "(δ_ck − 1/C)", "Σ_c (δ_ck − 1/C) = 0, so any constant may be added to x_c"),
            ("(x_c + μ)", "(δ_ck − 1/C)", "Σ_c (δ_ck − 1/C) = 0, so any constant may be added to x_c"),
            ("(x_c − μ)", "(δ_ck)", "Σ_c (x_c − μ) = 0, so any constant may be added to δ_ck"),
            ("(x_c − μ)", "(δ_ck + 1/C)", "Σ_c (x_c − μ) = 0, so any constant may be added to δ_ck"),
            ("(x_c − μ)", "(δ_ck − 1)", "Σ_c (x_c − μ) = 0, so any constant may be added to δ_ck"),
        ]
    },
    "rotary": {
        "j_d = (d − D/2) mod D": "D/2 and −D/2 are the same modulo D",
        "∂y_td/∂x_tk = δ_dk cos_ti + [k = j] σ_d sin_ti with i = i_k, j = j_d": "both terms are 0 unless i_k = i_d",
    },
    "attention.numpy": {
        "z_hts − m_ht = Σ_d (q_htd/√(D)) k_gsd + (−m_ht) with g = ⌊h G/H⌋": "the factor lost is 1",
        "dp_hts − δ_ht = Σ_d dy_htd v_gsd + (−δ_ht) with g = ⌊h G/H⌋": "the factor lost is 1",
    },
    "dropout.numpy": {
        "∂y_i/∂x_j = δ_ij factor_j": "δ_ij is 0 unless i = j",
        "dx_i = Σ_j dy_i ∂y_j/∂x_i = factor_i dy_i": "∂y_j/∂x_i is 0 unless j = i",
    },
    "embedding.numpy": {
        "dtable_vc = Σ_{n, c'} [places_nc' = v C + c] dy_nc": "the bracket is 0 unless c' = c",
    },
    "CrossAttention": {
        "dmemory_bsc = Σ_h Σ_t Σ_d (da_bhts q_bhtd wk_chd + p_bhts du_bhtd wv_chd)": "p and da are 0 for s ≥ m_b",
        "dmemory_bsc = [s ≤ m_b] Σ_h Σ_t Σ_d (da_bhts q_bhtd wk_chd + p_bhts du_bhtd wv_chd)": "p and da are 0 there",
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_planted_mistakes_are_caught(name, thorough):
    found = plant(name, every=1 if thorough else 12)
    assert found
    survivors = {
        mistake.wrong: f"line {mistake.line}: {mistake.what}: {mistake.wrong}"
        for mistake in found
        if not mistake.caught
    }
    assert [text for wrong, text in survivors.items() if wrong not in EQUAL.get(name, {})] == []
    if thorough:
        assert EQUAL.get(name, {}).keys() <= survivors.keys()


def test_there_are_thousands_of_mistakes_and_hardly_any_is_equal():
    count = 0
    for name in NAMES:
        case = CASES[name](Sizes())
        _, derivation = read_and_run(
            case.op, case.op_backward, *case.args, names=case.names, docstring=case.docstring, **case.options
        )
        wrong = {spelled(wrong) for item in derivation.equations for _, wrong in mistakes(item.equation)}
        assert wrong, f"no mistakes for {name}: {inspect.getdoc(case.op)}"
        count += len(wrong)
    assert count > 10_000  # as docs/checking.md says
    assert sum(map(len, EQUAL.values())) < count / 100


def test_code_of_a_derivation_need_not_be_in_a_wrong_backward():
    x, gamma = np.arange(6.0).reshape(2, 3), np.ones(3)
    wrong = consequences(ops.rmsnorm, lambda dy, cache: (dy, dy.sum(axis=0)), x, gamma)
    assert wrong.equations == consequences(ops.rmsnorm, ops.rmsnorm_backward, x, gamma).equations
