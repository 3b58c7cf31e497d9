"""Gradient checks for an operation with its backward, and for a layer: the values, and then the rules.

    def cube(x):
        return x**3, x

    def cube_backward(dy, x):
        return 3 * x**2 * dy

    print(check_gradients(cube, cube_backward, np.random.default_rng(0).normal(size=(2, 3))))

`differences` explains what is compared and how reliable that is; the rules are in `contracts`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..backend import CPU, Array, Device, array_module, to_cpu
from ..checks import expect_at_least, expect_fraction, expect_positive, expect_real
from ..rng import Key
from ..shell.text import apart, shown
from . import diagnosis
from .contracts import (
    GradientError,
    Untouched,
    arrays_in,
    chosen_rules,
    copied,
    floating_in,
    is_array,
    is_floating,
    labelled,
    mapped,
    repeatable,
    rule,
)
from .differences import (
    FIRST_STEP,
    TOGETHER,
    Comparison,
    Differences,
    NumericDerivative,
    Variable,
    compare,
    compare_directions,
    compare_elements,
    compare_equal,
    compare_groups,
    elements,
    label,
)
from .failed_check import FailedCheck
from .layouts import check_empty, check_layouts
from .linearity import check_linearity, nonlinearity
from .runs import (
    CheckedRun,
    LayerRun,
    Outcome,
    PairRun,
    argument_names,
    backward_operation,
    expect_finite,
    flat,
    layer_arrays,
    name_of,
    normal_like,
)

_EPS = float(np.finfo(np.float64).eps)
_OTHERS = 6  # how many other wrong tensors a message names
_RESOLUTION, _RESOLUTION_SINGLE = 1e-5, 1e-3  # derivatives larger than this must not be lost in round-off
_COMPLEX_STEP = 1e-30
_COMPLEX_RTOL = 1e-10
Comparisons: TypeAlias = dict[str, tuple[list[Comparison], list[Comparison]]]  # of elements, and along directions
_KINKS = 5  # how many are printed with a report


def in_columns(*rows: tuple[str, ...]) -> list[str]:
    """The lines of a table, each column as wide as its longest text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


class Row(NamedTuple):
    """What was checked for one tensor: the number of elements and the worst relative error.

    If round-off or a kink makes the numeric value uncertain, the error is scaled by that uncertainty, so that it is at
    most `rtol` in a check that passes.
    """

    tensor: str
    shape: tuple[int, ...]
    elements: int
    worst_relative_error: float


class Report(list):
    """One Row for each tensor checked; `print` shows a table.

    `kinks` names the elements and directions at which a kink made the comparison uncertain, and says what was accepted.
    `notes` says what was not compared, or not closely.
    """

    kinks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def add(self, other: Report, subject: str) -> None:
        """Append the rows and remarks of another Report, each with its subject."""
        self += [row._replace(tensor=f"{subject}: {row.tensor}") for row in other]
        self.kinks += tuple(f"{subject}: {kink}" for kink in other.kinks)
        self.notes += tuple(f"{subject}: {note}" for note in other.notes)

    def __str__(self) -> str:
        head = ("tensor", "shape", "elements checked", "worst relative error")
        rows = [(r.tensor, str(r.shape), str(r.elements), f"{r.worst_relative_error:.1e}") for r in self]
        left_out = [f"and {len(self.kinks) - _KINKS} more kinks"] if len(self.kinks) > _KINKS else []
        return "\n".join([*in_columns(head, *rows), *self.kinks[:_KINKS], *left_out, *self.notes])


