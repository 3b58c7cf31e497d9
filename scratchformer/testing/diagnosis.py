"""What a wrong gradient looks like: the search for a mistake that gives exactly this gradient.

Three kinds of explanation are tried, the simplest first: general forms, such as a constant factor (`forms`); mistakes
that others have made in the same operation (`mistakes`); and mistakes planted in the equations of its derivation. An
explanation is given only if it yields every element of every gradient that was compared, to round-off.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..backend import to_cpu
from .contracts import Diagnosis, GradientError, as_tuple, is_array, is_floating
from .differences import FIRST_STEP, Differences, Tensor, compare_directions
from .runs import argument_names, flat
from .shrink import searching

if TYPE_CHECKING:
    from ..notation.consequences import Consequences
    from .differences import Comparison
    from .mistakes import Mistake
    from .runs import LayerRun, PairRun

EXACT = 1e-9  # relative to the largest element: two computations of one gradient
LARGEST = 1000  # elements of a tensor, beyond which no derivation is evaluated
EPS = (1e-5, 1e-6, 1e-8, 1e-12, 0.0)  # that norms commonly add
SECONDS = 1.0  # that a Jacobian, or the search in a derivation, may take

_wanted = ContextVar("diagnosis", default=True)


@contextmanager
def without_diagnosis() -> Iterator[None]:
    """A context in which a failed check does not look for the mistake; the search can take a second."""
    before = _wanted.set(False)
    try:
        yield
    finally:
        _wanted.reset(before)


class Evidence:
    """The gradients of a check that failed, by the name of their tensor.

    found: the analytic gradients. right: the numeric ones, NaN where none was computed. wrong: the names of the tensors
    whose gradients disagree. differences: numerical derivatives of the outputs, for a Jacobian.
    """

    def __init__(self, differences: Differences) -> None:
        self.differences = differences
        self.tensors: dict[str, Tensor] = {}
        self.found: dict[str, np.ndarray] = {}
        self.right: dict[str, np.ndarray] = {}
        self.wrong: list[str] = []

    def add(
        self,
        tensor: Tensor,
        indices: Sequence[tuple[int, ...]],
        elements: Sequence[Comparison],
        directions: Sequence[Comparison],
    ) -> None:
        """Add a tensor with its comparisons: the first of `elements` are those at `indices`."""
        right = np.full(tensor.gradient.shape, np.nan)
        for index, comparison in zip(indices, elements, strict=False):
            right[index] = comparison.numeric
        self.tensors[tensor.name], self.found[tensor.name], self.right[tensor.name] = tensor, tensor.gradient, right
        if not all(c.agrees for c in (*elements, *directions)):
            self.wrong.append(tensor.name)

    def jacobian(self, name: str) -> np.ndarray | None:
        """The derivatives of all outputs (rows) by all elements of a tensor (columns); None if that takes too long."""
        tensor = self.tensors[name]
        if tensor.base.size * self.differences.y.size > LARGEST**2:
            return None
        start = time.thread_time()
        self.differences.outputs()
        if 4 * tensor.base.size * (time.thread_time() - start) > SECONDS:
            return None
        columns = []
        for index in np.ndindex(tensor.base.shape):
            columns.append(self.differences.slope(tensor.along_element(index), FIRST_STEP * tensor.scale))
        return np.stack(columns, axis=-1)

    def explained_by(self, gradients: dict[str, np.ndarray]) -> bool:
        """Whether these are the gradients found; those that are not given must be right."""
        if not all(name in gradients for name in self.wrong):
            return False
        return all(same(gradients[name], found) for name, found in self.found.items() if name in gradients)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two gradients are equal to round-off; one of them may have several axes folded into one."""
    if a.size != b.size:
        return False
    return bool(np.all(np.abs(a.reshape(b.shape) - b) <= EXACT * np.abs(b).max(initial=0)))


def paragraph(diagnoses: Sequence[Diagnosis]) -> list[str]:
    """The lines of a message about a wrong gradient: the three likeliest explanations."""
    if not diagnoses:
        return ["No known mistake gives this gradient."]
    first, *others = (diagnosis.what for diagnosis in diagnoses)
    return [first, *(f"Another explanation: {other}" for other in others[:2])]


