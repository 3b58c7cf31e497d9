"""The derivations of layers and models: every equation in a class's docstring is evaluated, and true."""

import importlib
import inspect
import pkgutil
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scratchformer import models, nn
from scratchformer.catalogue import Sizes, derivations, derivations_of
from scratchformer.notation import DerivationError, check_derivation, parse
from scratchformer.notation.grammar import walk


def classes():
    """Every class of layers that the package defines."""
    for package in nn, models:
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            for name, thing in vars(importlib.import_module(module.name)).items():
                if inspect.isclass(thing) and thing.__module__ == module.name and issubclass(thing, nn.Layer):
                    yield name, thing


CASES = derivations_of("layers")
DERIVED = {name: kind for name, kind in classes() if "Backward." in (vars(kind).get("__doc__") or "")}


def equations_and_code(docstring):
    """The equations and lines of code of a docstring, as they stand."""
    for line in docstring.splitlines():
        if line.startswith("    ") and not line.lstrip().startswith("|"):
            yield from (piece for piece in re.split(r" {3,}", line.strip()) if not re.fullmatch(r"\(.*\)", piece))


def test_no_derivation_is_without_a_case():
    assert len(DERIVED) > 20
    assert DERIVED.keys() == {name.split(",")[0] for name in CASES}


@pytest.mark.parametrize("name", DERIVED)
def test_every_equation_and_line_of_code_is_in_the_report_of_a_case(name):
    cases = [case for case in CASES if case.split(",")[0] == name]
    seen = " ".join(" ".join(row.text.split()) for case in cases for row in derivations.check(case, seed=1).rows)
    expected = list(equations_and_code(inspect.getdoc(DERIVED[name])))
    assert expected
    assert [piece for piece in expected if " ".join(piece.split()) not in seen] == []


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=2)
@given(seed=st.integers(0, 1 << 16), scale=st.floats(1e-2, 3))
def test_derivation_of_a_layer(name, seed, scale):
    report = derivations.check(name, seed, scale)
    assert report.worst < 1e-9
    assert any(row.kind == "gradient" for row in report.rows)


@pytest.mark.parametrize("name", CASES)
def test_a_second_index_over_a_size_has_a_prime_and_no_letter_of_its_own(name):
    found = [node for item in derivations.check(name, seed=1).derivation.equations for node in walk(item.equation)]
    letters = {node[1].rstrip("'") for node in found if node[0] == "idx"}
    assert "e" not in letters  # there is no size E
    if name.startswith("Residual"):
        assert not letters & {node[1] for node in found if node[0] == "name"}


@pytest.mark.parametrize("name", CASES)
def test_no_line_says_only_what_a_gradient_is(name):
    """That dn = ∂L/∂n, or Σ dy ∂y/∂n, is true of any layer: another form, or another term, says what this one does."""
    for item in derivations.check(name, seed=1).derivation.equations:
        assert not says_nothing(item.equation), item.text


def says_nothing(equation):
    """Whether every form of a gradient is only a derivative, times the gradient of what is differentiated."""
    left, *forms = equation.parts
    return left[0] == "name" and all(only_a_derivative(form) for form in forms)


def only_a_derivative(form):
    parts = list(factors(form))
    derivatives = [part for part in parts if part[0] == "partial"]
    above = {f"d{name}" for _, (_, name, _), _ in derivatives}
    others = [part for part in parts if part[0] != "partial"]
    return bool(derivatives) and all(part[0] == "name" and part[1] in above for part in others)


def factors(node):
    """The factors of a product, also of one that is summed."""
    kind, *parts = node
    inside = {"over": parts[2:3], "*": parts, "group": parts, "neg": parts}.get(kind)
    if inside is None:
        yield node
    for part in inside or ():
        yield from factors(part)


@pytest.mark.parametrize(
    "text, nothing",
    [
        ("dq = ∂L/∂q", True),
        ("dx_sc = Σ_t Σ_c' dy_tc' ∂y_tc'/∂x_sc", True),
        ("dx_sc = Σ_t (Σ_c' dy_tc' ∂y_tc'/∂x_sc)", True),
        ("dx_sc = dy_sc + Σ_t Σ_c' df_tc' ∂f_tc'/∂x_sc", False),
        ("dx_n = dy_n ∂y_n/∂x_n = dy_n s_n", False),
        ("dx_n = Σ_k [k = n] dy_k ∂y_k/∂x_n", False),
        ("∂y_n/∂x_n = dy_n", False),
    ],
)
def test_what_says_nothing(text, nothing):
    assert says_nothing(parse(text)) is nothing


MISTAKES = {
    "Residual": ("dx_tc = ds_tc + dn_tc", "dx_tc = dn_tc"),
    "SelfAttention": ("du_tc + dmemory_tc", "du_tc − dmemory_tc"),
    "Stack": ("dm1_ic + dm2_ic", "dm2_ic"),
    "TiedOutput": ("dw_cv + din_vc", "dw_cv"),
    "EncoderDecoder": ("+ √C Σ_b Σ_s", "+ Σ_b Σ_s"),
    "EmbeddingSum": ("de = scale dx", "de = dx"),
    "CrossAttention": ("dkey.w_{c,h D + d} = Σ_b Σ_s memory_bsc dk", "dkey.w_{c,h D + d} = Σ_b Σ_s memory_bsc dv"),
    "RelativeSelfAttention": ("[s = t + S − T]", "[s = t]"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_derivation_is_found(name):
    case, (right, wrong) = CASES[name](Sizes(1)), MISTAKES[name]
    assert right in case.docstring
    mistaken = case.docstring.replace(right, wrong)
    with pytest.raises(DerivationError, match=re.escape(wrong.split(" = ")[-1])):
        check_derivation(case.op, case.op_backward, *case.args, names=case.names, docstring=mistaken, **case.options)
