"""What a wrong gradient looks like: the search for a mistake that gives exactly this gradient.

Three kinds of explanation are tried, the simplest first: general forms, such as a constant factor (`forms`); mistakes
that others have made in the same operation (`mistakes`); and mistakes planted in the equations of its derivation. An
explanation is given only if it yields every element of every gradient that was compared, to round-off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..backend import to_cpu
from .contracts import GradientError, is_array

if TYPE_CHECKING:
    from ..notation.consequences import Consequences
    from .differences import Comparison, Tensor
    from .runs import LayerRun, PairRun

EXACT = 1e-9  # relative to the largest element: two computations of one gradient
LARGEST = 5000  # elements of a tensor, beyond which no derivation is evaluated


class Diagnosis(NamedTuple):
    """What a mistake looks like.

    what: a sentence. source: "form", "catalogue" or "derivation". name: of the form or mistake, for tests.
    """

    what: str
    source: str
    name: str


class Evidence:
    """The gradients of a check that failed, by the name of their tensor.

    found: the analytic gradients. right: the numeric ones, NaN where none was computed. slack: the differences that are
    allowed between the two. wrong: the names of those that disagree.
    """

    def __init__(self) -> None:
        self.found: dict[str, np.ndarray] = {}
        self.right: dict[str, np.ndarray] = {}
        self.slack: dict[str, np.ndarray] = {}
        self.wrong: list[str] = []

    def add(
        self,
        tensor: Tensor,
        indices: Sequence[tuple[int, ...]],
        elements: Sequence[Comparison],
        directions: Sequence[Comparison],
    ) -> None:
        """Add a tensor with its comparisons: the first of `elements` are those at `indices`."""
        right, slack = np.full(tensor.gradient.shape, np.nan), np.zeros(tensor.gradient.shape)
        for index, comparison in zip(indices, elements, strict=False):
            right[index], slack[index] = comparison.numeric, comparison.tolerance
        self.found[tensor.name], self.right[tensor.name], self.slack[tensor.name] = tensor.gradient, right, slack
        if not all(c.agrees for c in (*elements, *directions)):
            self.wrong.append(tensor.name)

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


def of_pair(evidence: Evidence, run: PairRun, dy: Any) -> list[Diagnosis]:
    """What the mistake in the backward of a pair looks like."""
    from .forms import forms

    found = [Diagnosis(what, "form", name) for what, name in forms(evidence)]
    for derivation in derivations(run, dy):
        found += planted(evidence, derivation, list(run.floating))
    return found


def of_layer(evidence: Evidence, run: LayerRun, dy: Any) -> list[Diagnosis]:
    """What the mistake in the backward of a layer looks like."""
    from .forms import forms

    return [Diagnosis(what, "form", name) for what, name in forms(evidence)]


def derivations(run: PairRun, dy: Any) -> Iterator[Consequences]:
    """The derivations of what was run: its own, and that of the package's operation that gives the same y."""
    from .. import ops
    from ..notation import DerivationError, NotationError
    from ..notation.consequences import consequences

    args, kwargs = [on_cpu(x) for x in run.args], {name: on_cpu(x) for name, x in run.kwargs.items()}
    if any(x.size > LARGEST for x in (*args, on_cpu(run.y)) if is_array(x)):
        return
    for name in known(args, kwargs, on_cpu(run.y)):
        try:
            yield consequences(
                getattr(ops, name).reference, getattr(ops, f"{name}_backward").reference, *args, dy=on_cpu(dy), **kwargs
            )
        except (DerivationError, NotationError):
            continue


def on_cpu(x: Any) -> Any:
    return to_cpu(x) if is_array(x) else x


def known(args: list, kwargs: dict[str, Any], y: Any) -> Iterator[str]:
    """The names of the package's operations that give the same y."""
    from .. import ops

    for name in ops.__all__:
        if f"{name}_backward" not in ops.__all__:
            continue
        try:
            other = getattr(ops, name).reference(*args, **kwargs)[0]
        except Exception:  # these are not arguments of this operation
            continue
        if np.shape(other) == np.shape(y) and same(np.asarray(other), np.asarray(y)):
            yield name


def planted(evidence: Evidence, derivation: Consequences, tensors: list[str]) -> list[Diagnosis]:
    """The mistake nearest to the end of a derivation that gives the gradients found."""
    names = [f"d{name}" for name in derivation.walk.run.arguments]
    floating = [name for name in names if name in derivation.values]
    if len(floating) != len(tensors):
        return []
    for name, words, changed in derivation.planted():
        values = derivation.values | changed
        if evidence.explained_by({tensor: values[d] for tensor, d in zip(tensors, floating, strict=True)}):
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
