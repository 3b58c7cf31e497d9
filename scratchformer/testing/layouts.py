"""Checks of memory layouts, in which the same numbers must give the same results, and of batches without rows.

There are two passes, and each combines several layouts for every array: Fortran order and read-only, then every second
element of a larger array, backwards and read-only. Only if one of them goes wrong is each argument tried by itself in
each layout, to name the first that matters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ..backend import Array, array_module, to_cpu
from ..shell.text import apart
from .contracts import GradientError, Untouched, as_tuple, expect_type, labelled
from .differences import label
from .runs import CheckedRun, Outcome, like

_SAME = 1e-8  # the relative difference allowed between results that are added up in another order
_NOISE = 50  # and the multiple of the measured round-off
_UNDERFLOW = np.finfo(np.float64).smallest_normal  # smaller numbers have fewer digits, and may be treated as 0


def fortran(x: Array) -> Array:
    """A copy in Fortran order."""
    return x.T.copy().T


def backwards(x: Array) -> Array:
    """A copy with negative strides."""
    reverse = (*[slice(None, None, -1)] * x.ndim, ...)
    return x[reverse].copy()[reverse]


def spread(x: Array, step: int = 2) -> Array:
    """A copy that is every second element of a larger array, along each axis, with NaN or 0 in between."""
    wide = array_module(x).zeros(tuple(2 * n for n in x.shape), x.dtype)
    if x.dtype.kind == "f":
        wide.fill(np.nan)
    view = wide[(*[slice(None, None, step)] * x.ndim, ...)]
    view[...] = x
    return view


def read_only(x: Array) -> Array:
    """`x`, which cannot be written to from now on, if the array library has such arrays."""
    if isinstance(x, np.ndarray):
        x.flags.writeable = False
    return x


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "in Fortran order": fortran,
    "with negative strides": backwards,
    "as every second element of a larger array": spread,
    "read-only": lambda x: read_only(x.copy()),
}
_TOGETHER: dict[str, Callable[[Array], Array]] = {
    "in Fortran order and read-only": lambda x: read_only(fortran(x)),
    "as every second element of a larger array, backwards and read-only": lambda x: read_only(spread(x, -2)),
}


def difference(
    actual: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    noise: Mapping[str, float],
    factor: float = 1.0,
) -> str:
    """The first result that is not what was expected, in words, at the element that differs most; empty if all are the
    same up to `factor` times the noise of each.
    """
    for name, x in actual.items():
        allowed = _SAME * float(np.abs(expected[name]).max(initial=0)) + factor * (_NOISE * noise[name] + _UNDERFLOW)
        if wrong := differs(name, x, expected[name], allowed):
            return wrong
    return ""


def differs(name: str, x: np.ndarray, y: np.ndarray, allowed: float) -> str:
    """In words, the element of `x` that differs most from that of `y`; empty if none by more than `allowed`."""
    if x.shape != y.shape:
        return f"{name} has the shape {x.shape}, not {y.shape}"
    error = np.abs(x - y)
    if np.all(error <= allowed):
        return ""
    worst = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error)), x.shape)
    index = tuple(map(int, worst))
    return "{} is {}, not {}".format(label(name, index), *apart(x[index], y[index]))


def check_layouts(run: CheckedRun, dy: Array, expected: Mapping[str, np.ndarray], noise: Mapping[str, float]) -> None:
    """Raise GradientError if the results depend on the layout of an argument, or of dy."""

    def problem(layout: Callable[[Array], Array], only: str | None = None) -> str:
        changed = {name: layout(x) for name, x in run.arrays.items() if only in (None, name)}
        upstream = {n: layout(x) if only in (None, n) else x for n, x in labelled("dy", dy).items()}
        untouched = Untouched(changed | upstream)
        try:
            results = run.outcome(like(dy, list(upstream.values())), changed).named()
            untouched.check("it")
        except Exception as error:
            if isinstance(error, GradientError):
                return str(error)
            return f"it raises {type(error).__name__}: {error}"
        return difference(results, expected, noise)

    for together, layout in _TOGETHER.items():
        if whole := problem(layout):
            for name in (*run.arrays, *labelled("dy", dy)):
                for text, single in LAYOUTS.items():
                    if alone := problem(single, name):
                        raise GradientError(f"with {name} {text}, {alone}")
            raise GradientError(f"with all arrays {together}, {whole}")


def check_empty(run: CheckedRun) -> None:
    """Raise GradientError unless a batch without rows is refused with a ValueError or IndexError, or gives an empty y
    and gradients of zero, of the right shapes and types.

    The batch is found by trying: it is the array, or all arrays of one length, whose first row alone gives the first
    row of y, or a number if y is one. If there is no such array, nothing is checked. A y that is not finite is
    accepted: the mean of nothing has no value.
    """
    rows = _batch(run)
    if not rows:
        return
    shapes = [(0, *part.shape[1:]) if part.shape else () for part in as_tuple(run.y)]
    passed: list[Any] = []

    def ones(y: Any) -> Any:
        if not all(np.isfinite(to_cpu(part)).all() for part in as_tuple(y)):
            raise _UndefinedError
        for (name, part), shape in zip(labelled("y", y).items(), shapes, strict=True):
            if tuple(part.shape) != shape:
                raise GradientError(f"{name} has the shape {tuple(part.shape)}, not {shape}")
        passed.append(y)
        return like(y, [run.device.xp.ones(tuple(part.shape), part.dtype) for part in as_tuple(y)])

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            outcome = run.outcome(ones, {name: run.arrays[name][:0] for name in rows})
            _expect_zero(run, outcome, rows)
        except _UndefinedError:
            return
        except Exception as error:
            if isinstance(error, ValueError | IndexError) and not passed:
                return
            what = str(error) if isinstance(error, GradientError) else f"it raises {type(error).__name__}: {error}"
            raise GradientError(f"with {' and '.join(rows)} of length 0, {what}") from error


class _UndefinedError(Exception):
    """A loss of nothing is not finite."""


def _expect_zero(run: CheckedRun, outcome: Outcome, rows: tuple[str, ...]) -> None:
    """A loss of no rows may still depend on other arrays, by a regulariser: then those need only be finite."""
    if run.rules["types"]:
        expect_type(outcome.named(), run.dtype)
    empty = {name: run.arrays[name][:0] for name in rows}
    others = {name: 2 * x + 1 for name, x in run.floating.items() if x.size and name in run.arrays and name not in rows}
    alone = all(
        np.array_equal(to_cpu(a), to_cpu(b))
        for a, b in zip(as_tuple(outcome.y), as_tuple(run.forward(empty | others)[0]), strict=True)
    )
    for name, g in outcome.named_gradients().items():
        wrong = g if alone else ~np.isfinite(g)
        if wrong.any():
            index = tuple(map(int, np.argwhere(wrong)[0]))
            raise GradientError(f"{label(name, index)} is {g[index]:.6g}, not {'0' if alone else 'finite'}")


def _batch(run: CheckedRun) -> tuple[str, ...]:
    """The names of the arrays whose first axis is the batch; see `check_empty`."""
    for names in _candidates(run.arrays):
        try:
            of_a_row, _ = run.forward({name: run.arrays[name][:1] for name in names})
            if all(map(_is_first_row, as_tuple(of_a_row), as_tuple(run.y))):
                return names
        except Exception:  # these are not the batch
            continue
    return ()


def _is_first_row(row: Array, y: Array) -> bool:
    row, y = to_cpu(row), to_cpu(y)
    return row.shape == y[:1].shape and np.allclose(row, y[:1], rtol=_SAME) if y.shape else not row.shape


def _candidates(arrays: Mapping[str, Array]) -> Iterator[tuple[str, ...]]:
    lengths = {name: x.shape[0] for name, x in arrays.items() if x.ndim and x.shape[0] > 1}
    for length in dict.fromkeys(lengths.values()):
        names = tuple(name for name, n in lengths.items() if n == length)
        if len(names) > 1:
            yield names
    yield from ((name,) for name in lengths)
