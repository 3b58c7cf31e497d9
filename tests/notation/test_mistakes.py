"""Mistakes planted in the equations of every derivation: the check must find them, except those that change nothing."""

import pytest

from scratchformer.testing.derivations import CASES, plant

# What is not caught, and why it is no mistake: by case, the wrong equation and the reason.
EQUAL: dict[str, dict[str, str]] = {
    "softmax": {
        "∂y_i/∂z_k = (δ_ik exp(z_k) Z − exp(z_i) exp(z_k))/Z² = y_i (δ_ik − y_k)": "δ_ik is 0 unless i = k",
    },
}


@pytest.mark.parametrize("name", dict.fromkeys(name.partition(",")[0] for name in CASES))
def test_planted_mistakes_are_caught(name, thorough):
    found = plant(name, every=1 if thorough else 5)
    assert found
    known = EQUAL.get(name, {})
    survivors = [f"line {m.line}: {m.what}: {m.wrong}" for m in found if not m.caught and m.wrong not in known]
    assert survivors == []