@repeatable
def check_gradients(
    op: Callable,
    op_backward: Callable,
    *args: Any,
    seed: int = 0,
    rtol: float = 1e-6,
    max_elements: int = 200,
    directions: int = 2,
    complex_step: bool = False,
    order: int = 1,
    rules: bool | Mapping[str, bool] | None = None,
    device: Device = CPU,
    **kwargs: Any,
) -> Report:
    """Check that `op_backward` is the gradient of `op`, where `y, cache = op(*args, **kwargs)`.

    `op_backward(dy, cache)` must return the gradients of the floating-point arrays among `args`, in order: a tuple, or
    one array if there is only one. The gradient of a tuple, NamedTuple, list or dict of arrays has the same form, that
    of a complex array is dF/dRe + i dF/dIm. Everything else (integer ids, keys, patterns, None, numbers) is passed on
    unchanged, and so are keyword arguments, which get no gradient. `y` may be a number, an array, or a tuple,
    NamedTuple, list or dict of them; then so is `dy`, without what is not floating-point. All arrays are copied to
    `device`, floating-point ones as float64; `args` are not changed. If they are of another library, such as PyTorch,
    the functions are called with arrays of that library. dy is standard normal, from `Key(seed)`.

    The values come first: every element of each argument (`max_elements` random ones if there are more), and the
    derivatives along `directions` random directions, are compared with central differences of F = Σ y dy. They may
    differ by `rtol` of the larger value plus the uncertainty due to round-off and kinks. At a kink any value between
    the one-sided derivatives is accepted, and the Report names it. Equal elements are also moved together.
    `complex_step=True` also compares with Im F(x + ih)/h, h = 1e-30, to 1e-10, for an `op` that is analytic and accepts
    complex arrays.

    With `order=2` the third argument is `op_backward_backward`, the backward of the backward. After the pair itself,
    the backward is checked as an operation of dy and `args`, whose cache is (dy, cache). `op_backward_backward` gets an
    upstream gradient for each gradient that `op_backward` returns, and this cache. It returns the gradients of dy and
    of `args`.

    Then come the rules. These are always checked, unless `rules` switches them off:

    - "again": backward can be called again on one cache, with another dy, also after another forward;
    - "linear": backward is linear in dy;
    - "layouts": the results are the same if arguments and dy are in Fortran order, every second element of a larger
      array, have negative strides, or are read-only, and if dy is a broadcast view.

    These only with `rules=True`, or `rules={"memory": True}`, as for the package's own operations:

    - "in_place": forward and backward do not write to their arguments;
    - "memory": y and the gradients share no memory with args or dy, nor with each other or the results of an earlier
      call, and the gradients none with the cache;
    - "same_bits": on a CPU the same inputs give the same bits;
    - "types": float64 gives float64 and float32 gives float32, whose values `check_precision` checks;
    - "empty": a batch without rows is refused with a ValueError or IndexError, or gives zero gradients;
      `layouts.check_empty` says what a batch is.

    Returns a Report. Raises GradientError naming the tensor, the worst element, both values, the tolerance and the
    seed. Raises ValueError if a wrong gradient could pass: if no array among `args` is floating-point, or one is empty,
    not finite, or only at kinks (such as zeros before a ReLU); if one is so much larger than another that its last
    digit hides the other's derivatives; if round-off hides the derivative of an element; if y has no elements; unless
    0 <= rtol < 1; if `max_elements` and `directions` are both 0, or one is negative.
    """
    if order not in (1, 2):
        raise ValueError(f"order: expected 1 or 2, got {order!r}")
    functions, args = [op, op_backward, *args[: order - 1]], args[order - 1 :]
    for name, function in ("op", op), ("op_backward_backward", functions[-1]):
        if not callable(function) and function is not op_backward:
            raise TypeError(f"{name}: expected a function, got {type(function).__name__}")
    options: dict[str, Any] = {"rtol": rtol, "max_elements": max_elements, "directions": directions}
    options |= {"rules": rules, "device": device}
    call = f"check_gradients({', '.join(map(name_of, functions))}, ..., seed={seed}{', order=2' * (order == 2)})"
    if (xp := _other_library(arrays_in("", [args, kwargs]).values())) is not None:
        op, op_backward, *_ = functions = [_called_with_arrays_of(xp, function) for function in functions]
        args, kwargs = mapped(lambda _, x: to_cpu(x), "", (args, kwargs))
    report, run = _check_pair(op, op_backward, args, kwargs, call, seed, complex_step=complex_step, **options)
    if order == 2:
        gradients = backward_operation(op, op_backward, run.names)
        dy = run.in_form(normal_like(run.y, seed ^ 1, device, np.float64))  # other numbers than those upstream
        second, _ = _check_pair(gradients, functions[2], (dy, *args), kwargs, call, seed, **options)
        report.add(second, gradients.__name__)
    return report


