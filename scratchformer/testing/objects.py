"""Objects as pairs of a forward and a backward: layers that remember their input, and values that remember a graph."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import Any

import numpy as np

from .adapters import ForeignPair, is_leaf
from .contracts import GradientError, as_arrays, floating_in, is_floating, mapped, upstream
from .gradcheck import Report
from .runs import name_of, two

# How the name of a gradient follows from that of a parameter: what is replaced, and by what.
_GRADIENTS = [
    *((r"\b(\w+)(\W*)$", form) for form in (r"d\1\2", r"d_\1\2", r"g\1\2", r"grad_\1\2", r"\1_grad\2", r"grads['\1']")),
    (r"\b_(\w+)(\W*)$", r"_d\1\2"),
    *((rf"\b{whole}\b", part) for whole, part in (("params", "grads"), ("parameters", "gradients"), ("data", "grad"))),
]


def _arrays(x: Any, name: str = "", seen: frozenset = frozenset()) -> Iterator[tuple[str, np.ndarray]]:
    """The floating-point arrays in the attributes of an object, and in lists, tuples, dicts and objects there, by names
    such as `layers[0].W`.
    """
    if isinstance(x, np.ndarray) and is_floating(x):
        yield name, x
    if isinstance(x, dict):
        parts = {f"{name}[{key!r}]": part for key, part in x.items()}
    elif isinstance(x, list | tuple):
        parts = {f"{name}[{i}]": part for i, part in enumerate(x)}
    else:
        described = isinstance(x, type) or inspect.isroutine(x) or inspect.ismodule(x)
        parts = {} if described else {f"{name}.{key}".lstrip("."): part for key, part in _attributes(x).items()}
    for place, part in parts.items():
        if id(part) not in seen:
            yield from _arrays(part, place, seen | {id(x)})


def _attributes(x: Any) -> dict[str, Any]:
    """The attributes of an object, also those in `__slots__`."""
    slots = [getattr(kind, "__slots__", ()) for kind in type(x).__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    return {name: getattr(x, name) for name in names if hasattr(x, name)} | getattr(x, "__dict__", {})


@contextmanager
def _random_numbers(seed: int) -> Iterator[None]:
    """NumPy's global random numbers from the seed; afterwards they go on as before."""
    state = np.random.get_state()  # noqa: NPY002
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(state)  # noqa: NPY002


