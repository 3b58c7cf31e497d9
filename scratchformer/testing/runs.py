"""A run of what is checked, on arrays of its own, and the check of its rules: everything but the values."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..backend import CPU, Array, Device, array_module, to_cpu, to_device
from ..rng import Key
from .contracts import (
    Diagnosis,
    GradientError,
    Untouched,
    arrays_in,
    as_arrays,
    as_tuple,
    copied,
    copied_to_cpu,
    expect_apart,
    expect_arrays,
    expect_equal,
    expect_owned,
    expect_type,
    floating_in,
    is_array,
    is_floating,
    labelled,
    mapped,
    named_gradients,
    of_gradients,
    rebuilt,
    rule,
    upstream,
)
from .differences import label

STALE = (
    Diagnosis(
        "The backward uses the state of the latest forward, not its own cache.",
        "form",
        "stale after a second forward",
    ),
)
_NONE: Mapping[str, Array] = {}
_ADDED = Diagnosis("Something is added up from call to call, and never set to zero.", "form", "added up")
_TWICE = "backward gives a different gradient when called again with the same cache"
_NOT_ADDED = "backward does not add to the gradient, or adds a different one when called again with the same cache"
_STALE = "changes after a second forward (backward must use its own cache, not the state of the latest forward)"


class Outcome(NamedTuple):
    """What a forward and a backward return: y, and copies of the gradients of arguments and parameters by name."""

    y: Any
    gradients: dict[str, np.ndarray]

    def named_gradients(self) -> dict[str, np.ndarray]:
        """The gradients as "gradient of x"."""
        return of_gradients(self.gradients)

    def named(self) -> dict[str, np.ndarray]:
        """Everything on the CPU: "y", or "y[0]", ..., and "gradient of x"."""
        return {n: to_cpu(x) for n, x in labelled("y", self.y).items()} | self.named_gradients()


class CheckedRun:
    """Copies of the arguments of a forward, by name, on one device and of one dtype. `changed`, an argument of forward,
    backward and outcome, holds arrays to use instead of some of them. rules: which are checked, by name.
    """

    def __init__(
        self, names: list[str], args: tuple, kwargs: dict[str, Any], device: Device, rules: dict[str, bool], dtype: Any
    ) -> None:
        self.names, self.device, self.dtype = names, device, dtype
        self.type = "" if dtype == np.float64 else f" in {np.dtype(dtype)}"  # for messages
        self.rules = rules | {"same_bits": rules["same_bits"] and device == CPU}  # a GPU adds in no fixed order
        self.args = [copied(x, device, dtype) for x in args]
        self.kwargs = {key: copied(x, device, dtype) for key, x in kwargs.items()}
        named = dict(zip(names, self.args, strict=True))
        self.floating = {name: x for key, value in named.items() for name, x in floating_in(key, value).items()}
        named |= self.kwargs
        self.given = {name: x for key, value in named.items() for name, x in arrays_in(key, value).items()}
        self.arrays = self.given
        self.unchecked: list[str] = []  # the floating-point arrays in tuples, lists and dicts that get no gradient
        self.broken: dict[str, str] = {}  # rules that were found broken on the way to the values, with what is wrong
        self.isolated = False  # whether every pass gets copies of its arrays, because one wrote to them
        self.form: Any = None  # of what the forward returned, where it is not one array
        self.y: Any = None  # the first one: an array, or a tuple of them

    def arguments(self, changed: Mapping[str, Array]) -> tuple[list, dict[str, Any]]:
        if not changed and not self.isolated:
            return self.args, self.kwargs

        def place(name: str, x: Array) -> Array:
            return changed[name] if name in changed else x.copy() if self.isolated else x

        args = [mapped(place, name, x) for name, x in zip(self.names, self.args, strict=True)]
        return args, {key: mapped(place, key, x) for key, x in self.kwargs.items()}

    def forward(self, changed: Mapping[str, Array] = _NONE) -> tuple[Any, Any]:
        """y, an array or a tuple of its floating-point arrays, and the cache."""
        raise NotImplementedError

    def backward(self, dy: Any, cache: Any, changed: Mapping[str, Array] = _NONE) -> dict[str, Array]:
        """The gradients by name, for a dy of the form that `forward` gives to y."""
        raise NotImplementedError

    def outcome(self, dy: Any, changed: Mapping[str, Array] = _NONE) -> Outcome:
        """One forward and one backward; dy may be a function of y."""
        y, cache = self.forward(changed)
        return Outcome(y, copied_to_cpu(self.backward(dy(y) if callable(dy) else dy, cache, changed)))

    def check_rules(self, dy: Any, first: Mapping[str, np.ndarray]) -> None:
        raise NotImplementedError

    def checked(self, dy: Any) -> None:
        """Raise GradientError if a result has another dtype than the arguments, or if something is written to."""
        raise NotImplementedError

    def evaluate(self, dy: Any, flat_dy: np.ndarray | None = None) -> tuple[np.ndarray, list[np.ndarray]]:
        """The outcome as NumPy arrays: the flat y, and the gradients. `flat_dy` replaces the elements of `dy`."""
        if flat_dy is not None:
            parts = as_tuple(dy)
            new = np.split(flat_dy, np.cumsum([part.size for part in parts])[:-1])
            dy = like(dy, [array_module(x).asarray(n.reshape(x.shape)) for x, n in zip(parts, new, strict=True)])
        y, gradients = self.outcome(dy)
        return flat(y), list(gradients.values())

    def expect_unbroken(self) -> None:
        """Raise GradientError for a rule that was found broken on the way to the values."""
        for name, message in self.broken.items():
            if self.rules[name]:
                with rule(name):
                    raise GradientError(message)

    def _note(self, name: str, check: Callable[..., None], *args: Any, **options: Any) -> None:
        """Remember what `check` says, if it finds that the rule `name` is broken."""
        try:
            check(*args, **options)
        except GradientError as error:
            self.broken.setdefault(name, str(error))

    def _results(self, returned: Any, what: str) -> tuple[Any, Any]:
        """y and the cache of what a forward returned."""
        y, cache = two(returned, what)
        if is_floating(y):
            return y, cache
        self.form = as_arrays(y)
        parts = tuple(floating_in("y", self.form).values())
        if not parts:
            got = f"an array of {y.dtype}" if is_array(y) else f"a {type(y).__name__} without one" if y else repr(y)
            raise ValueError(f"y: expected a floating-point array or number, got {got}")
        return parts if isinstance(y, tuple | list | dict) or len(parts) != 1 else parts[0], cache

    def in_form(self, dy: Any) -> Any:
        """dy in the form of what the forward returned."""
        parts = [x.copy() for x in as_tuple(dy)] if self.isolated else as_tuple(dy)
        return like(dy, list(parts)) if self.form is None else upstream(self.form, iter(parts))

    def _gradients(self, returned: Any, backward: str, changed: Mapping[str, Array]) -> dict[str, Array]:
        args = self.arguments(changed)[0] if changed else self.args
        arguments = {n: x for n, x in zip(self.names, args, strict=True) if floating_in(n, x)}
        gradients = named_gradients(returned, arguments, backward)
        if gradients.keys() != self.floating.keys():
            self.unchecked = [name for name in self.floating if name not in gradients]
            self.floating = {name: x for name, x in self.floating.items() if name in gradients}
        return gradients


class PairRun(CheckedRun):
    """An operation with its own copies of the arguments."""

    def __init__(self, op: Callable, op_backward: Callable, *arguments: Any) -> None:
        """arguments: those of a CheckedRun."""
        super().__init__(*arguments)
        self.op, self.op_backward, self.backward_name = op, op_backward, name_of(op_backward)
        untouched = Untouched(self.given)
        self.y, self.cache = self.forward()
        outputs = labelled("y", self.y)
        self._note("in_place", untouched.check, f"forward{self.type}")
        self._note("memory", expect_apart, outputs, self.given)
        self._note("memory", _expect_apart_from_each_other, outputs)
        if self.broken:
            self.isolated = True
            self.y, self.cache = self.forward()

    def forward(self, changed: Mapping[str, Array] = _NONE) -> tuple[Any, Any]:
        args, kwargs = self.arguments(changed)
        return self._results(self.op(*args, **kwargs), "op")

    def backward(self, dy: Any, cache: Any, changed: Mapping[str, Array] = _NONE) -> dict[str, Array]:
        return self._gradients(self.op_backward(self.in_form(dy), cache), self.backward_name, changed)

    def gradients(self, dy: Any) -> dict[str, np.ndarray]:
        """Copies of the gradients, by name. Raises GradientError if they or y are not finite, or not the same twice."""
        outputs, dys = labelled("y", self.y), labelled("dy", dy)
        expect_finite(outputs)
        second_y, second_cache = self.forward()
        second = labelled("y", second_y)
        expect_repeats(lambda: labelled("y", self.forward()[0]), outputs, second, "calls")
        self._note("memory", expect_apart, second, {f"{name} of an earlier call": x for name, x in outputs.items()})
        self._note("same_bits", expect_equal, outputs, second, "", self.rules["same_bits"])
        returned = self._watched_backward(dy)
        named = of_gradients(returned)
        expect_finite(named)
        self._note("memory", expect_apart, named, self.given | dys)
        self._note("memory", expect_owned, named)
        self._note("memory", _expect_apart_from_each_other, named)
        first = copied_to_cpu(returned)
        if self.isolated:
            _, second_cache = self.forward()
        again = self.backward(dy, second_cache)
        expect_repeats(lambda: self.backward(dy, self.forward()[1]), first, again, "runs")
        self._note("same_bits", expect_equal, again, first, "", self.rules["same_bits"])
        self._note("types", self._expect_type, returned)
        return first

    def check_rules(self, dy: Any, first: Mapping[str, np.ndarray]) -> None:
        """Raise GradientError for a broken rule about one cache, or about what is returned. first: the gradients."""
        self.expect_unbroken()
        _, cache = self.forward()
        returned = self.backward(dy, cache)
        if self.rules["memory"]:
            for x in returned.values():
                if is_array(x) and getattr(x.flags, "writeable", True):
                    x.fill(np.nan)
        try:
            again = self.backward(opposite(dy), cache)
        except Exception as error:
            if not self.rules["again"]:
                return
            with rule("again"):
                what = f"it raises {type(error).__name__}: {error}"
                raise GradientError(f"when backward is called again with the same cache, {what}") from error
        if self.rules["memory"]:
            with rule("memory"):
                for name, x in again.items():
                    if np.isnan(to_cpu(x)).any():
                        said = "shares memory with the cache: writing to it changes the cache"
                        raise GradientError(f"gradient of {name} {said}")
                expect_apart(again, {f"gradient of {name} of an earlier call": g for name, g in returned.items()})
        if self.rules["again"]:
            with rule("again"):
                again = copied_to_cpu(again)
                alone = self.outcome(opposite(dy)).gradients
                added = equal(again, {name: first[name] + g for name, g in alone.items()}) and not equal(first, alone)
                diagnoses = (_ADDED,) if added else ()
                complaint = _TWICE + f". {_ADDED.what}" * added
                expect_equal(again, alone, complaint, self.rules["same_bits"], diagnoses)
                if self._forward_of_others():
                    stale = of_gradients(self.backward(dy, self.cache))
                    expect_equal(stale, of_gradients(first), _STALE, self.rules["same_bits"], STALE)

    def _forward_of_others(self) -> bool:
        """Run forward on other numbers, of other signs where it accepts them; False if it accepts none."""
        rng = Key(0).fold("other numbers").generator()
        for low in (-1.0, 0.5):
            inexact = {n: to_cpu(x) for n, x in self.given.items() if is_floating(x) or x.dtype.kind == "c"}
            others = {n: x * rng.uniform(low, 1, x.shape) for n, x in inexact.items()}
            try:
                with np.errstate(all="ignore"):
                    self.forward({n: copied(x, self.device, self.dtype) for n, x in others.items()})
                return True
            except Exception:  # such numbers are not in its domain
                continue
        return False

    def checked(self, dy: Any) -> None:
        gradients = self._watched_backward(dy)
        if self.rules["in_place"] and "in_place" in self.broken:
            raise GradientError(self.broken["in_place"])
        self._expect_type(gradients)

    def _watched_backward(self, dy: Any) -> dict[str, Array]:
        untouched = Untouched(self.given | labelled("y", self.y) | labelled("dy", dy))
        gradients = self.backward(dy, self.cache)
        try:
            untouched.check(f"backward{self.type}")
        except GradientError as error:
            self.broken.setdefault("in_place", str(error))
            self.isolated = True
            self.y, self.cache = self.forward()
            gradients = self.backward(dy, self.cache)
            self.y, self.cache = self.forward()
        return gradients

    def _expect_type(self, gradients: dict[str, Any]) -> None:
        if self.floating:
            expect_type(labelled("y", self.y) | of_gradients(gradients), self.dtype)


def backward_operation(op: Callable, op_backward: Callable, names: list[str]) -> Callable:
    """The backward of a pair as an operation of dy and the arguments, which have these names. Its cache is dy, and the
    cache of the forward.
    """

    def gradients(dy: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        _, cache = two(op(*args, **kwargs), "op")
        return op_backward(dy, cache), (dy, cache)

    gradients.__name__ = name_of(op_backward)
    gradients.argument_names = ["dy", *names]  # type: ignore[attr-defined]
    return gradients


def expect_named(layer: Any, objects: Iterable[Any]) -> None:
    """Raise GradientError if one of `objects`, all that a deep copy of the layer found in it, is a parameter that
    `named_parameters` does not find: no optimizer would step it, and no snapshot would have it.
    """
    named = {id(p) for p in layer.named_parameters().values()}
    for p in objects:
        is_parameter = hasattr(p, "frozen") and is_array(getattr(p, "data", None)) and is_array(p.grad)
        if is_parameter and id(p) not in named:
            raise GradientError(
                f"the parameter {p.name or 'without a name'} {tuple(p.data.shape)} is not among named_parameters(): "
                "keep parameters and layers in attributes, or in lists, tuples or dicts there"
            )


class LayerRun(CheckedRun):
    """A deep copy of a layer, and copies of its inputs."""

    def __init__(
        self,
        layer: Any,
        inputs: tuple,
        kwargs: dict[str, Any],
        device: Device,
        rules: dict[str, bool],
        dtype: Any,
    ) -> None:
        copies: dict[int, Any] = {}
        self.layer = copy.deepcopy(layer, copies)
        expect_named(self.layer, copies.values())
        expect_apart({f"{name} of a deep copy": x for name, x in layer_arrays(self.layer).items()}, layer_arrays(layer))
        self.layer.to(device=device, dtype=dtype)
        self.layer.zero_grad()
        self.params = self.layer.named_parameters()
        self.trained = {name: p for name, p in self.params.items() if not getattr(p, "frozen", False)}
        names = argument_names(layer.forward, inputs)
        names = [f"input {name}" if name in self.params else name for name in names]
        super().__init__(names, inputs, kwargs, device, rules, dtype)
        self.isolated = not rules["in_place"]

    def forward(self, changed: Mapping[str, Array] = _NONE) -> tuple[Any, Any]:
        inputs, kwargs = self.arguments(changed)
        return self._results(self.layer.forward(*inputs, **kwargs), "forward")

    def backward(self, dy: Any, cache: Any, changed: Mapping[str, Array] = _NONE) -> dict[str, Array]:
        """The gradients of the inputs, by name; those of the parameters are added into the layer."""
        return self._gradients(self.layer.backward(self.in_form(dy), cache), "backward", changed)

    def outcome(self, dy: Any, changed: Mapping[str, Array] = _NONE) -> Outcome:
        self.layer.zero_grad()
        y, inputs = super().outcome(dy, changed)
        return Outcome(y, inputs | self.parameter_gradients())

    def parameter_gradients(self) -> dict[str, np.ndarray]:
        return copied_to_cpu({name: p.grad for name, p in self.trained.items()})

    def gradients(self, dy: Any) -> dict[str, np.ndarray]:
        """Copies of the gradients of inputs and parameters, by name. Raises GradientError if they, or y, are not
        finite, or if a pass writes to what it may not, or replaces an array of a parameter: then no value means much.
        """
        state = layer_arrays(self.layer)
        self.y, cache = self._watched_forward()
        expect_finite(labelled("y", self.y))
        returned = self._watched_backward(dy, self.y, cache)
        self._expect_same_parameters(state)
        self._note("memory", expect_apart, labelled("y", self.y), state)
        self._note("memory", expect_apart, of_gradients(returned), state)
        self._note("types", self._expect_type, self.y, returned)
        first = copied_to_cpu(returned) | self.parameter_gradients()
        expect_finite(of_gradients(first))
        second = self.outcome(dy).gradients
        expect_repeats(lambda: self.outcome(dy).gradients, first, second, "runs")
        self._note("same_bits", expect_equal, second, first, "", self.rules["same_bits"])
        return first

    def check_rules(self, dy: Any, first: Mapping[str, np.ndarray]) -> None:
        """Raise GradientError for a broken rule about one cache, or about what is returned. first: the gradients."""
        self.expect_unbroken()
        if not self.rules["again"]:
            return
        with rule("again"):
            self.layer.zero_grad()
            _, cache = self.forward()
            self.backward(dy, cache)
            sums = self.parameter_gradients()
            again = copied_to_cpu(self.backward(opposite(dy), cache))
            both = self.parameter_gradients()
            alone = self.outcome(opposite(dy)).gradients
            expect_equal(again, alone, _TWICE, self.rules["same_bits"])
            expect_equal(both, {name: g + alone[name] for name, g in sums.items()}, _NOT_ADDED)
            self._check_two_uses(dy, first)

    def _expect_same_parameters(self, state: dict[str, Array]) -> None:
        """Check that neither pass replaced an array of a parameter: an optimizer would still hold the old one."""
        for name, x in layer_arrays(self.layer).items():
            if x is not state.get(name):
                raise GradientError(f"{name} was replaced by another array: write into the one that an optimizer has")

    def _check_two_uses(self, dy: Any, first: Mapping[str, np.ndarray]) -> None:
        """Forward twice, then backward twice: the result must be the same as if each use had been the only one."""
        rng = Key(0).fold("second inputs").generator()
        inputs = {name: shuffled(x, rng) for name, x in zip(self.names, self.args, strict=True)}
        other_dy = like(dy, [shuffled(x, rng) for x in as_tuple(dy)])
        other = self.outcome(other_dy, inputs).gradients
        self.layer.zero_grad()
        (_, cache), (_, other_cache) = self.forward(), self.forward(inputs)
        first_use = copied_to_cpu(self.backward(dy, cache))
        second_use = copied_to_cpu(self.backward(other_dy, other_cache, inputs))
        complaint = "is wrong when the layer is used twice before backward (it must remember nothing outside the cache)"
        expect_equal(first_use, first, complaint, diagnoses=STALE)
        expect_equal(second_use, other, complaint, diagnoses=STALE)
        both = {name: first[name] + other[name] for name in self.trained}
        expect_equal(self.parameter_gradients(), both, complaint, diagnoses=STALE)

    def checked(self, dy: Any) -> None:
        """The parameters keep their types too; backward may write to gradients."""
        self.layer.zero_grad()
        y, cache = self._watched_forward()
        self._expect_type(y, self._watched_backward(dy, y, cache))

    def _watched_forward(self) -> tuple[Any, Any]:
        untouched = Untouched(self.given | layer_arrays(self.layer))
        y, cache = self.forward()
        if self.rules["in_place"]:
            untouched.check(f"forward{self.type}")
        return y, cache

    def _watched_backward(self, dy: Any, y: Any, cache: Any) -> dict[str, Array]:
        parameters = {n: p.data for n, p in self.params.items()}
        untouched = Untouched(self.given | labelled("y", y) | labelled("dy", dy) | parameters)
        gradients = self.backward(dy, cache)
        if self.rules["in_place"]:
            untouched.check(f"backward{self.type}")
        return gradients

    def _expect_type(self, y: Any, gradients: dict[str, Any]) -> None:
        expect_type(labelled("y", y) | of_gradients(gradients) | layer_arrays(self.layer), self.dtype)


def expect_repeats(
    call: Callable[[], Mapping[str, Array]], first: Mapping[str, Array], second: Mapping[str, Array], calls: str
) -> None:
    """Raise GradientError unless the results of two calls, or runs, on the same numbers are the same. It says what a
    third and a fourth call show. No call writes to `first`.
    """
    if equal(second, first):
        return
    drawn = _drawn()
    results = [first, copied_to_cpu(second), copied_to_cpu(call()), copied_to_cpu(call())]
    changes = [{name: to_cpu(b[name]) - to_cpu(a[name]) for name in a} for a, b in itertools.pairwise(results)]
    diagnoses: tuple[Diagnosis, ...] = ()
    if all(equal(change, changes[0]) for change in changes):
        diagnoses, why = (_ADDED,), f"each call changes it by the same amount. {_ADDED.what}"
        if all(equal({name: change}, {name: first[name]}) for name, change in changes[0].items() if change.any()):
            why = f"the second result is twice the first, the third is three times the first. {_ADDED.what}"
    elif _drawn() != drawn:
        why = "NumPy's global generator is used. Random numbers must come from a key, or be kept in the cache."
    elif equal(results[1], results[2]) and equal(results[2], results[3]):
        why = "the first result differs from the next three, which are the same: something is kept from call to call."
    else:
        why = "random numbers must come from a key, and nothing may be kept from an earlier call."
    expect_equal(second, first, f"differs between two {calls} with the same arguments: {why}", diagnoses=diagnoses)


def _drawn() -> tuple[int, int]:
    """Where NumPy's global generator is in its numbers."""
    state = np.random.get_state(legacy=False)  # noqa: NPY002
    return state["state"]["pos"], state["has_gauss"]


