"""The cases as a program runs them: `check_cases`, behind the command `scratchformer check`."""

import pytest

from scratchformer.backend import CPU
from scratchformer.testing.cases import check_cases


def checked(capsys):
    """The names in the table that was printed."""
    return [line[:48].strip() for line in capsys.readouterr().out.splitlines()[1:]]


def test_a_name_stands_for_a_case_or_for_all_that_begin_so(capsys):
    assert check_cases(["gelu"], CPU)
    assert checked(capsys) == ["gelu", "gelu, tanh"]
    assert check_cases(["gelu, tanh", "relu", "SelfAttention, causal"], CPU)
    assert checked(capsys) == ["relu", "gelu, tanh", "SelfAttention, causal"]


def test_an_unknown_name_is_refused_before_anything_is_checked(capsys):
    with pytest.raises(ValueError, match=r"unknown: gelu, sigmoid; known are .*attention, cross_entropy"):
        check_cases(["relu", "gelu, sigmoid"], CPU)
    assert capsys.readouterr().out == ""
