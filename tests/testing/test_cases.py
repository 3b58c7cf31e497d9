"""The cases as the command `scratchformer check` runs them, with `check_cases`."""

import re
from contextlib import contextmanager

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import CPU, array_module
from scratchformer.catalogue import OPERATIONS, Draw, check
from scratchformer.catalogue.check import check_cases
from scratchformer.commands.cli import main
from scratchformer.dispatch import Twin, TwinCache, reference_only, twins_of
from scratchformer.nn import Linear
from scratchformer.testing.contracts import as_tuple
from scratchformer.testing.strict import STRICT

NAMES = [name.removesuffix("_backward") for name in ops.__all__ if name.endswith("_backward")]


def gradients(name):
    """The number of gradients that the backward of an operation returns."""
    op, op_backward, args, options, _ = OPERATIONS[name](Draw())
    y, cache = op(*args, **options)
    return len(as_tuple(op_backward(np.ones_like(y), cache)))


def kinds(name):
    """The caches of the twins that a check in float64 runs, outside `fast()`: those that float64 arrays give."""
    op, _, args, options, _ = OPERATIONS[name](Draw())
    _, cache = op(*args, **options)
    return [cache.twin] if type(cache) is TwinCache else []


# Every gradient of every reference and twin: the operation, "reference", or a twin, and an index.
BACKWARDS = [
    pytest.param(name, kind, i, id=f"{name}-{kind if kind == 'reference' else 'twin'}-{i}")
    for name in NAMES
    for kind in ("reference", *kinds(name))
    for i in range(gradients(name))
]


@contextmanager
def planted(name, kind, i, factor=1.01):
    """The backward of the reference, or of a twin, with gradient i too large."""
    op_backward = getattr(ops, f"{name}_backward")
    cell = op_backward.__closure__[op_backward.__code__.co_freevars.index("reference")]
    chosen = getattr(ops, name).chosen[False].get(np.ndarray, [])
    right = cell.cell_contents if kind == "reference" else kind.backward

    def wrong(*args, **kwargs):
        returned = right(*args, **kwargs)
        found = [
            g * array_module(g).asarray(factor, g.dtype) if n == i else g for n, g in enumerate(as_tuple(returned))
        ]
        return tuple(found) if isinstance(returned, tuple) else found[0]

    def put(function):
        if kind == "reference":
            cell.cell_contents = function
        else:
            (place,) = (i for i, twin in enumerate(chosen) if twin.forward is kind.forward)
            chosen[place] = kind._replace(backward=function)

    put(wrong)
    try:
        yield
    finally:
        put(right)


@pytest.fixture
def one_case(monkeypatch):
    """A function that removes all cases but one, of an operation or a layer."""

    def leave(name):
        for table in ("OPERATIONS", "LAYERS"):
            monkeypatch.setattr(check, table, {n: c for n, c in getattr(check, table).items() if n == name})

    return leave


def rows(capsys):
    """The rows of the printed table, split into cells, without the header and the verdict below the table."""
    table, _, _ = capsys.readouterr().out.partition("\n\nall ")
    lines = [line for line in table.splitlines()[1:] if not line.startswith(" ")]
    return [re.split(" {2,}", line.strip()) for line in lines]


@pytest.mark.parametrize(("name", "kind", "i"), BACKWARDS)
def test_a_wrong_factor_is_found_in_the_reference_or_in_the_twin(name, kind, i, one_case, capsys):
    one_case(name)
    which = "reference" if kind == "reference" else "twin"
    with planted(name, kind, i), pytest.raises(SystemExit) as end:
        main(["check", name, "--only", which])  # a mistake in one is not seen in the other: see the next test
    assert end.value.code == f"wrong: {name} ({which})"
    table, _, explained = capsys.readouterr().out.partition(f"\n{name} ({which}):\n")
    assert table.count("WRONG") == 1
    assert re.search(r"wrong gradient at \w+\[[\d, ]+\].*:\n +analytic .*\n +numeric ", explained)


