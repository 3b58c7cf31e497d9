"""Neighbouring operations as one: their derivations put together, so that one kernel computes both.

The docstring of a fused operation is written from the docstrings of its parts. It has the equations of both forwards,
with one name for what the first hands to the second, and the equations of both backwards in the other order. It is a
derivation like any other, so it is checked, typeset and compiled like any other.
"""

from __future__ import annotations

import inspect
import linecache
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, ForwardRef, NamedTuple
from weakref import WeakKeyDictionary

from .. import dispatch
from ..dispatch import Operation, TwinCache, backward, cache_type, operation
from ..notation.grammar import canonical, tokens, walk
from ..notation.layout import Item, read
from ..notation.run import docstring_of, statements
from ..notation.spelling import name as spelled_name
from .twins import Call, Kept, Twin

__all__ = ["fused"]

CODE = '''\
def {name}({parameters}) -> tuple[Array, {cache}]:
    {middle}, first = {first}({first_arguments})
    {y}, second = {second}({second_arguments})
    return {y}, {cache}({kept})


def {name}_backward(d{y}: Array, cache: {cache}) -> tuple[Array, ...]:
    """({gradients}): see `{name}`."""
    first, second = {caches}
    {second_gradients} = {second}_backward(d{y}, second)
    {first_gradients} = {first}_backward(d{middle}, first)
    return {gradients}
'''

DOCSTRING = """\
{y} = {second}({second_arguments}) with {middle} = {first}({first_arguments}): two operations as one.

{first_shapes}
{second_shapes}
Returns {y} and the cache. Raises what `{first}` and `{second}` raise.

Forward. What `{first}` computes is called {middle} here:

{first_forward}

It is what `{second}` takes:

{second_forward}

Backward. From d{y}, `{second}` computes d{middle} and the gradients of its other arguments:

{second_backward}

From d{middle}, `{first}` computes those of its arguments:

{first_backward}

In NumPy, with what the cache keeps for each of the two:

    {first_gradients} = {first}_backward(d{middle}, first)

The cache keeps what the two keep, but {middle} is never written if neither keeps it. For the derivations in full, and
their sources, see `{first}` and `{second}`.
"""