def explained(explain: Callable[[Evidence], list[Diagnosis]], evidence: Evidence) -> list[Diagnosis]:
    """The diagnoses of `explain`; none, with a warning, if the search fails: it must not hide the wrong gradient."""
    try:
        with np.errstate(all="ignore"):
            return explain(evidence)
    except Exception as error:
        warnings.warn(f"the search for what the mistake looks like failed: {error!r}", RuntimeWarning, stacklevel=2)
        return []


def wanted() -> bool:
    """Whether a failed check is to be explained: not in `without_diagnosis`, in `shrink`, or under Hypothesis."""
    return _wanted.get() and not searching()


def of_pair(evidence: Evidence, run: PairRun, dy: Any) -> list[Diagnosis]:
    """What the mistake in the backward of a pair looks like."""
    args, kwargs, y = [on_cpu(x) for x in run.args], {name: on_cpu(x) for name, x in run.kwargs.items()}, on_cpu(run.y)
    dy = on_cpu(dy)
    operations = known(args, kwargs, y)
    small = all(x.size <= LARGEST for x in (*args, y) if is_array(x))
    derived = list(derivations(run.op, run.op_backward, operations, args, kwargs, dy)) if small else []

    def catalogue() -> Iterator[Diagnosis]:
        for operation, derivation in derived:
            yield from known_mistakes(evidence, operation, derivation)
        for operation, options in operations.items():
            yield from known_code(evidence, operation, args, options, y, dy)

    def equations() -> Iterator[Diagnosis]:
        for _, derivation in derived:
            yield from planted(evidence, derivation)

    arrays = dict(zip(run.names, args, strict=True)) | kwargs | {"y": y}
    equal, one = (functools.partial(uniform, evidence, run, dy, value) for value in (None, 1.0))
    forms = functools.partial(general, evidence, dy, arrays)
    return likeliest(evidence, dy, arrays, catalogue, equal, forms, equations, one)


def uniform(evidence: Evidence, run: PairRun, dy: Any, value: float | None = None) -> Iterator[Diagnosis]:
    """The gradients are right while all elements of a vector among the arguments are equal, or are `value`."""
    text = "all elements of {} are equal" if value is None else f"{{}} is {value:g}"
    for name, x in run.floating.items():
        if x.ndim == 1 and x.size > 1 and name not in evidence.wrong:
            if right_with(run, dy, x, float(x.mean()) if value is None else value):
                what = f"The gradients are right as long as {text.format(name)}, and wrong otherwise."
                yield Diagnosis(what, "form", f"right for uniform {name}")


def right_with(run: PairRun, dy: Any, x: Any, value: float) -> bool:
    """Whether the gradients are right along random directions when all elements of `x` have this value."""
    before = x.copy()
    x[...] = value
    try:
        gradients = run.outcome(dy).gradients
        tensors = [Tensor(name, array, to_cpu(gradients[name])) for name, array in run.floating.items()]
        differences = Differences(lambda: flat(run.forward()[0]), flat(dy))
        return all(c.agrees for c in compare_directions(tensors, differences, 2, np.random.default_rng(0), 1e-6))
    finally:
        x[...] = before


def of_layer(evidence: Evidence, run: LayerRun, dy: Any) -> list[Diagnosis]:
    """What the mistake in the backward of a layer looks like."""
    arrays = {name: on_cpu(x) for name, x in run.given.items()}
    catalogue = functools.partial(known_layers, evidence, run, dy)
    forms = functools.partial(general, evidence, on_cpu(dy), arrays)
    return likeliest(evidence, on_cpu(dy), arrays, catalogue, forms)


def general(evidence: Evidence, dy: Any, arrays: dict[str, Any]) -> Iterator[Diagnosis]:
    """The general forms that explain the gradients."""
    from .forms import forms

    for what, name in forms(evidence, dy, arrays):
        yield Diagnosis(what, "form", name)


def likeliest(
    evidence: Evidence,
    dy: Any,
    arrays: dict[str, Any],
    catalogue: Callable[[], Iterable[Diagnosis]],
    *others: Callable[[], Iterable[Diagnosis]],
) -> list[Diagnosis]:
    """The explanations, the likeliest first: a factor that has a meaning, and known mistakes; without these, what
    `others` find; without all of these, a factor that has no meaning.
    """
    from .forms import constant_factors

    factors = [Diagnosis(what, "form", name) for what, name in constant_factors(evidence, {**arrays, "dy": dy})]
    unknown = any(factor.name == "unknown factor" for factor in factors)
    if found := [*(() if unknown else factors), *dict.fromkeys(catalogue())]:
        return found
    return [diagnosis for search in others for diagnosis in search()] or factors