def _check_pair(
    op: Callable,
    op_backward: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    call: str,
    seed: int,
    rules: bool | Mapping[str, bool] | None,
    device: Device,
    complex_step: bool = False,
    **options: Any,
) -> tuple[Report, PairRun]:
    """`check_gradients` of one pair, and the run with its arguments. call: what repeats the check. options: those of
    `_compare_all`.
    """
    names = argument_names(op, args)
    given = dict(zip(names, args, strict=True))
    _expect_tensors({part: x for n, value in given.items() for part, x in floating_in(n, value).items()}, given)
    chosen = chosen_rules(rules if rules is not None else {}, house=False)
    with _explained(name_of(op), call):
        make = functools.partial(PairRun, op, op_backward, names, args, kwargs, device, chosen)
        run = make(np.float64)
        dy = normal_like(run.y, seed, device, np.float64)
        gradients = run.gradients(dy)
        report = _compare_all(
            run,
            dy,
            run.floating,
            gradients,
            seed=seed,
            extra=_complex_comparisons(run, dy) if complex_step else None,
            explain=diagnosis.of_pair,
            single=lambda: make(np.float32),
            **options,
        )
        return report, run


@repeatable
def check_layer(
    layer: Any,
    *inputs: Any,
    seed: int = 0,
    rtol: float = 1e-6,
    max_elements: int = 200,
    directions: int = 2,
    together: int = 1,
    rules: bool | Mapping[str, bool] = True,
    device: Device = CPU,
    **kwargs: Any,
) -> Report:
    """Check the gradients of a layer's floating-point inputs and parameters, on a float64 copy of the layer.

    The layer must have `y, cache = layer.forward(*inputs, **kwargs)`; `dx = layer.backward(dy, cache)`, which returns
    the gradients of the floating-point inputs (a tuple, one array, or None if there are none) and adds to the `.grad`
    of its parameters; `named_parameters()`, a dict of objects with `.data` and `.grad`; `zero_grad()`; and
    `to(device=, dtype=)`. It must be possible to deep-copy it.

    Values are compared as in `check_gradients`, but a random direction moves `together` tensors at once: a model with
    many parameters is checked faster with more. Tensors whose gradients have about the same size go together. If they
    disagree, or if a gradient wrong by a thousandth of the smallest of them could pass, each is compared by itself.

    The rules are those of `check_gradients`, all of them unless `rules` switches some off. For a layer, "in_place" says
    that forward writes to no input, parameter or gradient, and backward only to gradients, by adding to them; it is
    checked before the values. "again" says that two forwards followed by their two backwards give the sum of both, so
    that nothing is remembered outside the cache. "memory" says that no returned array shares memory with a parameter or
    its gradient. Unlike an operation, a layer may return its input as y, or dy as dx (as dropout without a key does),
    since no caller writes to either. And always: neither pass replaces the data or gradient array of a parameter by
    another; `layer` itself is not changed; `named_parameters()` finds every `Param` in it. Parameters that are `frozen`
    need no gradient.

    Returns a Report. Raises GradientError, naming for example `blocks.0.attention.query.w[3, 1]`, and ValueError as
    `check_gradients` does, for the floating-point inputs together with the parameters that are not frozen.
    """
    _expect_layer(layer)
    Key(seed)  # raises an error unless it is a seed
    name = type(layer).__name__
    with _explained(name, f"check_layer({name}(...), ..., seed={seed})"):
        original = Untouched(layer_arrays(layer))
        for place, x in zip(argument_names(layer.forward, inputs), inputs, strict=True):
            if getattr(getattr(x, "dtype", None), "kind", None) == "c":
                expect_real(place, x)
        chosen = chosen_rules(rules, house=True)
        make = functools.partial(LayerRun, layer, inputs, kwargs, device, chosen)
        run = make(np.float64)
        arrays = run.floating | {name: p.data for name, p in run.trained.items()}
        _expect_tensors(arrays, dict(zip(run.names, inputs, strict=True)))
        dy = normal_like(run.forward()[0], seed, device, np.float64)
        gradients = run.gradients(dy)
        original.check("the check of a deep copy")
        report = _compare_all(
            run,
            dy,
            arrays,
            gradients,
            seed=seed,
            rtol=rtol,
            max_elements=max_elements,
            directions=directions,
            together=together,
            explain=diagnosis.of_layer,
            single=lambda: make(np.float32),
        )
        original.check("the check of a deep copy")
        return report


