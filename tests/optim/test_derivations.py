"""The equations of optimizers, clipping and schedules, on the numbers of several steps."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scratchformer import optim
from scratchformer.catalogue import Sizes, derivations, derivations_of
from scratchformer.compiler.in_place import IN_PLACE
from scratchformer.notation import DerivationError, check_derivation

CASES = derivations_of("optimizers")


def test_no_optimizer_or_schedule_is_without_a_case():
    assert CASES.keys() == {*optim.__all__, *(op.__name__ for op in IN_PLACE), "LossScale"} - {"Group"}


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=5)
@given(seed=st.integers(0, 1 << 16), scale=st.floats(1e-3, 100))
@example(seed=3, scale=1.0)
def test_equations(name, seed, scale):
    report = derivations.check(name, seed, scale)
    assert report.worst < 1e-9
    assert any(row.kind == "compared" for row in report.rows)


MISTAKES = {
    "Adam": ("√v̂_ti + eps", "√v_ti + eps"),
    "AdamW": ("(1 − lr_t λ_i)", "(1 − λ_i)"),
    "SGD": ("μ u_{t−1,i} + g_ti", "μ u_{t−1,i} + G_ti"),
    "Muon": ("√(max(1, J/I))", "√(max(1, I/J))"),
    "newton_schulz": ("c S_{k−1,r}^5", "c S_{k−1,r}^4"),
    "clip_by_global_norm": ("c_i = min(1, max_norm/norm) g_i", "c_i = max_norm/norm g_i"),
    "Constant": ("(t + 1)/warmup", "t/warmup"),
    "Cosine": ("cos(π done_t)", "cos(2π done_t)"),
    "InverseSquareRoot": ("/(t + 1)))", "/(t + 2)))"),
    "adam_step": ("root := 1/", "root := "),
    "sgd_step": ("(g_i + decay w0_i)", "(g_i + decay w_i)"),
    "nesterov": ("(1 − momentum) c_i + momentum m_i", "(1 − momentum) c_i + momentum m0_i"),
    "move": ("size change_i", "size size change_i"),
    "round_into": ("out_i = x_i", "out_i = −x_i"),
    "scale": ("share x0_i", "share"),
    "LossScale": ("= N, scale_{t−1}", "= N, scale_t/2"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_in_an_equation_is_found(name):
    case, (right, wrong) = CASES[name](Sizes(4)), MISTAKES[name]
    assert right in case.docstring
    with pytest.raises(DerivationError, match=r"line \d+.*\n.*is not true"):
        check_derivation(case.op, None, names=case.names, docstring=case.docstring.replace(right, wrong))
