"""The gradient checks of the catalogue's cases, for the tests and for `scratchformer check`."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from textwrap import indent
from typing import Any

from .. import ops
from ..backend import CPU, Device
from ..dispatch import Twin, reference_only
from ..shell.progress import on_terminal, progress_bar
from ..testing.gradcheck import Report, Row, check_gradients, check_layer
from ..testing.precision import as_type, check_precision
from . import LAYERS, OPERATIONS, SECOND_ORDER, Draw

IMPLEMENTATIONS = ("reference", "twin")


def check_operation(name: str, draw: Draw, **options: Any) -> Report:
    """Run check_gradients on the operation case `name`, also one of second order."""
    case = (OPERATIONS | SECOND_ORDER)[name](draw)
    return check_gradients(
        case.op,
        case.op_backward,
        *case.args,
        seed=draw.seed,
        complex_step=case.analytic and draw.device is CPU,
        device=draw.device,
        rules=True,
        **options,
        **case.options,
    )


def check_operation_in(dtype: Any, name: str, draw: Draw) -> Report:
    """Run check_precision on the operation case `name`; the Report has the worst error as a fraction of its bound."""
    case = OPERATIONS[name](draw)
    rows = check_precision(
        case.op, case.op_backward, *case.args, dtype=dtype, seed=draw.seed, device=draw.device, **case.options
    )
    return Report(Row(row.tensor, row.shape, math.prod(row.shape), row.ratio) for row in rows)


def check_layer_case(name: str, draw: Draw, **options: Any) -> Report:
    """Run check_layer on the layer case `name`, with normal parameters of the draw's `parameter_scale`."""
    case = LAYERS[name](draw)
    for p in case.layer.parameters():
        p.data[...] = draw.parameter_scale * draw.generator.standard_normal(p.data.shape)
    return check_layer(case.layer, *case.inputs, seed=draw.seed, device=draw.device, **options, **case.options)


def check_cases(
    names: Sequence[str],
    device: Device,
    seed: int = 0,
    only: str | None = None,
    dtype: Any = None,
) -> list[str]:
    """Check the cases `names` (all if empty), print a table, and return what is wrong: ["attention (reference)"].

    A name is the name of a case ("attention, causal"), or the part before its comma for all cases that begin with it
    ("attention"). Each case is checked twice, with the references (inside `reference_only`) and with the twins; `only`
    restricts this to "reference" or "twin". The twins' column shows "-" if none ran: the operation has no twin for the
    arrays of this device, or no operation in the layer has one. With a `dtype`, the precision of operations in that
    type is checked instead, and the table shows the worst error as a fraction of its bound. Raises ValueError for an
    unknown name or `only`, before anything is checked, and if there was nothing to check.
    """
    cases = select_cases(names, dtype)
    if only not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"only: expected one of {', '.join(IMPLEMENTATIONS)}, got {only!r}")
    columns = [only] if only else IMPLEMENTATIONS
    width = max(map(len, cases))
    print(f"{'case':<{width}}{'tensors':>9}{'elements':>10}" + "".join(f"{column:>12}" for column in columns))
    checked, wrong = False, dict[str, None]()
    # Without a terminal, the rows that are printed show the progress.
    with progress_bar("checking", len(cases), "cases", disable=not on_terminal()) as bar:
        for name, check in cases.items():
            results = [_check_with(column, check, name, Draw(seed, device=device)) for column in columns]
            checked |= any(result is not None for result in results)
            with bar.external_write_mode():  # above the bar
                _print_results(name, results, width)
                for column, result in zip(columns, results, strict=True):
                    if isinstance(result, str):
                        print(f"{name} ({column}):\n{indent(result.strip(), '    ')}", flush=True)
                        wrong[f"{name.partition(',')[0]} ({column})"] = None
            bar.update()
    if not checked:
        raise ValueError(f"nothing to check: on {device} no twin runs for {', '.join(names) or 'any case'}")
    return list(wrong)


def select_cases(names: Sequence[str], dtype: Any = None) -> dict[str, Callable]:
    """The cases `names` (all if empty), see `check_cases`, each with the function that checks it."""
    cases: dict[str, Callable] = {name: check_operation for name in OPERATIONS | SECOND_ORDER}
    cases |= {name: _check_some_elements for name in LAYERS}
    if dtype is not None:
        cases = {name: partial(check_operation_in, as_type("dtype", dtype)) for name in OPERATIONS}
    known = {name.partition(",")[0] for name in cases}
    if unknown := set(names) - known - cases.keys():
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}")
    return {name: check for name, check in cases.items() if not names or {name, name.partition(",")[0]} & set(names)}


def _check_some_elements(name: str, draw: Draw) -> Report:
    """Check a layer case on about 100 elements in all, and one random direction for each tensor."""
    parameters = len(LAYERS[name](Draw(draw.seed)).layer.parameters())
    return check_layer_case(name, draw, max_elements=max(1, 100 // (parameters + 1)), directions=1)


def _check_with(implementation: str, check: Callable, name: str, draw: Draw) -> Report | str | None:
    """The report of a case, or a message if it is wrong, or None if the twins were to be checked but none ran."""
    ran: set[str] = set()
    with reference_only() if implementation == "reference" else _twins_noted(ran):
        try:
            result = check(name, draw)
        except AssertionError as error:
            result = str(error)
        except Exception:  # a bug in the code under test: go on with the other cases
            result = traceback.format_exc(limit=-2)
    twins = ran & {OPERATIONS[name](Draw()).op.__name__} if name in OPERATIONS else ran
    return result if twins or implementation == "reference" else None


@contextmanager
def _twins_noted(ran: set[str]) -> Iterator[None]:
    """Collect in `ran` the names of the operations whose twin runs without falling back to the reference."""

    def noting(twin: Twin) -> Twin:
        def call(*args: Any, **kwargs: Any) -> Any:
            ran.add(twin.operation)
            return twin.forward(*args, **kwargs)

        return twin._replace(forward=call)

    names = [name.removesuffix("_backward") for name in ops.__all__ if name.endswith("_backward")]
    lists = [twins for name in names for table in getattr(ops, name).chosen for twins in table.values()]
    kept = [list(twins) for twins in lists]
    for each in lists:
        each[:] = map(noting, each)
    try:
        yield
    finally:
        for each, right in zip(lists, kept, strict=True):
            each[:] = right


def _print_results(name: str, results: list[Report | str | None], width: int) -> None:
    """Print a case's row of the table."""
    reports = [result for result in results if isinstance(result, Report)]
    tensors, elements = (len(reports[0]), sum(row.elements for row in reports[0])) if reports else ("", "")
    print(f"{name:<{width}}{tensors:>9}{elements:>10}" + "".join(map(_cell, results)), flush=True)


def _cell(result: Report | str | None) -> str:
    """The worst relative error of a report, twelve characters wide."""
    if isinstance(result, Report):
        return f"{max(row.worst_relative_error for row in result):>12.1e}"
    return f"{'-' if result is None else 'WRONG':>12}"