def derivations(
    op: Callable,
    op_backward: Callable,
    operations: dict[str, dict[str, Any]],
    args: list,
    kwargs: dict[str, Any],
    dy: Any,
) -> Iterator[tuple[str, Derived]]:
    """Evaluated derivations, by name: that of the pair itself, named "", and those of the package's operations."""
    from ..notation import DerivationError, NotationError
    from ..notation.consequences import consequences
    from ..notation.grammar import canonical
    from .derivations.case import DerivationCase
    from .derivations.operations import reference

    if isinstance(dy, tuple):  # derivations have one y
        return
    for name, options in {"": kwargs, **operations}.items():
        try:
            case = reference(name, *args, **options) if name else DerivationCase(op, op_backward, tuple(args))
            derivation = consequences(case.op, case.op_backward, *args, names=case.names, dy=dy, **options)
        except (DerivationError, NotationError, TypeError, ValueError, KeyError):
            continue  # it has no derivation, or one that is not true or cannot be evaluated
        floating = [n for n, x in zip(argument_names(case.op, tuple(args)), args, strict=True) if is_floating(x)]
        yield name, Derived(derivation, [derivation.gradient(canonical(n)) for n in floating])


def on_cpu(x: Any) -> Any:
    """An array, or a tuple of arrays, on the CPU; anything else as it is."""
    if isinstance(x, tuple):
        return tuple(map(on_cpu, x))
    return to_cpu(x) if is_array(x) else x


def known(args: list, kwargs: dict[str, Any], y: Any) -> dict[str, dict[str, Any]]:
    """The package's operations that give the same y, by name, with the keyword arguments for which they do: `eps` may
    be a constant of the user's own.
    """
    from .. import ops

    found = {}
    for name in ops.__all__ if is_array(y) or np.isscalar(y) else ():
        if f"{name}_backward" not in ops.__all__:
            continue
        reference = getattr(ops, name).reference
        eps = EPS if "eps" in inspect.signature(reference).parameters and "eps" not in kwargs else ()
        for options in (kwargs, *({**kwargs, "eps": value} for value in eps)):
            try:
                other = reference(*args, **options)[0]
            except Exception:  # these are not arguments of this operation
                break
            if np.shape(other) == np.shape(y) and same(np.asarray(other), np.asarray(y)):
                found[name] = options
                break
    return found


class Derived(NamedTuple):
    """A derivation evaluated on the arrays of a check. gradients: its names for the gradients, in the order of the
    floating-point arguments; None for a gradient that it does not derive.
    """

    derivation: Consequences
    gradients: list[str | None]

    def explains(self, evidence: Evidence, changed: dict[str, np.ndarray]) -> bool:
        """Whether the gradients found are those of the derivation with these values changed."""
        values = self.derivation.values | changed
        pairs = zip(evidence.found, self.gradients, strict=True)
        return evidence.explained_by({tensor: values[name] for tensor, name in pairs if name})


def planted(evidence: Evidence, derived: Derived) -> list[Diagnosis]:
    """The mistake nearest to the end of a derivation that gives the gradients found."""
    pairs = zip(evidence.found, derived.gradients, strict=True)
    wrong = {name for tensor, name in pairs if name and tensor in evidence.wrong}
    start = time.thread_time()
    for name, words, changed in derived.derivation.planted(wrong):
        if derived.explains(evidence, changed):
            return [Diagnosis(f"This is what one gets when {words}", "derivation", name)]
        if time.thread_time() - start > SECONDS:
            break
    return []


def known_mistakes(evidence: Evidence, operation: str, derived: Derived) -> Iterator[Diagnosis]:
    """The mistakes of the catalogue in the derivation of an operation that give the gradients found."""
    from ..notation import NotationError, parse
    from .mistakes import mistakes_of, says

    for mistake in mistakes_of(operation):
        try:
            right, wrong = (parse(text, derived.derivation.values) for text in (mistake.equation, mistake.wrong))
            place = next(i for i, chain in enumerate(derived.derivation.equations) if says(chain, right))
            changed = derived.derivation.of(place, wrong)
        except (NotationError, ValueError, StopIteration):  # also if the derivation has no such equation
            continue
        if derived.explains(evidence, changed):
            yield catalogued(mistake)


