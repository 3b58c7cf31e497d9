"""One training step in numbers: the arithmetic on the page holds, done with the digits that are printed."""

import math
import re

import numpy as np
import one_step
import pytest
from one_step import IDS, TARGETS, one_step_page

ONE_DIGIT = 1.01e-4  # one in the last digit


@pytest.fixture(scope="module")
def page():
    return one_step_page()


@pytest.fixture(scope="module")
def tables(page):
    """The tables in order: [(name, array)]."""
    found = re.findall(r"\*\*(.+?)\*\*\n\n\|.*\n\|[-:|]+\n((?:\|.*\n?)+)", page)
    return [(name, np.array([cells(row) for row in rows.splitlines()]).squeeze()) for name, rows in found]


def cells(row):
    return [float(cell.replace("−", "-")) for cell in row.strip("|").split("|")[1:]]


def calculations(page):
    """Each line of the calculations by hand: (entry, what its left side gives, its right side)."""
    for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL):
        for line in block.splitlines():
            entry, left, right = line.split(" = ")
            code = re.sub(r"√([\d.]+)", r"√(\1)", left).replace("−", "-").replace("·", "*").replace("√", "sqrt")
            names = {"sqrt": math.sqrt, "exp": math.exp, "log": math.log}
            yield entry, eval(code, names), float(right.replace("−", "-"))


def test_every_calculation_by_hand_holds(page):
    found = list(calculations(page))
    assert len(found) >= 20
    for entry, left, right in found:
        assert left == pytest.approx(right, abs=ONE_DIGIT), entry


def test_calculations_use_numbers_of_the_tables(page):
    """Every number of a calculation with four decimals is in a table, or was calculated before it."""
    tables_and_text = re.sub(r"```text\n.*?```", "", page, flags=re.DOTALL)
    known = set(re.findall(r"\d+\.\d{4}\b", tables_and_text))
    for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL):
        for line in block.splitlines():
            assert set(re.findall(r"\d+\.\d{4}\b", line.rsplit(" = ", 1)[0])) <= known, line
            known |= set(re.findall(r"\d+\.\d{4}\b", line))


def last(tables, name):
    return [x for n, x in tables if n == name][-1]


def first(tables, name):
    return next(x for n, x in tables if n == name)


def test_forward_and_backward_from_the_printed_digits(tables):
    """Whole tables, recomputed in another way from other tables of the page."""
    p, dlogits, x = first(tables, "p"), first(tables, "dlogits"), last(tables, "n")
    hot = np.eye(5)[list(TARGETS)]
    logits = first(tables, "logits")
    assert np.allclose(x @ first(tables, "`output.w`") + first(tables, "`output.b`"), logits, atol=3e-4)
    assert np.allclose(np.exp(logits) / np.exp(logits).sum(1, keepdims=True), p, atol=1e-4)
    assert np.allclose((p - hot) / 3, dlogits, atol=1e-4)
    assert np.allclose(x.T @ dlogits, first(tables, "gradient of `output.w`"), atol=5e-4)
    dn = dlogits @ first(tables, "`output.w`").T
    assert np.allclose(dn, first(tables, "dx"), atol=3e-4)
    g, xhat, sigma = dn * first(tables, "`norm2.gamma`"), last(tables, "x̂"), last(tables, "r, with μ and σ")[:, -1:]
    dr = (g - g.mean(1, keepdims=True) - xhat * (g * xhat).mean(1, keepdims=True)) / sigma
    assert np.allclose(dr, first(tables, "dr"), atol=5e-4)
    dtable = np.zeros((5, 4))
    np.add.at(dtable, list(IDS), last(tables, "dx"))
    assert np.allclose(dtable, first(tables, "gradient of `body.tokens.table`"), atol=2e-4)


def test_adam_moves_every_weight_by_lr(tables):
    """From the printed gradients and weights alone: w ∓ 0.01, and nothing where the gradient is 0."""
    before, gradient = first(tables, "`output.w`"), first(tables, "gradient of `output.w`")
    assert np.allclose(last(tables, "`output.w`"), before - 0.01 * np.sign(gradient), atol=1e-4)
    names = [name for name, _ in tables]
    assert sum(name.startswith("gradient of") for name in names) == 16 and "`body.blocks.0.norm1.gamma`" in names


def test_the_loss_falls(page):
    before, after = re.search(r"the loss was ([\d.]+) and is now \*\*([\d.]+)\*\*", page).groups()
    assert float(after) < float(before) - 0.1 and f"**The loss is {before}.**" in page


def test_no_number_is_typed(page, monkeypatch):
    """Other weights give another page: hardly a number of four decimals stays."""
    monkeypatch.setattr(one_step, "SEED", 10)
    numbers, others = (re.findall(r"\d\.\d{4}\b", text) for text in (page, one_step_page()))
    same = sum(a == b != "0.0000" for a, b in zip(numbers, others, strict=False))
    assert same < 0.05 * len(numbers)
    assert max(abs(left - right) for _, left, right in calculations(one_step_page())) < 2e-4