def check_in_groups(op: Callable, op_backward: Callable, *args: Any, **options: Any) -> Report:
    """`check_gradients` in fewer evaluations, with an `order` of 1: `compare_groups` compares the elements."""
    bound = inspect.signature(check_gradients).bind(op, op_backward, *args, **options)
    bound.apply_defaults()
    del bound.arguments["order"]
    return _check_pair(**bound.arguments, call="", in_groups=True)[0]


def diagnose(
    op: Callable, op_backward: Callable, *args: Any, seed: int = 0, docstring: str | None = None, **kwargs: Any
) -> list[diagnosis.Diagnosis]:
    """What the mistake in `op_backward` looks like, the likeliest first; empty if the gradients are right.

    It is also empty if no known mistake gives these gradients; `check_gradients` tells the two cases apart. docstring:
    the derivation to look for mistakes in, by default that of `op`. The other arguments are those of `check_gradients`;
    its GradientError has the same diagnoses.
    """
    forward = op
    if docstring is not None:

        @functools.wraps(op)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return op(*args, **kwargs)

        forward.__doc__ = docstring
    try:
        check_gradients(forward, op_backward, *args, seed=seed, **kwargs)
    except GradientError as error:
        return list(error.diagnoses)
    return []


def _compare_all(
    run: CheckedRun,
    dy: Any,
    arrays: Mapping[str, Array],
    gradients: dict[str, np.ndarray],
    seed: int,
    rtol: float,
    max_elements: int,
    directions: int,
    explain: Callable[..., list[diagnosis.Diagnosis]],
    single: Callable[[], CheckedRun],
    together: int = 1,
    in_groups: bool = False,
    extra: Callable[[Variable, list, float], list[Comparison]] | None = None,
) -> Report:
    """Compare each tensor's gradient with numerical derivatives, and then check the rules. Returns a Report, or raises
    GradientError with the worst element, or for the first rule that is broken. With `in_groups`, only elements for
    which `compare_groups` asks are compared one by one, unless one of these is wrong.
    """
    _expect_comparisons(rtol, max_elements, directions, together)
    rng = Key(seed).fold("elements and directions").generator()
    tensors = [Variable(name, x, gradients[name]) for name, x in arrays.items()]
    differences = Differences(lambda: flat(run.forward()[0]), flat(dy))
    notes = [f"{name}: not checked, since backward returns no gradient for it" for name in run.unchecked]
    notes += [note for t in tensors if (note := differences.fold_triangle(t))]
    differences.measure_noise(tensors, functools.partial(run.evaluate, dy), rng)
    report, comparisons, failed = Report(), {}, FailedCheck(differences)
    indices: dict[str, list[tuple[int, ...]]] = {t.name: [] for t in tensors}
    if in_groups:
        along_directions, indices = compare_groups(tensors, differences, rng, rtol)
        of_elements = {t.name: compare_elements(t, differences, indices[t.name], rtol) for t in tensors}
        in_groups = all(c.agrees for cases in of_elements.values() for c in cases)
    if not in_groups:
        along_directions = _compare_together(tensors, differences, directions, together, rng, rtol)
        indices = {t.name: sorted({*elements(t, max_elements, rng), *indices[t.name]}) for t in tensors}
        of_elements = {t.name: compare_elements(t, differences, indices[t.name], rtol) for t in tensors}
    pairs = {name: [*zip(indices[name], of_elements[name], strict=True)] for name in indices}
    of_equal = compare_equal(tensors, differences, pairs, along_directions, rtol)
    for t in tensors:
        by_element, by_direction = of_elements[t.name], along_directions[t.name] + of_equal[t.name]
        by_element += extra(t, indices[t.name], differences.round_off(FIRST_STEP * t.scale)) if extra else []
        comparisons[t.name] = by_element, by_direction
        failed.add(t, indices[t.name], by_element, by_direction)
        worst = rtol * float(max((c.excess for c in by_element + by_direction), default=0.0))
        count = t.base.size if in_groups else len(indices[t.name])
        report.append(Row(t.name, tuple(t.base.shape), count, worst))
    single_y = differences.eps > _EPS
    smallest = _RESOLUTION_SINGLE if single_y else _RESOLUTION
    _expect_resolved(comparisons, {t.name: differences.resolution(t) for t in tensors}, smallest)
    outcome = Outcome(run.y, gradients)
    noise = {f"gradient of {t.name}": float(t.noise.max()) for t in tensors}
    _raise_worst(
        comparisons,
        lambda: run.broken.get("in_place") or nonlinearity(run, dy, outcome.named_gradients(), noise),
        lambda: diagnosis.explained(explain, failed, run, dy),
    )
    _expect_decided(comparisons, smallest)
    wide = {name: max(x, differences.floor) for name, x in noise.items()}
    run.check_rules(dy, gradients)
    layouts = run.rules["layouts"] and "in_place" not in run.broken  # which a read-only array does not allow
    if run.rules["linear"]:
        with rule("linear"):
            check_linearity(run, dy, outcome.named_gradients(), noise, wide, layouts)
    if layouts:
        of_y = dict.fromkeys(
            labelled("y", run.y), max(float(differences.weight @ differences.noise), differences.floor)
        )
        with rule("layouts"):
            check_layouts(run, dy, outcome.named(), wide | of_y)
    if run.rules["empty"]:
        with rule("empty"):
            check_empty(run)
    if run.rules["types"]:
        # Values are not compared in float32: they may overflow, and a matrix may have no inverse there.
        with np.errstate(all="ignore"), suppress(np.linalg.LinAlgError), rule("types"):
            single().checked(copied(dy, run.device, np.float32))
    if single_y:
        notes.append(
            f"y is computed in float32: compared to within its round-off, which may hide derivatives below {smallest:g}"
        )
    report.notes = tuple(notes)
    report.kinks = tuple(f"{c.where}: {c.note}" for both in comparisons.values() for c in _at_kinks(*both))
    return report