class Part:
    """One of the two operations, with the names that it has inside the fused one."""

    def __init__(self, op: Operation, op_backward: Operation) -> None:
        self.op, self.op_backward = op, op_backward
        self.names: dict[str, str] = {}
        self.name = op.__name__
        self.signature = inspect.signature(op.reference)
        gradient, cache, *_ = inspect.signature(op_backward.reference).parameters
        self.output = gradient.removeprefix("d")
        self.cache: Any = cache_type(op_backward.reference, cache)
        self.fields: tuple[str, ...] = getattr(self.cache, "_fields", (cache,))
        self.kinds = getattr(self.cache, "__annotations__", {cache: ForwardRef("Array")})
        self.twins: WeakKeyDictionary[Call, tuple] = WeakKeyDictionary()  # for each call of the fused operation

    def renamed(self, name: str) -> str:
        """The name that a name of the operation has in the fused one; x̂ and dx follow x."""
        if name in self.names:
            return self.names[name]
        if name[:1] == "d" and (other := self.renamed(name[1:])) != name[1:]:
            return f"d{other}"
        return f"{self.renamed(name[:-3])}hat" if name.endswith("hat") and name != "hat" else name

    def rename_apart(self, taken: set[str]) -> None:
        """Add a digit to the names that are taken, except those in `names` and their gradients."""
        for name in sorted(self.all_names - {*self.names, *(f"d{name}" for name in self.names)}, key=len):
            if self.renamed(name) in taken:
                self.names[name] = f"{self.renamed(name)}2"

    @cached_property
    def items(self) -> tuple[Item, ...]:
        docstring, margin = docstring_of(self.op.reference)
        code = frozenset(s.text for f in (self.op.reference, self.op_backward.reference) for s in statements(f))
        return read(docstring, [*self.signature.parameters, *self.fields], code, self.name, margin).items

    @cached_property
    def all_names(self) -> set[str]:
        """The names of arguments, fields and equations; not those of sizes."""
        parts = [part for item in self.items if item.equation is not None for part in item.equation.parts]
        found = {node[1] for part in parts for node in walk(part) if node[0] == "name"}
        sizes = {name for name in found if len(name) == 1 and name.isupper()}
        return (found - sizes) | {canonical(name) for name in (*self.signature.parameters, *self.fields)}

    def derivation(self, of: str) -> str:
        """The equations of the forward or the backward, with the names of the fused operation."""
        start = next(
            i for i, item in enumerate(self.items) if item.kind == "prose" and item.text.startswith("Backward")
        )
        return "\n".join(self.lines(self.items[start:] if of == "backward" else self.items[:start]))

    def lines(self, items: Iterable[Item]) -> Iterator[str]:
        """Equations, those of one line side by side as before."""
        line, at = "", 0
        for item in items:
            if item.kind == "equation":
                text = self.text(item.text)
                if line and (item.line != at or "\n" in line):
                    yield line
                    line = ""
                line, at = f"{line}        {text}" if line else f"    {text}", item.line
        yield line

    def text(self, text: str) -> str:
        """The text of an equation with the names of the fused operation."""
        done, at = "", 0
        for token in tokens(text, [*self.signature.parameters, *self.fields]):
            name = canonical(token.text)
            if token.kind == "word" and self.renamed(name) != name:
                done, at = (
                    done + text[at : token.column] + spelled_name(self.renamed(name)),
                    token.column + len(token.text),
                )
        return (done + text[at:]).replace("\n    ", "\n        ")

    def parameters(self) -> list[inspect.Parameter]:
        return [p.replace(name=self.renamed(name)) for name, p in self.signature.parameters.items()]

    @property
    def arguments(self) -> list[str]:
        return [self.renamed(name) for name in self.signature.parameters]

    @property
    def shapes(self) -> str:
        """What the docstring says of the arguments."""
        prose = [item.text for item in self.items if item.kind == "prose" and re.match(r"\w+(, \w+)*: ", item.text)]
        text = (
            prose[0].partition("Returns ")[0].rstrip() if prose else f"{', '.join(self.arguments)}: see `{self.name}`."
        )
        known = self.signature.parameters
        return re.sub(r"\b\w+(?=(, \w+)*: )", lambda m: self.renamed(m[0]) if m[0] in known else m[0], text)

    @property
    def gradients(self) -> list[str]:
        """What the backward returns: an argument's gradient is on the left of an equation."""
        left = {
            item.equation.parts[0][1] for item in self.items if item.equation and item.equation.parts[0][0] == "name"
        }
        return [f"d{self.renamed(name)}" for name in self.signature.parameters if f"d{canonical(name)}" in left]

    def kept(self, variable: str) -> list[str]:
        """The fields of the cache of this part in the variable, as code."""
        return [f"{variable}.{field}" if hasattr(self.cache, "_fields") else variable for field in self.fields]

    def cache_code(self) -> str:
        """The cache of this part, made of that of the fused operation's reference, as code."""
        fields = ", ".join(f"cache.{self.renamed(field)}" for field in self.fields)
        return f"{self.cache.__name__}({fields})" if hasattr(self.cache, "_fields") else fields

    def cache_from(self, cache: Any) -> Any:
        """The cache of this part from that of the fused operation."""
        if type(cache) is not TwinCache:
            fields = [getattr(cache, self.renamed(field)) for field in self.fields]
            return self.cache(*fields) if hasattr(self.cache, "_fields") else fields[0]
        if type(cache.kept) is not Kept:
            return self.cache_from(cache.kept)
        fused = cache.kept.call
        if fused not in self.twins:
            twin = Twin(self.op, self.op_backward, fused.twin.target)
            known = dict(zip(fused.twin.names, fused.signatures, strict=True))
            call: Any = twin.make_call(tuple(known.get(name, fused.signatures[0]) for name in self.arguments))
            kept = [(name, self.renamed(name)) for name in call.kept]
            self.twins[fused] = dispatch.Twin(self.name, twin.fits, twin.forward, twin.backward), call, kept
        twin, call, kept = self.twins[fused]
        values = cache.kept.values
        return TwinCache(twin, Kept(call, {name: values[other] for name, other in kept}), cache.shape, cache.dtype)


