"""Derivations are true and end on lines that the code contains, and everything public has a docstring."""

import ast
import inspect
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scratchformer import models, nn, ops
from scratchformer.catalogue import Sizes, derivations_of
from scratchformer.catalogue.derivations import check
from scratchformer.notation import DerivationError, NotationError, check_derivation
from scratchformer.notation.grammar import walk

CASES = derivations_of("operations")

# Beyond these scales an exponential of the text overflows, or the gradient is a difference of equal numbers.
# With larger logits, the loss of the only row that counts may be as small as the rounding errors of its terms.
LARGEST_SCALES = {"tanh": 10, "softmax": 10, "cross_entropy": 2, "dense": 3, "attention": 3, "relative_attention": 3}
ALL_OUTPUTS = re.compile(r"\b(?:all|every|each) (?:of the |the |its )?outputs?\b(?! of)")
BACKWARDS = [name for name in ops.__all__ if name.endswith("_backward")]


def normal(text):
    """The text with normalised white space."""
    return " ".join(text.split())


def lines_of_code(docstring):
    """The indented lines of a docstring that are Python statements with an effect: assignments and calls."""
    found = []
    for line in inspect.cleandoc(docstring).splitlines():
        if not line.startswith("    "):
            continue
        try:
            (statement,) = ast.parse(line.strip()).body
        except (SyntaxError, ValueError):
            continue
        called = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
        if called or isinstance(statement, ast.Assign | ast.AugAssign):
            found.append(normal(line))
    return found


def test_every_operation_has_a_derivation():
    assert {name.removesuffix("_backward") for name in BACKWARDS} <= {name.split(",")[0] for name in CASES}


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=max(3, settings.default.max_examples // 8))
@given(seed=st.integers(0, 2**32 - 1), exponent=st.floats(-3, 2))
def test_derivation_is_true(name, seed, exponent):
    scale = min(10**exponent, LARGEST_SCALES.get(name.split(",")[0], 100))
    assert check(name, seed, scale).worst < 1e-9


@pytest.mark.parametrize("name", BACKWARDS)
def test_derivation_ends_on_the_code(name):
    last = check(name.removesuffix("_backward")).rows[-1]
    assert last.kind == "code"
    assert last.text in normal(inspect.getsource(getattr(ops, name).reference))


WRONG = [
    ("softmax", "(dy_k − Σ", "(dy_k + Σ"),
    ("layernorm", "Σ_k dx_k = 0", "Σ_k dx_k x̂_k² = 0"),
    ("linear", "dx = dy @ w.T", "dx = dy @ w"),
    ("dense, silu", "(1 + exp(−h_no))", "(1 + exp(h_no))"),
    ("rotary", "cos_ti = cos(φ_ti)", "cos_ti = sin(φ_ti)"),
    ("embedding", "= Σ_n [ids_n = v] dy_nc", "= Σ_n [ids_n = v] y_nc"),
    ("sinusoidal_positions", "P_tc cos(θ_c) − P", "P_tc cos(θ_c) + P"),
    ("relative_shift", "0 ≤ j − (T − 1 − t) < S", "0 ≤ j − (T − 1 − t) ≤ S"),
    ("cross_entropy, smoothing", "p_nv − t_nv)", "p_nv + t_nv)"),
]


@pytest.mark.parametrize("name, right, wrong", WRONG, ids=[name for name, *_ in WRONG])
def test_wrong_derivation_is_found(name, right, wrong):
    case = CASES[name](Sizes())
    docstring = inspect.getdoc(case.op)
    assert right in docstring
    with pytest.raises((DerivationError, NotationError)):
        check_derivation(
            case.op,
            case.op_backward,
            *case.args,
            names=case.names,
            docstring=docstring.replace(right, wrong),
            **case.options,
        )


@pytest.mark.parametrize("name", BACKWARDS)
def test_parts_of_the_docstring(name):
    """It has an equation first, then shapes, what is returned, the derivation, and what the cache keeps."""
    docstring = getattr(ops, name.removesuffix("_backward")).__doc__
    first, *rest = inspect.cleandoc(docstring).splitlines()
    rest = "\n".join(rest)
    assert " = " in first
    assert re.search(r"^\w+(, \w+)*: (\(|any shape)", rest, re.MULTILINE), "no shapes"
    assert "Returns " in rest
    assert re.search(r"^Backward[.,] ", rest, re.MULTILINE)
    assert "The cache keeps " in rest
    assert "see `" in getattr(ops, name).__doc__


@pytest.mark.parametrize("module", [ops, nn, models], ids=lambda m: m.__name__)
def test_everything_public_has_a_docstring(module):
    assert module.__doc__
    for name in module.__all__:
        thing = getattr(module, name)
        assert thing.__doc__ and not thing.__doc__.startswith(f"{name}("), name  # a dataclass writes its own
        if not inspect.isclass(thing):
            continue
        for attribute, function in vars(thing).items():
            inherited = any(getattr(getattr(base, attribute, None), "__doc__", None) for base in thing.__mro__[1:])
            protocol = attribute in ("forward", "backward")  # described once, in Layer
            if inspect.isfunction(function) and not attribute.startswith("_") and not inherited and not protocol:
                assert function.__doc__, f"{name}.{attribute}"


@pytest.mark.parametrize("name", CASES)
def test_where_the_text_says_all_outputs_the_sum_has_them_all(name):
    """A number of x affects only its row of y: a sum over a part of the outputs needs other words."""
    derivation = check(name).derivation
    said = any(ALL_OUTPUTS.search(normal(item.text)) for item in derivation.items if item.kind in ("prose", "comment"))
    for part in (part for item in derivation.equations if item.equation for part in item.equation.parts[1:]):
        summed = {letter for node in walk(part) if node[:2] == ("over", "sum") for letter in node[2]}
        for _, output, *_ in (node for node in walk(part) if node[0] == "partial"):
            of_output = {index[1] for index in output[2]}
            assert not (said and summed) or of_output <= summed, name