def _at_kinks(by_element: list[Comparison], by_direction: list[Comparison]) -> list[Comparison]:
    """The comparisons that a kink makes uncertain: along directions only if there are none of elements."""
    return [c for c in by_element if c.kink] or [c for c in by_direction if c.kink]


def _compare_together(
    tensors: list[Variable], differences: Differences, count: int, together: int, rng: np.random.Generator, rtol: float
) -> dict[str, list[Comparison]]:
    """The comparisons along `count` random directions, by tensor name; `check_layer` says which go together."""
    by_name = {}
    tensors = sorted(tensors, key=_sensitivity)
    for group in (tensors[i : i + together] for i in range(0, len(tensors), together)):
        comparisons = compare_directions(group, differences, count, rng, rtol)
        smallest = _sensitivity(group[0]) / max(t.scale for t in group)
        decided = all(c.agrees and c.tolerance <= smallest / 1000 for c in comparisons)
        for t in group:
            alone = len(group) > 1 and not decided
            by_name[t.name] = compare_directions([t], differences, count, rng, rtol) if alone else comparisons
    return by_name


def _sensitivity(tensor: Variable) -> float:
    """How far F moves, by the analytic gradient, when the tensor moves by its scale."""
    return tensor.scale * float(np.linalg.norm(tensor.gradient))


