"""The diagnosis of a wrong gradient: the search for a mistake that gives exactly this gradient.

Three kinds of explanation are tried, the simplest first: general forms, such as a constant factor (`forms`); mistakes
that others have made in the same operation (`known`); and mistakes planted in the equations of its derivation. An
explanation is given only if it yields every element of every gradient that was compared, to round-off.
"""

from __future__ import annotations

import copy
import functools
import inspect
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np

from ..backend import to_cpu
from ..notation import DerivationError, NotationError, parse
from ..notation.consequences import Consequences, consequences
from ..notation.grammar import Equation, canonical
from ..notation.ratios import PLACES
from ..notation.run import Watch
from . import known
from .contracts import Diagnosis, as_tuple, is_array, is_floating
from .differences import Differences, Variable, compare_directions
from .failed_check import MAX_ELEMENTS, SECONDS, FailedCheck, same
from .forms import constant_factors, forms
from .runs import LayerRun, PairRun, argument_names, flat, like
from .shrink import searching

EPS = (1e-5, 1e-6, 1e-8, 1e-12, 0.0)  # that norms commonly add
UNKNOWN = "No known mistake gives this gradient."

_wanted = ContextVar("diagnosis", default=True)


@contextmanager
def without_diagnosis() -> Iterator[None]:
    """A context in which a failed check does not look for the mistake; the search can take a second."""
    before = _wanted.set(False)
    try:
        yield
    finally:
        _wanted.reset(before)


def paragraph(diagnoses: Sequence[Diagnosis]) -> list[str]:
    """The lines of a message about a wrong gradient: the three likeliest explanations."""
    if not diagnoses:
        return [UNKNOWN]
    first, *others = (diagnosis.what for diagnosis in diagnoses)
    return [first, *(f"Another explanation: {other}" for other in others[:2])]


def explained(explain: Callable[..., list[Diagnosis]], *of: Any) -> list[Diagnosis]:
    """The diagnoses that `explain(*of)` gives; none, with a warning, if the search fails: it must not hide the wrong
    gradient.
    """
    try:
        with np.errstate(all="ignore"):
            return explain(*of)
    except Exception as error:
        warnings.warn(f"the search for what the mistake looks like failed: {error!r}", RuntimeWarning, stacklevel=2)
        return []


def wanted() -> bool:
    """Whether a failed check is to be explained: not in `without_diagnosis`, in `shrink`, or under Hypothesis."""
    return _wanted.get() and not searching()


def of_pair(failed: FailedCheck, run: PairRun, dy: Any) -> list[Diagnosis]:
    """What the mistake in the backward of a pair looks like."""
    args, kwargs, y = [on_cpu(x) for x in run.args], {name: on_cpu(x) for name, x in run.kwargs.items()}, on_cpu(run.y)
    dy = on_cpu(dy)
    operations = known_by_result(args, kwargs, y)
    small = all(x.size <= MAX_ELEMENTS for x in (*args, y) if is_array(x))
    derived = list(derivations(run.op, run.op_backward, operations, args, kwargs, dy)) if small else []

    def catalogue() -> Iterator[Diagnosis]:
        for operation, derivation in derived:
            yield from known_mistakes(failed, operation, derivation)
        for operation, (_, options) in operations.items():
            yield from known_code(failed, operation, args, options, y, dy)

    def equations() -> Iterator[Diagnosis]:
        for _, derivation in derived:
            yield from planted(failed, derivation)

    arrays = dict(zip(run.names, args, strict=True)) | kwargs | {"y": y}
    equal, one = (functools.partial(uniform, failed, run, dy, value) for value in (None, 1.0))
    forms = functools.partial(general, failed, dy, arrays, functools.partial(steps, run, dy))
    return likeliest(failed, dy, arrays, catalogue, equal, forms, equations, one)


def steps(run: PairRun, dy: Any) -> dict[str, np.ndarray]:
    """The local variables of a pair, other than gradients, by name; none if its code cannot be followed."""
    for functions in (run.op, run.op_backward), (run.op,):  # a backward that only calls another has no statements
        try:
            with Watch(*functions) as watch:
                _, cache = run.op(*map(on_cpu, run.args), **run.kwargs)
                run.op_backward(run.in_form(dy), cache)
            break
        except Exception:  # it takes no arrays of the CPU
            continue
    else:
        return {}
    named = {name: x for variables in watch.locals.values() for name, x in variables.items()}
    return {name: x for name, x in named.items() if not name.startswith("d")}