@pytest.mark.parametrize("name", NAMES)
def test_only_checks_one_of_the_two(name, one_case):
    one_case(name)
    with planted(name, "reference", 0, factor=7):
        with pytest.raises(SystemExit, match=re.escape(f"wrong: {name} (reference)")):
            main(["check", name, "--only", "reference"])
        if kinds(name):
            main(["check", name, "--only", "twin"])
        else:
            with pytest.raises(SystemExit, match=f"error: nothing to check: on cpu no twin runs for {name}"):
                main(["check", name, "--only", "twin"])
    for kind in kinds(name):
        with planted(name, kind, 0, factor=7):
            main(["check", name, "--only", "reference"])
            with pytest.raises(SystemExit, match=re.escape(f"wrong: {name} (twin)")):
                main(["check", name, "--only", "twin"])


@pytest.mark.parametrize("name", NAMES)
def test_with_nothing_planted_all_is_right(name, one_case, capsys):
    one_case(name)
    main(["check", name])
    ((_, _, _, *errors),) = rows(capsys)
    assert [error != "-" for error in errors] == [True, bool(kinds(name))]


def test_a_layer_is_checked_with_references_and_with_twins(capsys):
    with planted("attention", "reference", 1):
        assert "SelfAttention (reference)" in check_cases(["SelfAttention, causal"], CPU)
    assert rows(capsys)[0][-2] == "WRONG"
    for kind in kinds("attention"):
        with planted("attention", kind, 1):
            assert check_cases(["SelfAttention, causal"], CPU) == ["SelfAttention (twin)"]


@pytest.mark.parametrize(
    "name, device",
    [("linear, no bias", CPU), ("gather", CPU), ("Linear", CPU), ("dropout", STRICT), ("Dropout", STRICT)],
)
def test_a_dash_shows_that_no_twin_ran(name, device, one_case, capsys):
    """`gather` has no twin itself, though it calls `embedding`, which has one."""
    one_case(name)
    assert check_cases([name], device) == []
    ((found, _, _, error, twin),) = rows(capsys)
    assert (found, twin) == (name, "-") and float(error) < 1e-6


@pytest.mark.skipif(not twins_of(ops.attention), reason="no kernels")
def test_a_twin_that_runs_deep_inside_a_layer_is_noticed(one_case, capsys):
    one_case("Recompute")
    assert check_cases(["Recompute"], CPU) == []
    assert float(rows(capsys)[0][-1]) < 1e-6
    with reference_only(), pytest.raises(ValueError, match="nothing to check"):
        check_cases(["Recompute"], CPU, only="twin")
    assert rows(capsys)[0][-1] == "-"


def test_a_twin_that_raises_counts_as_run(monkeypatch, capsys):
    def broken(z):
        return z @ z[..., :-1]

    monkeypatch.setitem(ops.softmax.chosen[False], np.ndarray, [Twin("softmax", lambda z: True, broken, broken)])
    assert check_cases(["softmax"], CPU) == ["softmax (twin)"]
    out = capsys.readouterr().out
    assert "return z @ z[..., :-1]" in out
    assert "ValueError: matmul" in out


def test_an_error_in_one_case_does_not_keep_the_others_from_being_checked(monkeypatch, capsys):
    monkeypatch.setattr(Linear, "backward", lambda *_: 1 / 0)
    assert check_cases(["LayerNorm", "Linear", "Dropout"], CPU, only="reference") == ["Linear (reference)"]
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_a_name_selects_a_case_or_all_that_begin_with_it(capsys):
    assert check_cases(["gelu"], CPU) == []
    assert [row[0] for row in rows(capsys)] == ["gelu", "gelu, tanh"]
    assert check_cases(["gelu, tanh", "relu", "SelfAttention, causal"], CPU) == []
    assert [row[0] for row in rows(capsys)] == ["relu", "gelu, tanh", "SelfAttention, causal"]


def test_an_unknown_name_is_refused_before_anything_is_checked(capsys):
    with pytest.raises(
        ValueError, match=r"unknown: gelu, sigmoid; known are .*attention, attention_backward, cross_entropy"
    ):
        check_cases(["relu", "gelu, sigmoid"], CPU)
    with pytest.raises(ValueError, match="only: expected one of reference, twin, got 'twins'"):
        check_cases(["relu"], CPU, only="twins")
    assert capsys.readouterr().out == ""