def _raise_worst(
    comparisons: Comparisons,
    not_linear: Callable[[], str],
    explain: Callable[[], list[diagnosis.Diagnosis]],
) -> None:
    """Raise GradientError for the worst element or, if all elements agree, for the worst direction."""
    for kind in (0, 1):
        wrong = {name: [c for c in both[kind] if not c.agrees] for name, both in comparisons.items()}
        wrong = {name: cases for name, cases in wrong.items() if cases}
        if not wrong:
            continue
        name, worst = max(((name, c) for name, cases in wrong.items() for c in cases), key=lambda pair: pair[1].excess)
        others = [f"{n} ({len(cases)})" for n, cases in wrong.items() if n != name]
        analytic, numeric = apart(worst.analytic, worst.numeric, fewest=12)
        lines = [
            f"wrong gradient at {worst.where}:",
            f"  analytic {analytic}",
            f"  numeric  {numeric}"
            + " (y is not finite at any step, or op raises an error)" * bool(np.isnan(worst.numeric)),
            f"  absolute error {worst.error:.3g}, relative error {worst.relative_error:.3g}, "
            f"tolerance {worst.tolerance:.3g} (rtol {worst.rtol:g})",
            f"  {len(wrong[name])} of {len(comparisons[name][kind])} comparisons of {name} disagree",
        ]
        lines += [f"  {worst.note}"] * bool(worst.kink)
        if len(others) > _OTHERS:
            others[_OTHERS:] = [f"{len(others) - _OTHERS} more tensors"]
        lines += [f"  and others of {', '.join(others)}"] * bool(others)
        cause = not_linear()
        lines += [f"  {cause}"] * bool(cause)
        if not diagnosis.wanted():
            raise GradientError("\n".join(lines))
        if np.isnan(worst.numeric):
            raise GradientError("\n".join([*lines, "Nothing is known of the right value there: use other arguments."]))
        diagnoses = explain()
        if TOGETHER in worst.where and worst.numeric and not diagnoses:
            sums = f"they add up to {worst.analytic / worst.numeric:.3g} times that."
            what = f"What equal elements get must add up to what all of them get when they move together: {sums}"
            diagnoses = [diagnosis.Diagnosis(what, "form", "equal elements")]
        if diagnoses or not cause:
            lines += diagnosis.paragraph(diagnoses)
        raise GradientError("\n".join(lines), diagnoses)


def _expect_resolved(comparisons: Comparisons, resolution: dict[str, float], smallest: float) -> None:
    """Raise ValueError if a gradient wrong by a hundredth could pass, because of a huge number in another argument."""
    for name, (by_element, by_direction) in comparisons.items():
        sized = [c for c in by_element + by_direction if c.size]
        if resolution[name] > smallest and sized and all(c.tolerance > c.size / 100 for c in sized):
            raise ValueError(
                f"{name}: expected arguments less different in size, got a number in another argument that is so large "
                f"that derivatives below {resolution[name]:.2g} are lost in its last digit"
            )


def _expect_decided(comparisons: Comparisons, smallest: float) -> None:
    """Raise ValueError if there is a tensor for which no comparison can tell a right gradient from a wrong one, or an
    element above `smallest` for which round-off hides whether its derivative is right or twice as large as it should
    be.
    """
    for name, (by_element, by_direction) in comparisons.items():
        if all(c.open for c in by_element + by_direction):
            first = "".join(f"; {c.where}: {c.note}" for c in _at_kinks(by_element, by_direction)[:1])
            raise ValueError(
                f"{name}: expected values at which y is differentiable, "
                f"got a kink at every element that was compared{first}"
            )
        for c in by_element:
            only_by_noise = c.error > c.tolerance - c.noise  # it agrees because backward rounds much larger terms
            lost = max(c.lost, c.noise if only_by_noise and abs(c.numeric) > smallest else 0.0)
            if c.size > smallest and lost > c.size / 2:
                raise ValueError(
                    f"{c.where}: expected values at which its derivative can be compared, got round-off that hides "
                    f"anything smaller than {lost:.2g}"
                )


