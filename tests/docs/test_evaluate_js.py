"""The evaluator of the live pages gives what Python's gives, for every derivation of an operation."""

from typing import Any

import numpy as np
import pytest
from scipy.special import erf

from scratchformer import ops
from scratchformer.catalogue import Sizes
from scratchformer.catalogue.derivations import CASES
from scratchformer.pages.live import FILES, STATIC, begin, names_in

pytest.importorskip("sphinx")

import live

NAMES = [n for n in CASES if hasattr(ops, base := n.partition(",")[0]) and not base.endswith("_backward")]

EVALUATE = """
const model = Live.model(arguments[0]);
const values = Object.fromEntries([...model.values].map(([name, { data }]) => [name, [...data].map(String)]));
return { values, short: Object.fromEntries(model.aliases) };
"""


@pytest.fixture(scope="module")
def page(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(f'<meta charset="utf-8"><script src="{STATIC / FILES[0]}"></script>', encoding="utf-8")
    browser.get(path.as_uri())
    return browser


@pytest.mark.parametrize("name", NAMES)
def test_every_value_is_that_of_python(page: Any, name: str) -> None:
    case = CASES[name](Sizes())
    report = live.checked(case)
    found = page.execute_script(EVALUATE, begin(case, report))
    expected = {found["short"].get(name, name): array for name, array in report.values.items()}
    computed, mentioned = names_in(report)
    assert computed <= found["values"].keys()
    for key in mentioned & expected.keys():
        got, known = np.array(found["values"][key], float), expected[key].ravel().astype(float)
        assert got.shape == known.shape, key
        np.testing.assert_allclose(got, known, rtol=0, atol=1e-12 * max(1, np.abs(known).max()), err_msg=key)


@pytest.mark.parametrize(
    "x", [0, 1e-300, 1e-9, 0.1, -0.7, 1.0, 2.49, 2.51, -3.3, 5.9, 6.1, 40, float("inf"), -float("inf")]
)
def test_the_error_function(page: Any, x: float) -> None:
    found = float(
        page.execute_script("return String(Live.erf(Number(arguments[0])))", str(x).replace("inf", "Infinity"))
    )
    assert abs(found - erf(x)) <= 4e-16 * max(abs(erf(x)), 1e-300)
