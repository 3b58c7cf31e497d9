"""The levels of a derivation: what is left out is gone, what is left is true, and the first level is small."""

import re
from pathlib import Path

import pytest

pytest.importorskip("sphinx")

import live
from docstrings import derivation, pieces
from levels import (
    WHOLE,
    case_at,
    checked_without,
    extension,
    levels,
    mistake_at,
    sentences,
    simplified,
)
from operations import OPERATIONS, WITHOUT_BACKWARD
from reports import names

from scratchformer import ops
from scratchformer.catalogue import Sizes, mistakes_of
from scratchformer.catalogue.derivations import CASES
from scratchformer.notation import parse
from scratchformer.notation.grammar import letters_in, walk
from scratchformer.notation.spelling import spelled

PAGES = [name for name in OPERATIONS if name in CASES]
EXTENDED = [name for name in PAGES if extension(name)]
ARRAYS = "p m Z k t z a y x q dk da live count rows places n".split()


@pytest.mark.parametrize(
    ("equation", "of", "plain"),
    [
        ("p_hts = m_hts exp(z_hts)/Z_ht where Σ_s' m_hts' > 0, 0 elsewhere", "attention", "p_ts = exp(z_ts)/Z_t"),
        ("a_hts = Σ_d q_htd k_gsd with g = ⌊h G/H⌋", "attention", "a_ts = Σ_d q_td k_sd"),
        ("dk_gsd = Σ_{h, ⌊h G/H⌋ = g} Σ_t da_hts q_htd", "attention", "dk_sd = Σ_t da_ts q_td"),
        ("t_nv = (1 − ε) [v = x_n] + ε/V", "cross_entropy", "t_nv = [v = x_n]"),
        ("y = 1/count Σ_n k_n t_n", "cross_entropy", "y = 1/N Σ_n t_n"),
        ("y_bc = 1/max(n_b, 1) Σ_{t < n_b} x_btc", "mean_pool", "y_bc = 1/T Σ_t x_btc"),
        ("y_bc = max_{t < n_b}(x_btc) for n_b > 0", "max_pool", "y_bc = max_t(x_btc)"),
        ("rows_bk = T b + places_bk", "gather", "rows_k = places_k"),
        ("k := x", "cross_entropy", None),
    ],
)
def test_an_equation_without_what_is_left_out(equation, of, plain):
    found = simplified(parse(equation, ARRAYS), levels(of)[0])
    assert found == (plain and parse(plain, ARRAYS))
    assert plain is None or spelled(found) == plain


def test_sentences_about_what_is_left_out_are_not_there():
    plain, whole = levels("attention")
    text = "First p_hts. All heads share v. The mask m_hts is 1. See `log_softmax`, as Z_ht says:"
    assert sentences(text, plain) == "First p_ts. See `log_softmax`, as Z_t says:"
    assert sentences(text, whole) == text
    assert sentences("Two sums. All heads share them:", plain) == "Two sums:"
    assert sentences("All heads share them:", plain) == ""


@pytest.mark.parametrize("name", EXTENDED)
def test_the_plain_level_is_true_and_smaller(name):
    plain, whole = levels(name)
    for seed in range(3):
        report = checked_without(case_at(name, plain, Sizes(seed)), plain)
        text = " ".join(item.text for item in report.derivation.items[2:] if item.kind in ("prose", "comment"))
        assert not re.search(rf"_[a-z]*[{''.join(plain.letters) or '!'}]\b", text), text
        used = {letter.rstrip("'") for item in report.derivation.equations for letter in letters_in(item.equation)}
        assert not used & plain.letters
    everything = checked_without(case_at(name, whole, Sizes()), whole)
    assert {item.text for item in everything.derivation.items} - {item.text for item in report.derivation.items}


@pytest.mark.parametrize("name", PAGES)
def test_the_plain_level_has_at_most_three_indices(name):
    """A letter that a "with" clause sets is an abbreviation, and a letter and its primes are one index."""
    plain = levels(name)[0]
    report = checked_without(case_at(name, plain, Sizes()), plain)
    for item in report.derivation.equations:
        set_here = {letter for letter, _ in item.equation.bindings}
        letters = {letter.rstrip("'") for letter in letters_in(item.equation.parts)} - set_here
        assert len(letters) <= 3, item.text


@pytest.mark.parametrize("name", EXTENDED)
def test_mistakes_about_what_is_left_out_are_not_there(name):
    for mistake in mistakes_of(name):
        assert mistake_at(mistake, WHOLE, names(name)) is not None


@pytest.mark.parametrize("name", [name for name in PAGES if name not in WITHOUT_BACKWARD])
def test_the_derivation_of_a_page_has_every_item_at_every_level(name):
    text = derivation(name)
    shown = re.findall(r"^\.\. container:: level (.*)$", text, re.MULTILINE)
    count = len(levels(name))
    assert bool(shown) == (count > 1)
    assert all(f"level-{count - 1} whole" in classes or "whole" not in classes for classes in shown)
    assert all(("level-0" in classes.split()) == ("shown" in classes) for classes in shown)
    ids = re.findall(r":item: (\d+)", text)
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", PAGES)
def test_what_stands_first_is_one_sentence(name):
    summary, *_ = pieces(getattr(ops, name).__doc__, name)
    assert summary.kind == "prose" and len(re.findall(r"[^\W\d_]{2,}", summary.text)) <= 40, summary.text


def forms_in(name):
    """The kinds of expressions in the plain derivation of a page."""
    plain = levels(name)[0]
    report = checked_without(case_at(name, plain, Sizes()), plain)
    trees = [tree for item in report.derivation.equations if item.equation for tree in item.equation]
    nodes = [node for tree in trees for node in walk(tree) if re.fullmatch("[a-z]{3,}", str(node[0]))]
    return {node[:2] if node[0] in ("over", "call") else node[0] for node in nodes} - {"num", "idx", "name"}


def test_a_reader_of_the_first_pages_knows_every_form_in_the_last_of_them():
    """The notation's page says so of attention."""
    path = Path(__file__).parents[2] / "docs" / "notation.md"
    advice = path.read_text(encoding="utf-8").partition("If this is new to you")[2].partition("\n\n")[0]
    *first, last = re.findall(r"<operations/(\w+)>", advice)
    assert last == "attention"
    assert forms_in(last) <= set().union(*map(forms_in, first))


def test_an_axis_has_the_letter_that_its_index_has():
    axes = [live.live_data("attention", left_out=left_out)["axes"]["k"] for left_out in levels("attention")]
    assert axes[1][1] == "g"
