"""What a wrong gradient looks like: the search for a mistake that gives exactly this gradient.

Three kinds of explanation are tried, the simplest first: general forms, such as a constant factor (`forms`); mistakes
that others have made in the same operation (`mistakes`); and mistakes planted in the equations of its derivation. An
explanation is given only if it yields every element of every gradient that was compared, to round-off.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..backend import to_cpu
from .contracts import GradientError, is_array
from .differences import FIRST_STEP
from .runs import argument_names

if TYPE_CHECKING:
    from ..notation.consequences import Consequences
    from .differences import Comparison, Differences, Tensor
    from .runs import LayerRun, PairRun

EXACT = 1e-9  # relative to the largest element: two computations of one gradient
LARGEST = 5000  # elements of a tensor, beyond which no derivation is evaluated
LARGEST_JACOBIAN = 500  # elements of a tensor, beyond which no Jacobian is computed

_wanted = ContextVar("diagnosis", default=True)


@contextmanager
def without_diagnosis() -> Iterator[None]:
    """Within it, checks do not say what a mistake looks like: where only its being found counts, that takes too long."""
    before = _wanted.set(False)
    try:
        yield
    finally:
        _wanted.reset(before)


class Diagnosis(NamedTuple):
    """What a mistake looks like.

    what: a sentence. source: "form", "catalogue" or "derivation". name: of the form or mistake, for tests.
    """

    what: str
    source: str
    name: str


class Evidence:
    """The gradients of a check that failed, by the name of their tensor.

    found: the analytic gradients. right: the numeric ones, NaN where none was computed. wrong: the names of those that
    disagree. differences: of the outputs, for a Jacobian.
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
        """The derivatives of all outputs (rows) by all elements of a tensor (columns); None if they are too many."""
        tensor = self.tensors[name]
        if tensor.base.size > LARGEST_JACOBIAN or tensor.base.size * self.differences.y.size > LARGEST_JACOBIAN**2:
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
    """Whether two gradients are equal to round-off; of a and b one may have axes folded."""
    if a.size != b.size:
        return False
    return bool(np.all(np.abs(a.reshape(b.shape) - b) <= EXACT * np.abs(b).max(initial=0)))


def paragraph(diagnoses: Sequence[Diagnosis]) -> list[str]:
    """The lines of a message about a wrong gradient."""
    if not diagnoses:
        return ["The mistake looks like none that is known."]
    first, *others = (diagnosis.what for diagnosis in diagnoses)
    return [first, *(f"It may also be: {other}" for other in others)]


def wanted() -> bool:
    """Whether a failed check is to be explained: see `without_diagnosis`."""
    return _wanted.get()


def of_pair(evidence: Evidence, run: PairRun, dy: Any) -> list[Diagnosis]:
    """What the mistake in the backward of a pair looks like."""
    args, kwargs, y = [on_cpu(x) for x in run.args], {name: on_cpu(x) for name, x in run.kwargs.items()}, on_cpu(run.y)
    dy = on_cpu(dy)
    found = general(evidence, dy, dict(zip(run.names, args, strict=True)) | kwargs | {"y": y})
    if all(x.size <= LARGEST for x in (*args, y) if is_array(x)):
        for derivation, names in derivations(run.op, run.op_backward, args, kwargs, y, dy):
            found += planted(evidence, derivation, dict(zip(run.names, names, strict=True)))
    return sorted(found, key=lambda diagnosis: diagnosis.name == "unknown factor")


def general(evidence: Evidence, dy: Any, arrays: dict[str, Any]) -> list[Diagnosis]:
    """The general forms that the gradients have."""
    from .forms import forms

    return [Diagnosis(what, "form", name) for what, name in forms(evidence, dy, arrays)]


def of_layer(evidence: Evidence, run: LayerRun, dy: Any) -> list[Diagnosis]:
    """What the mistake in the backward of a layer looks like."""
    return general(evidence, on_cpu(dy), {name: on_cpu(x) for name, x in run.given.items()})


def derivations(
    op: Callable, op_backward: Callable, args: list, kwargs: dict[str, Any], y: Any, dy: Any
) -> Iterator[tuple[Consequences, list[str]]]:
    """The derivations of an operation, with the names of the arguments: its own, and that of the operation of the
    package that gives the same y.
    """
    from ..notation import DerivationError, NotationError
    from ..notation.consequences import consequences
    from .derivations.operations import reference

    pairs = [(op, op_backward, {})] if "=" in (inspect.getdoc(op) or "") else []
    for name in known(args, kwargs, y):
        case = reference(name, *args, **kwargs)
        pairs.append((case.op, case.op_backward, case.names))
    for forward, backward, names in pairs:
        try:
            derivation = consequences(forward, backward, *args, names=names, dy=dy, **kwargs)
        except (DerivationError, NotationError, TypeError, ValueError):
            continue  # it has none that is true and could be evaluated
        yield derivation, argument_names(forward, tuple(args))


def on_cpu(x: Any) -> Any:
    """An array, or a tuple of arrays, on the CPU; anything else as it is."""
    if isinstance(x, tuple):
        return tuple(map(on_cpu, x))
    return to_cpu(x) if is_array(x) else x


def known(args: list, kwargs: dict[str, Any], y: Any) -> Iterator[str]:
    """The names of the package's operations that give the same y."""
    from .. import ops

    for name in ops.__all__ if is_array(y) or np.isscalar(y) else ():
        if f"{name}_backward" not in ops.__all__:
            continue
        try:
            other = getattr(ops, name).reference(*args, **kwargs)[0]
        except Exception:  # these are not arguments of this operation
            continue
        if np.shape(other) == np.shape(y) and same(np.asarray(other), np.asarray(y)):
            yield name


def planted(evidence: Evidence, derivation: Consequences, names: dict[str, str]) -> list[Diagnosis]:
    """The mistake nearest to the end of a derivation that gives the gradients found. names: of the arguments in the
    derivation, by tensor.
    """
    from ..notation.grammar import canonical

    gradients = {tensor: derivation.gradient(canonical(names[tensor])) for tensor in evidence.found}
    for name, words, changed in derivation.planted():
        values = derivation.values | changed
        if evidence.explained_by({tensor: values[d] for tensor, d in gradients.items() if d}):
            return [Diagnosis(f"This is what one gets when {words}", "derivation", name)]
    return []


def diagnose(
    op: Callable, op_backward: Callable, *args: Any, seed: int = 0, docstring: str | None = None, **kwargs: Any
) -> list[Diagnosis]:
    """What the mistake in `op_backward` looks like, the likeliest first; empty if the gradients are right.

    It is also empty if the mistake looks like none that is known: `check_gradients` tells the two apart. docstring: the
    derivation to look for mistakes in, by default that of `op`. The other arguments are those of `check_gradients`,
    whose GradientError has the same diagnoses.
    """
    from .gradcheck import check_gradients

    if docstring is not None:
        op = functools.update_wrapper(functools.partial(op), op)
        op.__doc__ = docstring
    try:
        check_gradients(op, op_backward, *args, seed=seed, **kwargs)
    except GradientError as error:
        return list(error.diagnoses)
    return []