def equal(named: Mapping[str, Array], expected: Mapping[str, Array]) -> bool:
    """Whether `expect_equal` finds no difference but in the last digits."""
    try:
        expect_equal(named, expected, "")
    except GradientError:
        return False
    return True


def _expect_apart_from_each_other(named: dict[str, Any]) -> None:
    for i, (name, x) in enumerate(named.items()):
        expect_apart({name: x}, dict(list(named.items())[:i]))


def argument_names(function: Callable, args: tuple) -> list[str]:
    """The parameter name for each of `args`: "gamma", or "tensors[1]" for `*tensors`.

    A function whose arguments have names that are not identifiers lists them in an attribute `argument_names`.
    """
    if hasattr(function, "argument_names"):
        return function.argument_names
    parameters = list(parameters_of(function).values())
    names = []
    for i in range(len(args)):
        variadic = next((p for p in parameters[: i + 1] if p.kind is p.VAR_POSITIONAL), None)
        if variadic:
            names.append(f"{variadic.name}[{i - parameters.index(variadic)}]")
        else:
            names.append(parameters[i].name if i < len(parameters) else f"argument {i}")
    return names


def parameters_of(function: Callable) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # it is written in C
        return {}


def name_of(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)


def two(returned: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise GradientError(f"{what} must return the pair (y, cache), got {type(returned).__name__}")
    return returned


def layer_arrays(layer: Any) -> dict[str, Array]:
    """All parameters by name, and their gradients as "gradient of NAME"."""
    params = layer.named_parameters()
    return {n: p.data for n, p in params.items()} | of_gradients({n: p.grad for n, p in params.items()})


def normal_like(y: Any, seed: int, device: Device, dtype: Any) -> Any:
    """Standard normal numbers of the shape of `y`, an array or a tuple or list of arrays on `device`. Raises ValueError
    if y has no elements.
    """
    expect_arrays(labelled("y", y), device)
    rng = Key(seed).fold("dy").generator()
    shapes = [to_cpu(part).shape for part in as_tuple(y)]
    if not any(map(math.prod, shapes)):
        raise ValueError(f"y: expected at least one element, got {', '.join(map(str, shapes)) or type(y).__name__}")
    return like(y, [to_device(np.asarray(rng.standard_normal(shape)), device, dtype) for shape in shapes])


def like(y: Any, parts: list) -> Any:
    """`parts` as a tuple, NamedTuple or list if `y` is one, otherwise the only part."""
    return rebuilt(y, parts) if isinstance(y, tuple | list) else parts[0]


def opposite(dy: Any) -> Any:
    """−2 dy, for a second call with the same cache: a backward that remembers the first dy shows."""
    return like(dy, [array_module(part).asarray(-2 * part) for part in as_tuple(dy)])


def flat(y: Any) -> np.ndarray:
    """All elements of an array, or of a tuple of arrays, as one NumPy vector."""
    return np.concatenate([to_cpu(part).reshape(-1) for part in as_tuple(y)])


def shuffled(x: Any, rng: np.random.Generator) -> Any:
    """An array with the elements of `x` in random order, or with random elements if all are the same floating-point
    number; anything else is returned unchanged.
    """
    if not is_array(x):
        return x
    values = rng.permutation(to_cpu(x).reshape(-1))
    if is_floating(x) and x.size and np.ptp(values) == 0:
        values = (values[0] or 1) * rng.uniform(0.5, 1, values.shape)
    twin = x.copy()
    twin[...] = array_module(x).asarray(values.reshape(x.shape))
    return twin


def expect_finite(named: dict[str, Any], error: type[Exception] = GradientError) -> None:
    """Raise `error` naming the first element that is NaN or infinite."""
    for name, x in named.items():
        values = to_cpu(x)
        bad = np.argwhere(~np.isfinite(values))
        if len(bad):
            index = tuple(map(int, bad[0]))
            raise error(f"{label(name, index)} is {values[index]} ({len(bad)} elements are not finite)")