def _expect_layer(layer: Any) -> None:
    methods = ("forward", "backward", "named_parameters", "zero_grad", "to")
    missing = [name for name in methods if not hasattr(layer, name)]
    if isinstance(layer, type) or missing:
        what = shown(layer) if isinstance(layer, type | None) else f"a {type(layer).__name__}"
        without = f" without {', '.join(missing)}" if missing else ""
        raise TypeError(f"layer: expected an object such as an nn.Layer, got {what}{without}")


def _other_library(arrays: Iterable[Array]) -> Any:
    """The library of these arrays if its types are not NumPy's, as they are in CuPy and JAX; otherwise None.

    Raises TypeError for a tensor of PyTorch with a gradient of its own.
    """
    others = [x for x in arrays if not isinstance(x.dtype, np.dtype)]
    if any(getattr(x, "requires_grad", False) for x in others):
        raise TypeError("expected arrays, got a tensor of PyTorch that requires a gradient: use check_torch")
    return array_module(*others) if others else None


def _called_with_arrays_of(xp: Any, function: Callable) -> Callable:
    """`function`, which works on arrays of the library `xp`, as a function of NumPy arrays."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = mapped(lambda _, x: xp.asarray(x.copy()) if type(x) is np.ndarray else x, "", (args, kwargs))
        return mapped(lambda _, x: to_cpu(x), "", function(*args, **kwargs))

    return call


def _expect_comparisons(rtol: float, max_elements: int, directions: int, together: int) -> None:
    """Raise ValueError for settings with which any gradient would pass, or that make no sense."""
    expect_fraction("rtol", rtol)
    expect_at_least(0, max_elements=max_elements, directions=directions)
    expect_positive(together=together)
    if not (max_elements or directions):
        raise ValueError("max_elements, directions: expected at least one above 0, got 0 and 0: nothing to compare")


def _expect_tensors(tensors: dict[str, Array], given: dict[str, Any]) -> None:
    """Raise ValueError unless there are tensors to check, none is empty, and all elements are finite."""
    if not tensors:
        types = (f"{name}: {x.dtype if is_array(x) else type(x).__name__}" for name, x in given.items())
        raise ValueError(f"nothing to check: expected a floating-point array, got {', '.join(types) or 'none'}")
    for name, x in tensors.items():
        if not x.size:
            raise ValueError(f"{name}: expected at least one element, got shape {tuple(x.shape)}")
    expect_finite(tensors, ValueError)


def _complex_comparisons(run: PairRun, dy: Any) -> Callable[[Variable, list, float], list[Comparison]]:
    """A function that compares a tensor's gradient at some elements with the complex step.

    The complex step has practically no error of its own. The last argument of the function allows for the rounding of
    the analytic gradient, which in expressions such as 1 − tanh² can be all that remains.
    """
    args = [x.astype(np.complex128) if is_floating(x) else x for x in run.args]
    places = dict(zip(run.names, args, strict=True))
    weight = flat(dy)

    def comparisons(tensor: Variable, indices: list[tuple[int, ...]], round_off: float) -> list[Comparison]:
        compared = []
        for index in indices:
            places[tensor.name][index] = complex(tensor.base[index], _COMPLEX_STEP)
            y = flat(run.op(*args, **run.kwargs)[0])
            places[tensor.name][index] = complex(tensor.base[index], 0)
            estimate = NumericDerivative(float(y.imag @ weight) / _COMPLEX_STEP, round_off)
            where = f"{label(tensor.name, index)} (complex step)"
            analytic = float(tensor.gradient[index])
            compared.append(compare(where, analytic, estimate, float(tensor.noise[index]), _COMPLEX_RTOL))
        return compared

    return comparisons


@contextmanager
def _explained(subject: str, call: str) -> Iterator[None]:
    """Put the name of what is checked before the message of a GradientError, and how to repeat it after."""
    try:
        yield
    except GradientError as error:
        message = f"{subject}: {error}\nRepeat with the same arguments: {call}"
        raise GradientError(message, error.diagnoses) from None