def uniform(failed: FailedCheck, run: PairRun, dy: Any, value: float | None = None) -> Iterator[Diagnosis]:
    """The gradients are right while all elements of a vector among the arguments are equal, or are `value`."""
    text = "all elements of {} are equal" if value is None else f"{{}} is {value:g}"
    for name, x in run.floating.items():
        if x.ndim == 1 and x.size > 1 and name not in failed.wrong:
            same = float(x.mean()) if value is None else value
            if all(right_with(run, like(dy, [size * each for each in as_tuple(dy)]), x, same) for size in (1, 1024)):
                what = f"The gradients are right as long as {text.format(name)}, and wrong otherwise."
                yield Diagnosis(what, "form", f"right for uniform {name}")


def right_with(run: PairRun, dy: Any, x: Any, value: float) -> bool:
    """Whether the gradients are right along random directions when all elements of `x` have this value."""
    before = x.copy()
    x[...] = value
    try:
        gradients = run.outcome(dy).gradients
        tensors = [Variable(name, array, gradients[name]) for name, array in run.floating.items()]
        differences = Differences(lambda: flat(run.forward()[0]), flat(dy))
        return all(c.agrees for c in compare_directions(tensors, differences, 2, np.random.default_rng(0), 1e-6))
    finally:
        x[...] = before


def of_layer(failed: FailedCheck, run: LayerRun, dy: Any) -> list[Diagnosis]:
    """What the mistake in the backward of a layer looks like."""
    arrays = {name: on_cpu(x) for name, x in run.given.items()}
    catalogue = functools.partial(known_layers, failed, run, dy)
    forms = functools.partial(general, failed, on_cpu(dy), arrays)
    return likeliest(failed, on_cpu(dy), arrays, catalogue, forms)


def general(
    failed: FailedCheck, dy: Any, arrays: dict[str, Any], steps: Callable[[], dict[str, np.ndarray]] = dict
) -> Iterator[Diagnosis]:
    """The general forms that explain the gradients."""
    for what, name in forms(failed, dy, arrays, steps()):
        yield Diagnosis(what, "form", name)


def likeliest(
    failed: FailedCheck,
    dy: Any,
    arrays: dict[str, Any],
    catalogue: Callable[[], Iterable[Diagnosis]],
    *others: Callable[[], Iterable[Diagnosis]],
) -> list[Diagnosis]:
    """The explanations, the likeliest first: a factor that has a meaning, and known mistakes; without these, what
    `others` find; without all of these, a factor that has no meaning.
    """
    factors = [Diagnosis(what, "form", name) for what, name in constant_factors(failed, {**arrays, "dy": dy})]
    unknown = any(factor.name == "unknown factor" for factor in factors)
    if likely := [*(() if unknown else factors), *dict.fromkeys(catalogue())]:
        return likely
    explained = [diagnosis for search in others for diagnosis in search()]
    return sorted(explained, key=lambda diagnosis: diagnosis.name == PLACES) or factors


def derivations(
    op: Callable,
    op_backward: Callable,
    operations: dict[str, tuple[Any, dict[str, Any]]],
    args: list,
    kwargs: dict[str, Any],
    dy: Any,
) -> Iterator[tuple[str, Derived]]:
    """Evaluated derivations, by name: that of the pair itself, named "", and those of known operations."""
    if isinstance(dy, tuple):  # derivations have one y
        return
    pairs: dict[str, tuple] = {"": (op, op_backward, None, kwargs)}
    pairs |= {name: (each.op, each.op_backward, each.names, options) for name, (each, options) in operations.items()}
    for name, (forward, backward, given, options) in pairs.items():
        try:
            names = given(*args, **options) if given else {}
            derivation = consequences(forward, backward, *args, names=names, dy=dy, **options)
        except (DerivationError, NotationError, TypeError, ValueError, KeyError):
            continue  # it has no derivation, or one that is not true or cannot be evaluated
        floating = [n for n, x in zip(argument_names(forward, tuple(args)), args, strict=True) if is_floating(x)]
        yield name, Derived(derivation, [derivation.gradient(canonical(n)) for n in floating])


def on_cpu(x: Any) -> Any:
    """An array, or a tuple of arrays, on the CPU; anything else as it is."""
    if isinstance(x, tuple):
        return tuple(map(on_cpu, x))
    return to_cpu(x) if is_array(x) else x


def known_by_result(args: list, kwargs: dict[str, Any], y: Any) -> dict[str, tuple[Any, dict[str, Any]]]:
    """The known operations that give the same y, by name, with the keyword arguments for which they do: `eps` may be a
    constant of the user's own.
    """
    matching = {}
    for name, operation in known.operations().items() if is_array(y) or np.isscalar(y) else ():
        eps = EPS if "eps" in inspect.signature(operation.op).parameters and "eps" not in kwargs else ()
        for options in (kwargs, *({**kwargs, "eps": value} for value in eps)):
            try:
                other = operation.op(*args, **options)[0]
            except Exception:  # these are not arguments of this operation
                break
            if np.shape(other) == np.shape(y) and same(np.asarray(other), np.asarray(y)):
                matching[name] = operation, options
                break
    return matching