class StatefulPair(ForeignPair):
    """A layer or network of NumPy arrays whose forward keeps in the object what its backward needs.

    `y = layer.forward(*inputs)`, or `layer(*inputs)`, and `layer.backward(dy)` returns the gradients of the inputs, or
    of the first of them. Or forward returns (y, cache), and it is `layer.backward(dy, cache)`. Or y is a loss, and it
    is `layer.backward()`. If forward returns nothing, y is `layer.output`; if backward does, dx is `layer.dinputs`.

    The parameters are the arrays in the object, and in objects, lists and dicts in it, that change y and have a
    gradient: that of `W` is called `dW`, `d_W`, `gW`, `grad_W` or `W_grad`, or is `grads['W']`; that of `params['W']`
    is `grads['W']`, that of `params[0]` is `grads[0]`, and that of `W.data` is `W.grad`. backward may replace it or add
    to it. Or it returns them after those of the inputs: (dx, dW, db), in the order in which the object got the arrays,
    or (dx, {"W": dW, "b": db}). Arrays that change y but have no gradient are named in the Report, and so are those
    that have a gradient but do not change y.

    Everything runs on copies, as float64, of an object that has run before, on other numbers: what it remembers of
    earlier calls shows as a wrong gradient. NumPy's global random numbers start from `seed` before each forward.
    """

    cut = "a gradient that is not stored"

    def __init__(self, layer: Any, inputs: tuple, options: dict[str, Any]) -> None:
        self.call = "forward" if hasattr(layer, "forward") else "__call__"
        if isinstance(layer, type) and inspect.isfunction(inspect.getattr_static(layer, self.call)):
            raise TypeError(f"check: expected an object, got the class {layer.__name__}: write {layer.__name__}(...)")
        super().__init__(layer, type(layer).__name__, getattr(layer, self.call), inputs, options)
        self.seed = self.options.get("seed", 0)
        parameters = list(inspect.signature(layer.backward).parameters.values())
        self.takes_dy = bool(parameters)
        self.takes_cache = len(parameters) == 2 and parameters[1].default is inspect.Parameter.empty
        self.taken = " and ".join(p.name for p in parameters)
        self.layer = copy.deepcopy(layer, {id(x): x.astype(np.float64) for _, x in _arrays(layer)})
        before = dict(_arrays(self.layer))
        self.gradient_names: dict[str, tuple[str | None, str | None]] = {}  # where it is stored, where it is returned
        self.parameters: dict[str, np.ndarray] = {}

        given = {n: self.to_numpy(x) for n, x in (self.variables | self.constants).items()}
        inputs_given = [n for n in self.variables if is_floating(given[n])]
        others = {n: x * np.linspace(0.9, 0.7, x.size).reshape(x.shape) for n, x in given.items() if is_floating(x)}
        used, returned = self._both(given)
        with suppress(Exception):  # which other numbers may raise
            used, returned = self._both(given | others)
        pairs = zip(inputs_given[1:], list(returned.values())[1:], strict=False)
        count = 1 + len(list(takewhile(lambda pair: given[pair[0]].shape == pair[1].shape, pairs)))
        without = inputs_given[count:]
        self.variables = {n: x for n, x in self.variables.items() if n not in without}
        self.layer = used

        arrays = dict(_arrays(used))
        moving = {n: x for n, x in arrays.items() if self._moves(given, x)}
        names = {n: g for n in moving if (g := _gradient_name(n, arrays))}
        candidates = {n: x for n, x in moving.items() if n in before}
        self.returned = _matched(dict(list(returned.items())[len(inputs_given[:count]) :]), candidates, names)
        unique = {id(arrays[n]): n for n in reversed(moving) if n in names or n in self.returned}
        for n in sorted(unique.values(), key=list(moving).index):
            place = f"parameter {n}" if n in self.leaves else n
            self.parameters[place], self.gradient_names[place] = arrays[n], (names.get(n), self.returned.get(n))
        self.variables |= self.parameters
        stored = {*names.values()}
        without += [n for n, x in candidates.items() if id(x) not in unique and n not in stored]
        still = [n for n, x in before.items() if n in arrays and n not in moving and np.array_equal(x, arrays[n])]
        self.notes = (
            *(f"{n}: not checked, since backward gives no gradient for it" for n in without),
            *(f"{n}: not checked, since y does not change with it" for n in still if _gradient_name(n, arrays)),
        )

    def check(self, checker: str) -> Report:
        report = super().check(checker)
        report.notes += self.notes
        return report

    def to_numpy(self, x: Any) -> Any:
        return x.astype(np.float64) if is_floating(x) else x

    def forward(self, arrays: dict[str, Any]) -> tuple[Any, Any]:
        layer = self._copy({id(x): arrays[n] for n, x in self.parameters.items()})
        form, cache = self._forward_of(layer, arrays)
        y = tuple(floating_in("y", form).values())
        return y if len(y) > 1 else y[0], (layer, form, cache)

    def gradients(self, dy: tuple, cache: Any) -> dict[str, np.ndarray]:
        layer, form, kept = cache
        layer, kept = copy.deepcopy((layer, kept))
        stored = dict(_arrays(layer))
        for name, _ in self.gradient_names.values():
            if name in stored:
                stored[name][...] = 0  # a backward may add to it
        returned = self._backward_of(layer, upstream(form, iter(dy)), kept)
        stored = dict(_arrays(layer))
        inputs = [n for n, x in self.variables.items() if n not in self.parameters and is_floating(x)]
        gradients = dict(zip(inputs, returned.values(), strict=False))
        for n, (name, key) in self.gradient_names.items():
            kept = stored.get(name or "", np.zeros_like(self.parameters[n]))
            gradients[n] = kept if key is None else returned[key]
            if name and not np.allclose(kept, gradients[n], rtol=1e-12, atol=0):
                raise GradientError(f"backward returns another gradient of {n} than it keeps in {name}")
        return gradients

    def _copy(self, replaced: dict[int, np.ndarray]) -> Any:
        """A copy of the object with other arrays in place of some, which are given by `id`."""
        return copy.deepcopy(self.layer, dict(replaced))

    def _forward_of(self, layer: Any, arrays: dict[str, Any]) -> tuple[Any, tuple]:
        """y, and what backward gets besides dy."""
        args, kwargs = self.arguments(arrays)
        with _random_numbers(self.seed):
            y = getattr(layer, self.call)(*args, **kwargs)
        y, *kept = two(y, f"forward, whose backward takes {self.taken},") if self.takes_cache else (y,)
        return as_arrays(layer.output if y is None else y), tuple(kept)

    def _backward_of(self, layer: Any, dy: Any, kept: tuple) -> dict[str, np.ndarray]:
        """The gradients that backward returns, those of the inputs first, by their places."""
        returned = layer.backward(dy, *kept) if self.takes_dy else layer.backward()
        if returned is None:
            returned = getattr(layer, "dinputs", None)
        gradients = floating_in("", as_arrays(returned))
        return {place: g if self.takes_dy else dy * g for place, g in gradients.items()}

    def _both(self, arrays: dict[str, Any]) -> tuple[Any, dict[str, np.ndarray]]:
        """A copy of the object that has run forward and backward, and the gradients that it returned."""
        layer = self._copy({})
        y, kept = self._forward_of(layer, arrays)
        return layer, self._backward_of(layer, upstream(y, map(np.ones_like, floating_in("y", y).values())), kept)

    def _moves(self, arrays: dict[str, Any], x: np.ndarray) -> bool:
        """Whether y changes with the array `x` of the object."""
        with np.errstate(all="ignore"):
            y, other = (self._forward_of(self._copy({id(x): moved}), arrays)[0] for moved in (x, 1.01 * x + 0.01))
        return not all(map(np.array_equal, floating_in("", y).values(), floating_in("", other).values()))