def fused(
    name: str, first: tuple[Operation, Operation], second: tuple[Operation, Operation], middle: str = "s"
) -> tuple[Any, Any]:
    """An operation, and its backward, that does what `second` does to the result of `first`.

    first, second: an operation and its backward, each with a derivation. The result of the first, which has the shape
    of its first argument, is the first argument of the second, and is called `middle`. The arguments are those of the
    first, then the others of the second. A name that both derivations use gets a digit in the second.

    `caches` of the operation are two functions. From the operation's cache they make that of the first and that of the
    second, so that a layer can run the two backwards instead, if it needs fewer gradients than the fused one computes.
    """
    one, two = Part(*first), Part(*second)
    one.names[one.output] = two.names[canonical(next(iter(two.signature.parameters)))] = middle
    one.rename_apart({middle, f"d{middle}"})
    two.rename_apart(set(map(one.renamed, one.all_names)))
    parameters = [*one.parameters(), *(p for p in two.parameters() if p.name != middle)]
    parameters.sort(key=lambda p: p.default is not p.empty)
    kinds = {part.renamed(field): part.kinds[field] for part in (one, two) for field in part.fields}
    cache = NamedTuple("".join(map(str.capitalize, name.split("_"))) + "Cache", [*kinds.items()])  # type: ignore[misc]
    gradients = {f"d{p.name}" for p in parameters} & {*one.gradients, *two.gradients}
    texts = dict(
        name=name,
        y=two.output,
        middle=middle,
        cache=cache.__name__,
        parameters=", ".join(map(shown, parameters)),
        kept=", ".join([*one.kept("first"), *two.kept("second")]),
        caches=f"{one.cache_code()}, {two.cache_code()}",
        gradients=", ".join(f"d{p.name}" for p in parameters if f"d{p.name}" in gradients),
    )
    for number, part in ("first", one), ("second", two):
        texts |= {
            number: part.name,
            f"{number}_arguments": ", ".join(part.arguments),
            f"{number}_gradients": ", ".join(part.gradients),
            f"{number}_shapes": part.shapes,
            f"{number}_forward": part.derivation("forward"),
            f"{number}_backward": part.derivation("backward"),
        }
    module = sys._getframe(1).f_globals["__name__"]
    space: dict[str, Any] = {"__name__": module, cache.__name__: cache}
    for part in (one, two):
        space |= {part.name: part.op.reference, f"{part.name}_backward": part.op_backward.reference}
        space |= {part.cache.__name__: part.cache} if hasattr(part.cache, "_fields") else {}
    source, file = CODE.format(**texts), f"<{module}.{name}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec"), space)
    cache.__module__, space[name].__doc__ = module, DOCSTRING.format(**texts)

    def given(*args: Any) -> dict[str, Any]:
        """What both parts take as given. In place of the result of the first, its first argument is checked."""
        values = dict(zip((p.name for p in parameters), args, strict=True))
        found: dict[str, Any] = {}
        for part in (one, two):
            check = getattr(part.op, "given", None)
            of_part = check(*(values.get(name, args[0]) for name in part.arguments)) if check else None
            found |= {part.renamed(name): value for name, value in (of_part or {}).items()}
        return found

    gives = tuple(part.renamed(name) for part in (one, two) for name in getattr(part.op, "gives", ()))
    op = operation(space[name], given=given, gives=gives)
    op.caches = one.cache_from, two.cache_from
    return op, backward(space[f"{name}_backward"])


def shown(parameter: inspect.Parameter) -> str:
    """An argument as code."""
    kind = f": {parameter.annotation}" if isinstance(parameter.annotation, str) else ""
    return f"{parameter.name}{kind}" + ("" if parameter.default is parameter.empty else f" = {parameter.default!r}")
