"""Entries of the catalogue, for an operation, a twin, a layer or an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Self

from .. import models, nn, ops
from ..testing.draw import Draw, Sizes
from .mistake import Mistake

SAME_SHAPE = "it has the same shape"  # why a survivor changes nothing


class OperationCase(NamedTuple):
    """A pair with the arguments of a gradient check."""

    op: Callable
    op_backward: Callable
    args: tuple
    options: dict[str, Any] = {}  # noqa: RUF012
    analytic: bool = False  # the code also takes complex numbers, so that the complex step can be used


class LayerCase(NamedTuple):
    """A layer with the inputs of a gradient check."""

    layer: nn.Layer
    inputs: tuple
    options: dict[str, Any] = {}  # noqa: RUF012


class DerivationCase(NamedTuple):
    """A pair whose docstring is a derivation, with arguments. names, options: as in `check_derivation`."""

    op: Callable
    op_backward: Callable | None
    args: tuple
    names: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}
    docstring: str | None = None  # where it is not that of `op`


class Arguments(NamedTuple):
    """The arguments of an operation."""

    args: tuple
    options: dict[str, Any]


class Extension(NamedTuple):
    """What an operation can do besides, and what its page leaves out at first. Without it the derivation is simpler.

    title: on its switch. words: a regular expression, with which words of the docstring's sentences about it begin.
    letters: index letters that are not written without it, of axes of size 1. values: those that names have without it,
    and index letters that others stand for.
    """

    title: str
    words: str
    letters: str
    values: Mapping[str, str]


class Entry:
    """What is known of a layer, an optimizer or a twin: cases for its gradient checks and its derivation, by name, and
    the mistakes that others have made in it; and which of all mistakes that can be planted in its backward survive.

    name: that in `nn`, `models` or `optim`; of a twin, that of its operation with a suffix: "attention.numpy". file:
    where its code is. tests: those that must find every mistake in a backward of the file, as arguments of pytest; ""
    if none are planted. helpers: whether they are also planted in the functions that a backward calls.
    """

    def __init__(self, name: str, file: str = "", tests: str = "", helpers: bool = False) -> None:
        self.name, self.file, self.tests, self.helpers = name, file or file_of(name), tests, helpers
        self.operation = name.partition(".")[0] if name.partition(".")[0] in ops.__all__ else ""
        self.cases: dict[str, Callable[[Draw], Any]] = {}
        self.derivations: dict[str, Callable[[Sizes], DerivationCase]] = {}
        self.mistakes: list[Mistake] = []
        self.equal: dict[tuple[str, str], str] = {}  # the survivors: reasons, by the function and the change

    def case(self, variant: str, case: Callable[..., Any], **options: Any) -> Self:
        """Add a case for the gradient checks: `case` of a draw, with these options. The variant is "", or what follows
        the name and a comma: "causal".
        """
        self.cases[self.full(variant)] = partial(case, **options)
        return self

    def derivation(self, variant: str, case: Callable[..., Any], **options: Any) -> Self:
        """Add a case of the derivation, from `Sizes`."""
        self.derivations[self.full(variant)] = partial(case, **options)
        return self

    def full(self, variant: str) -> str:
        return f"{self.name}, {variant}" if variant else self.name

    def mistake(self, title: str, effect: str = "", file: str = "", **fields: Any) -> Self:
        """Add a mistake, with the fields of `Mistake`. By default it is in the file of the entry."""
        name = f"{self.name}: {title[:1].lower()}{title[1:]}"
        self.mistakes.append(
            Mistake(title, effect, file=file or self.file, operation=self.operation, name=name, **fields)
        )
        return self

    def survivors(self, function: str, changes: Mapping[str, str]) -> Self:
        """Add changes of a function, "line -> line with the mistake", that the tests miss, each with the reason why it
        changes no result.
        """
        self.equal |= {(function, change): reason for change, reason in changes.items()}
        return self


class OperationEntry(Entry):
    """What is known of an operation of `ops`, whose cases give its arguments: see `given`.

    names: a function that gives what the derivation uses besides the arguments and the cache, given the arguments.
    analytic: whether the code also takes complex numbers, so that the complex step can be used.
    """

    def __init__(
        self,
        name: str,
        names: Callable[..., dict[str, Any]] = lambda *args, **options: {},
        analytic: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(name, **options)
        self.names, self.analytic = names, analytic
        self.arguments: dict[str, Callable[[Any], Arguments]] = {}
        self.extended: Extension | None = None

    @property
    def op(self) -> Any:
        """The reference."""
        op = getattr(ops, self.name)
        return getattr(op, "reference", op)

    @property
    def op_backward(self) -> Any:
        """The reference of the backward; None if there is none."""
        return getattr(getattr(ops, f"{self.name}_backward", None), "reference", None)

    def case(self, variant: str, case: Callable[..., Arguments], **options: Any) -> Self:
        """Add a case for the gradient checks. That without a variant is also a case of the derivation."""
        made = partial(case, **options)
        if not variant:
            self.derivation(variant, made)
        self.arguments[variant] = made
        return super().case(variant, partial(self.gradient_case, made))

    def derivation(self, variant: str, case: Callable[..., Arguments], **options: Any) -> Self:
        return super().derivation(variant, partial(self.derivation_case, partial(case, **options)))

    def extension(self, title: str, words: str, letters: str = "", **values: str) -> Self:
        """What the page leaves out at first, see `Extension`."""
        self.extended = Extension(title, words, letters, values)
        return self

    def derive_all(self) -> Self:
        """Make all cases cases of the derivation too."""
        for variant, case in self.arguments.items():
            self.derivation(variant, case)
        return self

    def gradient_case(self, case: Callable[[Draw], Arguments], d: Draw) -> OperationCase:
        pair = getattr(ops, self.name), getattr(ops, f"{self.name}_backward")
        return OperationCase(*pair, *case(d), self.analytic)

    def derivation_case(self, case: Callable[[Sizes], Arguments], d: Sizes) -> DerivationCase:
        args, options = case(d)
        return DerivationCase(self.op, self.op_backward, args, self.names(*args, **options), options)


def given(*args: Any, **options: Any) -> Arguments:
    return Arguments(args, options)


def normal(*shapes: str, **options: Any) -> Callable[[Draw], Arguments]:
    """The case of an operation whose arguments are normal arrays of these shapes."""
    return lambda d: given(*map(d, shapes), **options)


def layer_of(kind: type[nn.Layer], sizes: str, *shapes: str, **options: Any) -> Callable[[Draw], LayerCase]:
    """The case of a layer made with these sizes, "C H", and options, on normal arrays of these shapes."""
    return lambda d: on(kind(*d.shape(sizes), **options), *map(d, shapes))


def padded(d: Draw, layer: nn.Layer, **options: Any) -> LayerCase:
    """The case of a layer on sequences of which some are shorter."""
    return on(layer, d("B T C"), pattern=ops.Padding(d.lengths()), **options)


def on(layer: nn.Layer, *inputs: Any, **options: Any) -> LayerCase:
    """The case of a layer that is run on these inputs."""
    return LayerCase(layer, inputs, options)


def file_of(name: str) -> str:
    """The file that defines an operation, layer or model; "" if that is not known before it is used."""
    thing = vars(ops).get(name) or vars(nn).get(name) or vars(models).get(name)
    return "" if thing is None else "/".join(thing.__module__.split(".")[1:]) + ".py"
