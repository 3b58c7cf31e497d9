"""What the pages of the site are made of: equations as MathML, docstrings, and the mistakes of others."""

import inspect
import re
from xml.etree import ElementTree

import pytest

pytest.importorskip("sphinx", reason="needs pip install -e '.[docs]'")

import museum
from docstrings import pieces as pieces_of
from docstrings import prose, rendered, typeset
from operations import calls, made_loops, used
from reports import consequences, executed

from scratchformer import nn, ops
from scratchformer.catalogue import MISTAKES, Sizes, mistakes_of
from scratchformer.catalogue.derivations import CASES, check, variants
from scratchformer.museum.exhibits import GROUPS, exhibit
from scratchformer.notation import DerivationError, NotationError, parse
from scratchformer.notation.walk import Walk
from scratchformer.pages.mathml import mathml, of_equation, pieces
from scratchformer.pages.passages import equation_id
from scratchformer.testing.diagnosis import says

OPERATIONS = [name for name in CASES if name in ops.__all__]


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_equation_is_mathml(name):
    for item in check(name).derivation.equations:
        for text in (of_equation(item.equation), of_equation(item.equation, display=False), *pieces(item.equation)):
            root = ElementTree.fromstring(text.replace("&nbsp;", " "))
            assert root.tag == "math"
            assert "".join(root.itertext()).strip()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("dx̂_c", ["<msub>", '<mi mathvariant="normal">d</mi><mover accent="true"><mi>x</mi>', "<mi>c</mi>"]),
        ("Σ_{s, s ≤ t} p_ts", ["<munder><mo>∑</mo>", "<mo>≤</mo>"]),
        ("y = a/(b + c)", ["<mi>a</mi><mo>/</mo>", "<mo>+</mo>"]),
        ("x_i²", ["<msup>", "<mn>2</mn>"]),
        ("y_i = x_i where x_i > 0, 0 elsewhere", ["{</mo>", "<mo>&gt;</mo>", "elsewhere"]),
    ],
)
def test_mathml(text, parts):
    shown = mathml(text)
    for part in parts:
        assert part in shown


def test_a_product_of_fractions_is_not_a_tower():
    assert mathml("1/(2 s) · 2/C", display=True).count("<mfrac>") == 2
    assert "<mfrac><mrow><mfrac>" not in mathml("1/(2 s) · 2/C", display=True)


def test_prose_is_escaped_links_public_names_and_sets_known_names_as_mathematics():
    assert prose("see `softmax`") == r"see \ :py:obj:`softmax <scratchformer.ops.softmax>`\ "
    assert prose("*this* a*b x_i |") == r"*this* a\*b x\_i \|"
    assert prose("the sum Σ_s p_ts of a row.", frozenset({"p"})) == r"the sum \ :math:`Σ_s p_ts`\  of a row."
    assert prose("(see p_ts) is", frozenset({"p"})) == r"(see \ :math:`p_ts`\ ) is"


def test_an_indented_block_without_a_derivation_is_text_or_code():
    assert typeset("Use:\n\n    a = f(b)\n\nSee:\n\n    not code here\n") == (
        "Use:\n\n.. code-block:: python\n\n   a = f(b)\n\nSee:\n\n.. code-block:: text\n\n   not code here\n"
    )


@pytest.mark.parametrize("name", sorted({m.operation or m.name.partition(":")[0] for m in MISTAKES if m.equation}))
def test_a_mistake_replaces_an_equation_and_is_found(name):
    """In at least one case of the derivation."""
    for mistake in mistakes_of(name):
        assert any(found(case, mistake) for case in variants(name)), mistake.title


def found(case, mistake):
    """Whether an equation is not true with the mistake in the docstring; one that cannot be evaluated is no proof."""
    report = check(case)
    right = parse(mistake.equation, report.values)
    places = [i for i, item in enumerate(report.derivation.equations) if says(item.equation, right)]
    if not places:  # it is in another case of the derivation
        return False
    number = places[0]
    wrong = report.derivation.replace(number, parse(mistake.wrong, report.values))
    try:
        recheck(case, wrong)
    except DerivationError as error:
        return not isinstance(error.__cause__, NotationError)
    return False


def test_a_mistake_says_how_far_it_puts_the_gradients_off():
    norm, scaling = mistakes_of("layernorm")[0], mistakes_of("attention")[2]
    assert set(consequences("layernorm", norm)) == {"dx"}
    off = consequences("attention", scaling)
    D = CASES["attention"](Sizes()).args[0].shape[-1]
    assert off == pytest.approx({"dq": 1 - 1 / D**0.5, "dk": 1 - 1 / D**0.5})
    assert set(consequences("mean_pool", mistakes_of("mean_pool")[0])) == {""}


@pytest.mark.parametrize("name", ["layernorm", "cross_entropy", "softmax", "gelu", "swiglu"])
def test_each_line_of_the_loops_leads_to_its_equation(name):
    """Each step, that is; a comment above a loop may name several."""
    shown, page = made_loops(name), rendered(pieces_of(inspect.getdoc(getattr(ops, name)), name), name)
    anchors = set(re.findall(r'href="#([^"]*)"', shown))
    there = {equation_id(name, int(item)) for item in re.findall(r":item: (\d+)", page)}
    assert len(anchors) > 1
    assert anchors <= there
    assert shown.count("<label") == 3
    steps = re.findall(r'\S.*  ?<span class="c1">(?:#|//) (.* = .*)</span>', shown)
    assert not [step for step in steps if not step.startswith(("&", "After", "Before"))]


def test_operations_and_layers_link_to_each_other():
    assert calls(nn, "SelfAttention") == ["attention"]
    assert {"layers/SelfAttention`", "layers/RotarySelfAttention`"} <= set(
        re.findall(r"layers/\w+`", used("attention"))
    )
    assert not used("relu")


def recheck(case, derivation):
    ran, _ = executed(CASES[case](Sizes()))
    walk = Walk(ran)
    walk.prepare(derivation)
    walk.items(derivation.name, derivation.items)


def test_the_museum_has_a_page_for_each_group_with_every_exhibit():
    for group, names in GROUPS.items():
        text = museum.page(group)
        assert all(f".. _museum-{name}:" in text and exhibit(name).title in text for name in names)
        assert text.count("**How to derive it.**") == text.count("def right(") == len(names)