def known_code(
    evidence: Evidence, operation: str, args: list, kwargs: dict[str, Any], y: Any, dy: Any
) -> Iterator[Diagnosis]:
    """The mistakes of the catalogue in the code of an operation that give the gradients found."""
    from .mistakes import MISTAKES

    for mistake in MISTAKES:
        if mistake.operation != operation or mistake.equation:
            continue
        try:
            op, op_backward = mistake.pair()
            other, cache = op(*args, **kwargs)
            gradients = as_tuple(op_backward(dy, cache))
        except Exception:  # the mistake may be in another part of the file, or raise
            continue
        if same(np.asarray(other), np.asarray(y)) and len(gradients) == len(evidence.found):
            if evidence.explained_by(dict(zip(evidence.found, gradients, strict=True))):
                yield catalogued(mistake)


def known_layers(evidence: Evidence, run: LayerRun, dy: Any) -> Iterator[Diagnosis]:
    """The mistakes of the catalogue in layers that give the gradients found.

    Each is tried on two copies, one with the mistake and one without. In a copy, every layer gets the class of the same
    name from the mistake's file. Only the copy with the mistake may give the gradients found.
    """
    from .mistakes import MISTAKES

    names = {type(layer).__name__ for layer in layers_in(run.layer, {})}
    y, _ = run.forward()
    for mistake in MISTAKES:
        classes = set(re.findall(r"^class (\w+)", mistake.source(), re.MULTILINE)) if mistake.file else set()
        if not mistake.file.startswith(("nn/", "models/")) or not names & classes:
            continue
        try:
            right, wrong = (with_classes(run, found) for found in (vars(mistake.module()), mistake.names()))
            same_y = zip(as_tuple(wrong.forward()[0]), as_tuple(y), strict=True)
            if all(same(to_cpu(a), to_cpu(b)) for a, b in same_y) and evidence.explained_by(layer_gradients(wrong, dy)):
                if not evidence.explained_by(layer_gradients(right, dy)):
                    yield catalogued(mistake)
        except Exception:  # a layer of the same name may have other parts
            continue


def with_classes(run: LayerRun, classes: dict[str, Any]) -> LayerRun:
    """A run of a copy of the layer, in which every layer has the class of its name in `classes`, if there is one."""
    other = copy.copy(run)
    other.layer = copy.deepcopy(run.layer)
    for layer in layers_in(other.layer, {}):
        layer.__class__ = classes.get(type(layer).__name__, type(layer))
    other.params = other.layer.named_parameters()
    other.trained = {name: other.params[name] for name in run.trained}
    return other


def layer_gradients(run: LayerRun, dy: Any) -> dict[str, np.ndarray]:
    """The gradients of inputs and parameters, by name."""
    run.layer.zero_grad()
    returned = run.backward(dy, run.forward()[1])
    return {name: to_cpu(gradient) for name, gradient in returned.items()} | run.parameter_gradients()


def layers_in(x: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """A layer and all layers among its attributes."""
    if id(x) in seen:
        return
    seen[id(x)] = x
    if hasattr(x, "forward") and hasattr(x, "backward"):
        yield x
        x = list(vars(x).values())
    if isinstance(x, list | tuple | dict):
        for part in x.values() if isinstance(x, dict) else x:
            yield from layers_in(part, seen)


def catalogued(mistake: Mistake) -> Diagnosis:
    title, (word, *_) = mistake.title, mistake.title.split()
    title = title[0].lower() + title[1:] if word == "A" or word[1:].islower() else title
    equation = f": {mistake.wrong}" if mistake.wrong else ""
    return Diagnosis(f"A known mistake: {title}{equation}. {mistake.effect}", "catalogue", mistake.name)


def diagnose(
    op: Callable, op_backward: Callable, *args: Any, seed: int = 0, docstring: str | None = None, **kwargs: Any
) -> list[Diagnosis]:
    """What the mistake in `op_backward` looks like, the likeliest first; empty if the gradients are right.

    It is also empty if no known mistake gives these gradients; `check_gradients` tells the two cases apart. docstring:
    the derivation to look for mistakes in, by default that of `op`. The other arguments are those of `check_gradients`;
    its GradientError has the same diagnoses.
    """
    from .gradcheck import check_gradients

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