class Derived(NamedTuple):
    """A derivation evaluated on the arrays of a check. gradients: its names for the gradients, in the order of the
    floating-point arguments; None for a gradient that it does not derive.
    """

    derivation: Consequences
    gradients: list[str | None]

    def explains(self, failed: FailedCheck, changed: dict[str, np.ndarray]) -> bool:
        """Whether the analytic gradients are those of the derivation with these values changed."""
        values = self.derivation.values | changed
        pairs = zip(failed.compared, self.gradients, strict=True)
        return failed.explained_by({tensor: values[name] for tensor, name in pairs if name})


def says(chain: Equation, equation: Equation) -> bool:
    """Whether an equation of the derivation has the same left side, and among its parts the last of the other's."""
    return chain.parts[0] == equation.parts[0] and equation.parts[-1] in chain.parts[1:]


def planted(failed: FailedCheck, derived: Derived) -> list[Diagnosis]:
    """The mistake nearest to the end of a derivation that gives the analytic gradients."""
    pairs = zip(failed.compared, derived.gradients, strict=True)
    wrong = {name for tensor, name in pairs if name and tensor in failed.wrong}
    start = time.thread_time()
    for name, words, changed in derived.derivation.planted(wrong):
        if derived.explains(failed, changed):
            return [Diagnosis(f"This is what one gets when {words}", "derivation", name)]
        if time.thread_time() - start > SECONDS:
            break
    return []


def known_mistakes(failed: FailedCheck, operation: str, derived: Derived) -> Iterator[Diagnosis]:
    """The known mistakes in the derivation of an operation that give the analytic gradients."""
    for mistake in known.mistakes():
        if mistake.operation != operation or not mistake.equation:
            continue
        try:
            right, wrong = (parse(text, derived.derivation.values) for text in (mistake.equation, mistake.wrong))
            place = next(i for i, chain in enumerate(derived.derivation.equations) if says(chain, right))
            changed = derived.derivation.of(place, wrong)
        except (NotationError, ValueError, StopIteration):  # also if the derivation has no such equation
            continue
        if derived.explains(failed, changed):
            yield described(mistake)


def known_code(
    failed: FailedCheck, operation: str, args: list, kwargs: dict[str, Any], y: Any, dy: Any
) -> Iterator[Diagnosis]:
    """The known mistakes in the code of an operation that give the analytic gradients."""
    for mistake in known.mistakes():
        if mistake.operation != operation or mistake.equation:
            continue
        try:
            op, op_backward = mistake.pair()
            other, cache = op(*args, **kwargs)
            gradients = as_tuple(op_backward(dy, cache))
        except Exception:  # the mistake may be in another part of the file, or raise
            continue
        if same(np.asarray(other), np.asarray(y)) and len(gradients) == len(failed.compared):
            if failed.explained_by(dict(zip(failed.compared, gradients, strict=True))):
                yield described(mistake)


def known_layers(failed: FailedCheck, run: LayerRun, dy: Any) -> Iterator[Diagnosis]:
    """The known mistakes in layers that give the analytic gradients.

    Each is tried on two copies, one with the mistake and one without. In a copy, every layer gets the class of the same
    name from the mistake's file. Only the copy with the mistake may give them.
    """
    names = {type(layer).__name__ for layer in layers_in(run.layer, {})}
    y, _ = run.forward()
    for mistake in known.mistakes():
        if not names & mistake.classes():
            continue
        try:
            right, wrong = (with_classes(run, each) for each in (vars(mistake.module()), mistake.names()))
            same_y = zip(as_tuple(wrong.forward()[0]), as_tuple(y), strict=True)
            if all(same(to_cpu(a), to_cpu(b)) for a, b in same_y) and failed.explained_by(wrong.outcome(dy).gradients):
                if not failed.explained_by(right.outcome(dy).gradients):
                    yield described(mistake)
        except Exception:  # a layer of the same name may have other parts
            continue


def with_classes(run: LayerRun, classes: Mapping[str, Any]) -> LayerRun:
    """A run of a copy of the layer, in which every layer has the class of its name in `classes`, if there is one."""
    other = copy.copy(run)
    other.layer = copy.deepcopy(run.layer)
    for layer in layers_in(other.layer, {}):
        layer.__class__ = classes.get(type(layer).__name__, type(layer))
    other.params = other.layer.named_parameters()
    other.trained = {name: other.params[name] for name in run.trained}
    return other


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


def described(mistake: Any) -> Diagnosis:
    title, (word, *_) = mistake.title, mistake.title.split()
    title = title[0].lower() + title[1:] if word == "A" or word[1:].islower() else title
    equation = f": {mistake.wrong}" if mistake.wrong else ""
    what = f"A known mistake: {title}{equation}. {mistake.effect}".rstrip()
    return Diagnosis(what, "catalogue", mistake.name)