def _gradient_name(name: str, arrays: dict[str, np.ndarray]) -> str | None:
    """The name of the array in `arrays` that is the gradient of the one called `name`."""
    names = (re.sub(whole, part, name) for whole, part in _GRADIENTS)
    return next((n for n in names if n != name and n in arrays and arrays[n].shape == arrays[name].shape), None)


def _matched(returned: dict[str, np.ndarray], arrays: dict[str, np.ndarray], stored: dict[str, str]) -> dict[str, str]:
    """The places of the returned gradients of `arrays`, by the names of these: by the keys of a dict, else in order of
    arrays of the same shape. stored: the arrays whose gradient is stored too.
    """
    places: dict[str, str] = {}
    for place in returned:
        key = re.search(r"\['d?_?(\w+)'\]$", place)
        places |= {n: place for n in arrays if key and re.search(rf"\b{key[1]}(\W*)$", n)}
    unnamed = {place: g for place, g in returned.items() if place not in places.values()}
    for shape in {g.shape for g in unnamed.values()}:
        given = [place for place, g in unnamed.items() if g.shape == shape]
        fitting = {id(x): n for n, x in reversed(arrays.items()) if x.shape == shape and n not in places}
        names = [n for n in arrays if n in fitting.values()]
        if len(names) > len(given):
            names = [n for n in names if n not in stored] or names
        if len(names) < len(given):
            raise GradientError(
                f"backward returned a gradient of shape {shape} that is of no floating-point input and no parameter"
            )
        if len(names) > len(given):
            raise TypeError(
                f"backward: cannot tell of which of {', '.join(names)} the returned gradient of shape {shape} is: "
                "return those of parameters in a dict with their names"
            )
        places |= dict(zip(names, given, strict=True))
    return places


def is_value(x: Any) -> bool:
    """Whether `x` remembers how it was computed, and has a number or array `data` and its gradient `grad`."""
    return all(hasattr(x, name) for name in ("data", "grad", "backward")) and not isinstance(x, type)


class ValuePair(ForeignPair):
    """A function of values with `data`, `grad` and `backward()`, as in micrograd.

    `y.backward()` of each result adds to the `grad` of the arguments, and of what `function.parameters()` returns. It
    starts at a number, unless it is `y.backward(dy)`. Arguments and results may be in lists, tuples and dicts.
    """

    cut = "an operation whose result does not remember it"

    def __init__(self, function: Callable, args: tuple, options: dict[str, Any]) -> None:
        super().__init__(function, name_of(function), function, args, options)
        if hasattr(function, "parameters"):
            self.function = copy.deepcopy(function)
        self.parameters = {f"parameters()[{i}]": x for i, x in enumerate(getattr(self.function, "parameters", list)())}
        self.variables |= self.parameters

    def to_numpy(self, x: Any) -> Any:
        return np.array(x.data, np.float64) if is_value(x) else None

    def forward(self, arrays: dict[str, Any]) -> tuple[Any, Any]:
        y = tuple(np.array(value.data, np.float64) for value in self._run(arrays)[0])
        return y if len(y) > 1 else y[0], arrays

    def gradients(self, dy: tuple, cache: Any) -> dict[str, np.ndarray]:
        sums = {n: np.zeros_like(x) for n, x in cache.items()}
        for i, u in enumerate(dy):
            results, leaves = self._run(cache)  # a second backward would add to the first one's
            if takes_dy := bool(inspect.signature(results[i].backward).parameters):
                results[i].backward(u)
            elif np.size(results[i].data) == 1:
                results[i].backward()
            else:
                raise TypeError(
                    f"y[{i}]: expected a number as the result, got shape {np.shape(u)}: backward() starts at one "
                    "number, so return the sum, or let it be backward(dy)"
                )
            for n, leaf in leaves.items():
                if leaf.grad is not None:
                    sums[n] += np.asarray(getattr(leaf.grad, "data", leaf.grad)) * (1 if takes_dy else u)
        return sums

    def _run(self, arrays: dict[str, Any]) -> tuple[list, dict[str, Any]]:
        """The results, and new values, by name, that they were computed from."""
        leaves = {n: self.parameters[n] if n in self.parameters else copy.copy(self.variables[n]) for n in arrays}
        for n, leaf in leaves.items():
            leaf.data = float(arrays[n]) if np.isscalar(leaf.data) else arrays[n].copy()
            leaf.grad = None if leaf.grad is None else 0 * leaf.grad
        args, kwargs = self.arguments(leaves)
        results: list = []
        mapped(lambda _, y: results.append(y), "", self.function(*args, **kwargs), is_leaf)
        results = [y for y in results if is_value(y)]
        if not results:
            raise TypeError(f"{self.name}: expected values with backward() as results")
        return results, leaves
