"""Gradient checks for functions of PyTorch and JAX, as `check_gradients` makes them, with its rules and messages.

    print(check_torch(Cube, torch.randn(2, 3)))  # an autograd.Function, a module, or any function of tensors
    print(check_jax(jax.nn.gelu, jnp.ones((2, 3))))

The function becomes a pair of NumPy functions: the forward calls it, and the backward asks the library's autograd. So
every rule of `check_gradients` applies, with two exceptions. A result may be a view of an argument, and a gradient may
be dy itself, as in `check_layer`: PyTorch keeps track of views, and an array of JAX cannot be written to. And PyTorch
never gets an empty batch: some of its backwards then read memory that is not theirs, and end the process.

Neither library is imported before it is needed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from .contracts import (
    GradientError,
    Untouched,
    as_tuple,
    chosen_rules,
    expect_equal,
    is_array,
    is_floating,
    labelled,
    mapped,
    of_gradients,
    repeatable,
)
from .gradcheck import Report, check_gradients
from .layouts import spread
from .runs import argument_names, name_of, parameters_of


@repeatable
def check_torch(function: Callable, *tensors: Any, **options: Any) -> Report:
    """Check the gradients that PyTorch's autograd gives for `function(*tensors)`.

    `function` is any differentiable function of tensors, a subclass of `torch.autograd.Function` (or its `apply`), or
    an `nn.Module`, whose parameters are checked too, by name. Arguments and results are tensors, or lists, tuples and
    dicts of them. Results without a gradient (integers, or detached ones while others have a gradient) are left out.

    Checked are the floating-point tensors that require a gradient, or all of them if none does, and the parameters that
    require one. They are copied as float64 (complex ones as complex128, sparse ones by their values). Where a float32
    tensor that the function has from elsewhere does not go with them, it is widened too. What you pass does not change:
    a module runs with copies of its parameters and buffers. Random numbers start from `seed` before each forward, so
    that dropout always draws the same mask; a function that draws gets contiguous tensors.

    `order=2` also checks the double backward: the gradients, as a function of dy and the tensors, are compared in the
    same way. `forward=True` also checks forward mode: the derivatives along each element, one at a time, so use small
    tensors. `batched=True` also checks that several dy at once, as `torch.func.vmap` passes them to the backward, give
    what each gives alone.

    The function runs on the device of the first tensor or parameter, or on `device`. `options` are these, those of
    `check_gradients` (`seed`, `rtol`, `rules`, ...) and keyword arguments of the function, which get no gradient. A
    name that both have is the function's, if Python knows its signature; otherwise use `functools.partial`.

    Returns a Report. Raises GradientError and ValueError as `check_gradients` does, TypeError if the function accepts
    only one of float64 and float32, NotImplementedError if PyTorch has no second derivative or forward mode for it, and
    ImportError if PyTorch is not installed.
    """
    _expect_installed("torch", "PyTorch")
    pair = _TorchPair(function, tensors, options)
    report = pair.check("check_torch")
    for kind, chosen in (_TorchSecondOrder, pair.order == 2), (_TorchForward, pair.forward_mode):
        if chosen:
            other = kind(function, tensors, options)
            try:
                report.add(other.check("check_torch"), other.name)
            except RuntimeError as error:  # NotImplementedError is one too
                if "implement" not in str(error):
                    raise
                said = str(error).partition("\n")[0]
                raise NotImplementedError(f"{other.name}: {said} (without {kind.option} the check passes)") from error
    if pair.batched:
        pair.check_batches()
    return report


@repeatable
def check_jax(function: Callable, *arrays: Any, **options: Any) -> Report:
    """Check the gradients that JAX gives for `function(*arrays)`: a `custom_vjp`, or any differentiable function.

    Arguments and results are arrays or pytrees of arrays. All floating-point arrays among the arguments are checked,
    under names such as `params['w']`; everything else is passed on. Results that are not floating-point are left out.

    float64 is enabled during the check only; `jax.config` stays as it is. The function must return the same as the
    forward rule of its `custom_vjp`. It is compiled with `jax.jit`, if that is possible.

    `order=2` also checks the second derivatives, as in `check_torch`.

    `options` are those of `check_gradients`, except `device`, and keyword arguments of the function, as in
    `check_torch`.

    Returns a Report. Raises GradientError and ValueError as `check_gradients` does, TypeError if the function accepts
    only one of float64 and float32, and ImportError if JAX is not installed.
    """
    _expect_installed("jax", "JAX")
    pair = _JaxPair(function, arrays, options)
    if "device" in pair.options:
        raise ValueError("device: not an option of check_jax; choose JAX's device with jax.default_device(...)")
    report = pair.check("check_jax")
    if pair.order == 2:
        second = _JaxSecondOrder(function, arrays, options)
        report.add(second.check("check_jax"), second.name)
    return report


def _expect_installed(name: str, title: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{title} is not installed; install it with: pip install 'scratchformer[{name}]'") from error


_OPTIONS = {n for n, p in inspect.signature(check_gradients).parameters.items() if p.kind is p.KEYWORD_ONLY}


def is_leaf(x: Any) -> bool:
    """Whether `x` is not a tuple, list or dict."""
    return not isinstance(x, tuple | list | dict)


def _is_whole(x: Any) -> bool:
    """Whether `x` is a tuple with a meaning of its own, such as a torch.Size."""
    return isinstance(x, tuple) and type(x) is not tuple and not hasattr(x, "_fields")


class ForeignPair(ABC):
    """A function of another library as an operation and its backward, on NumPy arrays."""

    function: Any
    cut: str  # what can keep a gradient from reaching an argument
    option = ""  # of the check, for the call that repeats it
    orders: tuple[int, ...] = (1,)  # that can be checked
    accepted = _OPTIONS

    def __init__(self, function: Callable, name: str, forward: Callable, args: tuple, options: dict[str, Any]) -> None:
        self.function, self.name = function, name
        self.called = name  # in the call of the check
        parameters = parameters_of(forward)
        self.options = {n: x for n, x in options.items() if n in self.accepted and n not in parameters}
        self.args = dict(zip(argument_names(forward, args), args, strict=True))
        self.kwargs = {n: x for n, x in options.items() if n not in self.options}
        self.order, self.seed = self.options.pop("order", 1), self.options.get("seed", 0)
        if self.order not in self.orders:
            raise ValueError(f"order: expected {' or '.join(map(str, self.orders))}, got {self.order!r}")
        keywords = self.flatten(self.kwargs)
        self.leaves = self.flatten(self.args | self.kwargs)
        arrays = {n: x for n, x in self.leaves.items() if isinstance(self.to_numpy(x), np.ndarray)}
        self.variables = {n: x for n, x in arrays.items() if n not in keywords}
        self.constants = {n: x for n, x in arrays.items() if n in keywords}  # arrays without a gradient

    def flatten(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Everything in tuples, lists and dicts, by names such as `x` and `params['w']`."""
        leaves: dict[str, Any] = {}
        for name, x in named.items():
            mapped(leaves.setdefault, name, x, is_leaf)
        return leaves

    def unflatten(self, leaves: dict[str, Any]) -> list:
        """The inverse of `flatten`, for all arguments."""
        return [mapped(lambda name, _: leaves[name], n, x, is_leaf) for n, x in (self.args | self.kwargs).items()]

    def check(self, checker: str) -> Report:
        """check_gradients of the pair; its messages name the function, the arguments and `checker`."""
        keys = {f"constant {n}": n for n in self.constants}  # they are keyword arguments, which get no gradient
        reached: set[str] = set()  # the arguments whose gradient is not always zero

        def op(*arrays: Any, **constants: Any) -> tuple[Any, Any]:
            given = dict(zip(self.variables, arrays, strict=True))
            return self._forward(given | {keys[key]: x for key, x in constants.items()})

        def op_backward(dy: Any, cache: Any) -> tuple:
            gradients = self.gradients(tuple(map(np.asarray, as_tuple(dy))), cache)
            reached.update(n for n, g in gradients.items() if g.any())
            return tuple(gradients.values())

        op.__name__, op_backward.__name__ = self.name, f"the backward of {self.name}"
        op.argument_names = list(self.variables)  # type: ignore[attr-defined]
        constants = {key: self.to_numpy(self.constants[n]) for key, n in keys.items()}
        try:
            return check_gradients(
                op, op_backward, *map(self.to_numpy, self.variables.values()), **self.options, **constants
            )
        except GradientError as error:
            message, repeat, call = str(error).rpartition("\nRepeat with")
            for n in self.variables:
                if n not in reached and re.search(rf"wrong gradient at {re.escape(n)}[\[:. ]", message):
                    message += f"\n  no gradient reaches {n}: look for {self.cut}"
            call = call.replace(f"check_gradients({self.name}, {op_backward.__name__}", f"{checker}({self.called}")
            call = call[:-1] + f", {self.option})" if self.option else call
            error.args = (message + repeat + call,)
            raise

    def _forward(self, arrays: dict[str, Any]) -> tuple[Any, Any]:
        """`forward`, with a clear error if it accepts only one of float64 and float32.

        Empty arrays may be refused with any error.
        """
        try:
            y, cache = self.forward(arrays)
            return y if len(y) > 1 else y[0], cache
        except GradientError:
            raise
        except Exception as error:
            if type(error).__name__ == "LinAlgError":
                raise np.linalg.LinAlgError(str(error)) from error  # PyTorch has its own
            if not all(x.size for x in arrays.values()):
                raise ValueError(str(error)) from error  # which PyTorch raises as RuntimeError
            dtype = next((x.dtype for x in arrays.values() if is_floating(x)), np.dtype(float))
            other = np.dtype(np.float32 if dtype == np.float64 else np.float64)
            try:
                self.forward({n: x.astype(other) if is_floating(x) else x for n, x in arrays.items()})
            except Exception:
                raise error from None
            said = str(error).partition("\n")[0] or type(error).__name__
            raise TypeError(f"{self.name} accepts {other} but not {dtype}: {said}") from error

    def arguments(self, arrays: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments of the function, positional and by keyword, with `arrays` in their places."""
        values = self.unflatten({n: arrays.get(n, x) for n, x in self.leaves.items()})
        return tuple(values[: len(self.args)]), dict(zip(self.kwargs, values[len(self.args) :], strict=True))

    def numbers(self) -> dict[str, np.ndarray]:
        """The arrays among the arguments."""
        return {n: self.to_numpy(x) for n, x in (self.variables | self.constants).items()}

    @abstractmethod
    def to_numpy(self, x: Any) -> Any:
        """An array as a NumPy array, of float64 or complex128 if it is not of integers; anything else unchanged."""

    @abstractmethod
    def forward(self, arrays: dict[str, Any]) -> tuple[tuple, Any]:
        """y, a tuple of arrays, and a cache."""

    @abstractmethod
    def gradients(self, dy: tuple, cache: Any) -> dict[str, np.ndarray]:
        """The gradients of the floating-point arguments, by name."""


class _TreePair(ForeignPair):
    """A pair whose library has trees, and a module `tree` with the functions of jax.tree_util for them."""

    tree: Any
    orders = (1, 2)
    upstream: Mapping[str, Any] = {}  # dy, if what is checked is the backward

    def flatten(self, named: Mapping[str, Any]) -> dict[str, Any]:
        names, tree = list(named), self.tree
        paths, self.structure = tree.tree_flatten_with_path(list(named.values()), is_leaf=_is_whole)
        return {names[place.idx] + tree.keystr(tuple(rest)): leaf for (place, *rest), leaf in paths}

    def unflatten(self, leaves: dict[str, Any]) -> list:
        return self.tree.tree_unflatten(self.structure, list(leaves.values()))

    def differentiate(self) -> None:
        """Check the gradients, as a function of dy and the arguments, from now on."""
        y, _ = self.forward(self.numbers())
        rng = np.random.default_rng(self.seed)
        self.upstream = labelled("dy", [np.asarray(rng.standard_normal(part.shape)).astype(part.dtype) for part in y])
        self.variables = self.upstream | self.variables
        self.name = f"the backward of {self.name}"


class _TorchPair(_TreePair):
    cut = "detach(), .data, .item(), no_grad() or NumPy"
    accepted = _OPTIONS | {"forward", "batched"}
    draws = False  # whether the function draws random numbers
    contiguous = False  # whether it takes no other tensors, or goes by the order of memory
    watched = False  # whether it has run once
    cloned = False  # whether it writes to its arguments, so that these must not be leaves
    widened = False  # whether it has tensors of its own that are not float64

    def __init__(self, function: Any, tensors: tuple, options: dict[str, Any]) -> None:
        import torch
        from torch.utils import _pytree

        self.torch = torch
        self.module: Any = function if isinstance(function, torch.nn.Module) else None
        forward = self.module.forward if self.module else function
        name = type(function).__name__ if self.module else name_of(function)
        kind = function if isinstance(function, type) else getattr(function, "__self__", None)
        if isinstance(kind, type) and issubclass(kind, torch.autograd.Function):
            rule: Any = kind
            function, name, forward = rule.apply, rule.__name__, rule.forward
            if rule.setup_context is torch.autograd.Function.setup_context:
                forward = functools.partial(forward, None)  # without ctx
        self.tree = _pytree
        super().__init__(function, name, forward, tensors, options)
        self._add_parameters()
        self.forward_mode, self.batched = (self.options.pop(name, False) for name in ("forward", "batched"))
        located = [x for x in self.variables.values() if isinstance(x, torch.Tensor)]
        self.device = located[0].device if located else torch.device("cpu")
        if (device := self.options.pop("device", None)) is not None:
            self.device = torch.device("cpu" if device.index is None else f"cuda:{device.index}")
        self.rules = chosen_rules(self.options.get("rules", {}), house=False) | {"empty": False}
        self.options["rules"] = self.rules

    def _add_parameters(self) -> None:
        """Separate variables from constants, and add the module's parameters to them."""
        parameters = dict(self.module.named_parameters()) if self.module else {}
        renamed = {n: f"input {n}" if n in parameters else n for n in self.leaves}
        self.leaves = {renamed[n]: x for n, x in self.leaves.items()}
        inputs = {renamed[n]: x for n, x in self.variables.items()}
        floating = {n: x for n, x in inputs.items() if self.to_numpy(x).dtype.kind in "fc"}
        marked = {n for n, x in floating.items() if getattr(x, "requires_grad", False)}
        self.constants |= {n: x for n, x in floating.items() if marked and n not in marked}
        self.constants |= {n: p for n, p in parameters.items() if not p.requires_grad}
        self.variables = {n: x for n, x in (inputs | parameters).items() if n not in self.constants}
        self.parameters = list(parameters)

    def to_numpy(self, x: Any) -> Any:
        if not isinstance(x, self.torch.Tensor):
            return x
        x = x.detach().cpu()
        x = x if x.layout is self.torch.strided else x.coalesce().values() if x.is_sparse else x.values()
        wide = self.torch.complex128 if x.is_complex() else self.torch.float64 if x.is_floating_point() else x.dtype
        return self._numpy(x.to(wide))

    def _numpy(self, x: Any) -> np.ndarray:
        """A tensor as an array, of the same memory if it is on the CPU and NumPy has its type."""
        wider = {self.torch.bfloat16: self.torch.float32, self.torch.complex32: self.torch.complex64}
        x = x.detach().cpu().to(wider.get(x.dtype, x.dtype))
        return x.resolve_conj().resolve_neg().numpy()

    def forward(self, arrays: dict[str, Any]) -> tuple[tuple, Any]:
        torch = self.torch
        tensors = {n: self.tensor(x) for n, x in arrays.items()}
        fixed = tensors if self.contiguous else self.parameters  # a module chooses the layout of its parameters
        tensors |= {n: tensors[n].contiguous() for n in fixed}
        inexact = {n: t for n, t in tensors.items() if t.is_floating_point() or t.is_complex()}
        leaves = {n: t.requires_grad_() for n, t in inexact.items() if n in self.variables}
        try:
            with torch.enable_grad():
                results = self.run(arrays, tensors)
        except RuntimeError as error:
            if "leaf Variable" in str(error) and not self.cloned:
                if self.rules["in_place"]:
                    untouched = Untouched(arrays)  # find the argument that PyTorch does not let it write to
                    with torch.no_grad():
                        self.run(arrays, tensors)
                    untouched.check("forward")
                self.cloned = True
            elif not self.contiguous and not all(t.is_contiguous() for t in tensors.values()):
                self.contiguous = True
            elif not self.widened:
                self.widened = True
            else:
                raise
            try:
                return self.forward(arrays)
            except Exception:
                self.cloned = self.widened = False
                self.contiguous = self.draws
                raise error from None
        self.kept = [i for i, t in enumerate(results) if t.requires_grad]
        outputs = [results[i] for i in self.kept]
        if not any(t.is_floating_point() or t.is_complex() for t in results):
            types = ", ".join(str(t.dtype).removeprefix("torch.") for t in results)
            raise TypeError(f"{self.name}: expected a floating-point tensor among the results, got {types}")
        if not outputs:
            names = ", ".join(leaves)
            raise GradientError(f"y does not depend on {names} through torch's autograd: look for {self.cut}")
        outputs = [t if t.layout is torch.strided else t.to_dense() for t in outputs]
        tracked = [t.clone() if t._is_view() or t.is_leaf else t for t in outputs]  # autograd keeps track of views
        return tuple(self._numpy(t) for t in tracked), (outputs, leaves)

    def run(self, arrays: dict[str, Any], tensors: dict[str, Any]) -> list:
        """The tensors that the function returns. What it writes to its arguments is written to `arrays` too."""
        torch = self.torch
        passed = {n: t.clone() if self.cloned else t for n, t in tensors.items()}
        passed |= {n: self._sparse(x, passed[n]) for n, x in self.leaves.items() if n in passed}
        args, kwargs = self.arguments(passed)
        widening = self._widening() if self.widened else nullcontext()
        watching = nullcontext() if self.watched else self._watching()
        seeded = nullcontext() if self.watched and not self.draws else self._random_numbers()
        self.watched = True
        with seeded, widening, watching:
            if self.module:
                state = {n: passed[n] for n in self.parameters} | self._buffers(tensors)
                returned = torch.func.functional_call(self.module, state, args, kwargs)
            else:
                returned = self.function(*args, **kwargs)
        self._write_back(arrays, tensors)
        results = [t for t in self.tree.tree_flatten(returned)[0] if isinstance(t, torch.Tensor)]
        if not results:
            raise TypeError(f"{self.name}: expected tensors as results, got {type(returned).__name__}")
        return results

    def gradients(self, dy: tuple, cache: Any) -> dict[str, np.ndarray]:
        outputs, leaves = cache
        upstream = {i: self.tensor(x) for i, x in enumerate(dy)}
        given = [u.to(t.dtype) for u, t in zip(upstream.values(), outputs, strict=True)]
        try:
            gradients = self.torch.autograd.grad(
                outputs, list(leaves.values()), given, retain_graph=True, materialize_grads=True
            )
        except RuntimeError as error:
            if "returned an" not in str(error):  # an incorrect number of gradients, an invalid gradient
                raise
            raise GradientError(str(error)) from error
        self._write_back(dict(enumerate(dy)), upstream)
        return dict(zip(leaves, self._as_numpy(gradients, given), strict=True))

    def check_batches(self) -> None:
        """Raise GradientError if several dy at once give other gradients than each alone."""
        torch, count = self.torch, 3
        y, (outputs, leaves) = self.forward(self.numbers())
        rng = np.random.default_rng(self.seed)
        dy = [rng.standard_normal((count, *part.shape)).astype(part.dtype) for part in y]
        alone = [self.gradients(tuple(np.asarray(part[i]) for part in dy), (outputs, leaves)) for i in range(count)]
        given = [self.tensor(part).to(t.dtype) for part, t in zip(dy, outputs, strict=True)]

        def pull(*upstream: Any) -> tuple:
            return torch.autograd.grad(outputs, [*leaves.values()], upstream, retain_graph=True, materialize_grads=True)

        batched = torch.func.vmap(pull)(*given)  # not is_grads_batched, which leaves out a function's rule for vmap
        together = {n: self._numpy(g) for n, g in zip(leaves, batched, strict=True)}
        each = {n: np.stack([gradients[n] for gradients in alone]) for n in leaves}
        complaint = "several dy at once (vmap) do not give what each of them gives alone"
        try:
            expect_equal(of_gradients(together), of_gradients(each), complaint)
        except GradientError as error:
            raise GradientError(f"{self.name}: {error}") from None

    def _as_numpy(self, gradients: tuple, given: list) -> Iterator[np.ndarray]:
        """The gradients as arrays. Those that are dy, or each other, or expanded, are copied: autograd allows that."""
        seen = {t.untyped_storage().data_ptr() for t in given}
        for g in gradients:
            dense = g if g.layout is self.torch.strided else g.to_dense()
            g = self.torch.zeros_like(dense) if dense._is_zerotensor() else dense
            pointer, array = g.untyped_storage().data_ptr(), self._numpy(g)
            yield array.copy() if pointer in seen or 0 in array.strides else array
            seen.add(pointer)

    def tensor(self, x: Any) -> Any:
        """A NumPy array as a tensor on the device. On a CPU it shares the memory, unless the array is read-only or has
        negative strides: PyTorch has neither, so it gets a copy in a similar layout.
        """
        if not isinstance(x, np.ndarray):
            return x
        if not x.flags.writeable or any(step < 0 for step in x.strides):
            x = np.copy(x, order="K") if x.flags.forc else spread(x)
        return self.torch.from_numpy(x).to(self.device)

    def _write_back(self, arrays: dict, tensors: dict) -> None:
        """Let the check see what was written to tensors on another device."""
        if self.device.type != "cpu":
            for n, x in arrays.items():
                x[...] = tensors[n].detach().cpu().numpy()

    def _sparse(self, x: Any, values: Any) -> Any:
        """A tensor like the sparse `x` with other values; `values` themselves where `x` is not sparse."""
        torch = self.torch
        if not isinstance(x, torch.Tensor) or x.layout is torch.strided:
            return values
        if x.is_sparse:
            return torch.sparse_coo_tensor(x.coalesce().indices(), values, x.shape, is_coalesced=True)
        by_row = x.layout in (torch.sparse_csr, torch.sparse_bsr)
        indices = (x.crow_indices(), x.col_indices()) if by_row else (x.ccol_indices(), x.row_indices())
        return torch.sparse_compressed_tensor(*indices, values, x.shape, layout=x.layout)

    def _widening(self) -> AbstractContextManager:
        """A context in which a function of PyTorch that gets float64 and narrower tensors gets them all as float64."""
        torch, tree = self.torch, self.tree
        overrides: Any = importlib.import_module("torch.overrides")

        class Widening(overrides.TorchFunctionMode):
            def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
                leaves, structure = tree.tree_flatten((args, kwargs or {}))
                tensors = [
                    t for t in leaves if isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex())
                ]
                name = getattr(function, "__name__", "")
                in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
                if not in_place and torch.float64 in {t.dtype.to_real() for t in tensors}:
                    wide = {id(t): t.to(torch.complex128 if t.is_complex() else torch.float64) for t in tensors}
                    args, kwargs = tree.tree_unflatten([wide.get(id(x), x) for x in leaves], structure)
                return function(*args, **(kwargs or {}))

        return Widening()

    def _buffers(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Copies of the module's buffers, of the type of the tensors."""
        dtype = next(t.dtype for t in tensors.values() if t.is_floating_point() or t.is_complex())
        buffers = {n: b.to(self.device, copy=True) for n, b in self.module.named_buffers()}
        return {n: b.to(dtype) if b.is_floating_point() else b for n, b in buffers.items()}

    @contextmanager
    def _random_numbers(self) -> Iterator[None]:
        """Random numbers from the seed; afterwards the generators are as before."""
        torch, on_gpu = self.torch, self.device.type == "cuda"
        with torch.random.fork_rng([self.device] if on_gpu else []):
            torch.default_generator.manual_seed(self.seed)
            if on_gpu:
                with torch.cuda.device(self.device):
                    torch.cuda.manual_seed(self.seed)
            yield

    def _watching(self) -> AbstractContextManager:
        """A context that notices whether random numbers are drawn, or memory is read by its strides."""
        pair, drawing = self, self.torch.Tag.nondeterministic_seeded
        modes: Any = importlib.import_module("torch.utils._python_dispatch")

        class Watching(modes.TorchDispatchMode):
            def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
                pair.draws |= drawing in function.tags
                pair.contiguous |= pair.draws or "as_strided" in function.name()
                return function(*args, **(kwargs or {}))

        return Watching()


class _TorchSecondOrder(_TorchPair):
    """The gradients of a function as a function of dy and its tensors."""

    cut = f"once_differentiable, {_TorchPair.cut}"
    option = "order=2"

    def __init__(self, function: Any, tensors: tuple, options: dict[str, Any]) -> None:
        super().__init__(function, tensors, options)
        self.differentiate()

    def run(self, arrays: dict[str, Any], tensors: dict[str, Any]) -> list:
        results = super().run(arrays, tensors)
        if not self.upstream:
            return results
        outputs = [t if t.layout is self.torch.strided else t.to_dense() for t in results if t.requires_grad]
        leaves = [t for n, t in tensors.items() if n not in self.upstream and t.requires_grad]
        given = [tensors[n].to(t.dtype) for n, t in zip(self.upstream, outputs, strict=True)]
        return list(self.torch.autograd.grad(outputs, leaves, given, create_graph=True, materialize_grads=True))


class _TorchForward(_TorchPair):
    """A function whose gradients are put together from derivatives in forward mode."""

    option = "forward=True"

    def __init__(self, function: Any, tensors: tuple, options: dict[str, Any]) -> None:
        super().__init__(function, tensors, options | {"rules": False})
        self.name += " in forward mode"

    def forward(self, arrays: dict[str, Any]) -> tuple[tuple, Any]:
        y, (_, leaves) = super().forward(arrays)
        return y, (list(leaves), {n: x.copy() for n, x in arrays.items()})

    def gradients(self, dy: tuple, cache: Any) -> dict[str, np.ndarray]:
        """Σ dy ∂y/∂x for each element of each x; of a complex one, also along i."""
        names, arrays = cache
        gradients = {n: np.zeros_like(arrays[n]) for n in names}
        for n, gradient in gradients.items():
            for index in np.ndindex(gradient.shape):
                for unit in (1, 1j) if gradient.dtype.kind == "c" else (1,):
                    direction = np.zeros_like(gradient)
                    direction[index] = unit
                    changes = zip(dy, self._changes(arrays, n, direction), strict=True)
                    gradient[index] += unit * sum(np.sum(np.conj(u) * change).real for u, change in changes)
        return gradients

    def _changes(self, arrays: dict[str, Any], name: str, direction: np.ndarray) -> list[np.ndarray | float]:
        """The derivatives of the results along a direction of one tensor."""
        forward_mode = self.torch.autograd.forward_ad
        tensors = {n: self.tensor(x) for n, x in arrays.items()}
        with forward_mode.dual_level():
            tensors[name] = forward_mode.make_dual(tensors[name], self.tensor(direction))
            results = self.run(arrays, tensors)
            changes = [forward_mode.unpack_dual(results[i]).tangent for i in self.kept]
            return [0.0 if change is None else self._numpy(change) for change in changes]


class _JaxPair(_TreePair):
    cut = "stop_gradient, or a rule that gives zeros"

    def __init__(self, function: Callable, arrays: tuple, options: dict[str, Any]) -> None:
        import jax

        self.jax, self.tree = jax, jax.tree_util
        super().__init__(function, name_of(function), function, arrays, options)
        self.compiled: dict[str, Callable] = {"results": jax.jit(self.results), "pulled": jax.jit(self.pulled)}
        self.shapes = {n: np.shape(x) for n, x in (self.variables | self.constants).items()}

    def to_numpy(self, x: Any) -> Any:
        dtypes = self.jax.numpy
        if not is_array(x):
            return x
        for kind, wide in ((dtypes.complexfloating, np.complex128), (dtypes.floating, np.float64)):
            if dtypes.issubdtype(x.dtype, kind):
                return np.asarray(x).astype(wide)
        if dtypes.issubdtype(x.dtype, dtypes.integer) or x.dtype == bool:
            return np.asarray(x)
        return x

    def forward(self, arrays: dict[str, Any]) -> tuple[tuple, Any]:
        with self._types(arrays):
            given = {n: self.as_jax(x) for n, x in arrays.items()}
            results = self._call("results", given)
            if not results:
                raise TypeError(f"{self.name}: expected a floating-point result")
            y = tuple(np.array(x) for x in results)
        return y, (given, y)

    def _call(self, name: str, given: dict[str, Any], *others: Any) -> Any:
        """A method by its name: compiled, if that is possible, and only for the shapes of the arguments."""
        if name in self.compiled and {n: np.shape(x) for n, x in given.items()} == self.shapes:
            try:
                return self.compiled[name](given, *others)
            except self.jax.errors.JAXTypeError:  # it needs the numbers themselves
                self.compiled = {}
        return getattr(self, name)(given, *others)

    def results(self, arrays: dict[str, Any]) -> list:
        """The floating-point arrays that the function returns."""
        dtypes = self.jax.numpy
        args, kwargs = self.arguments(arrays)
        leaves = self.jax.tree_util.tree_leaves(self.function(*args, **kwargs))
        return [x for x in leaves if is_array(x) and dtypes.issubdtype(x.dtype, dtypes.inexact)]

    def pulled(self, arrays: dict[str, Any], dy: list) -> tuple[list, dict[str, Any]]:
        """The results by the forward rule, and the gradients."""
        return self._pulled(self.results, list(self.variables), arrays, dy)

    def _pulled(self, results: Callable, names: list[str], arrays: dict[str, Any], dy: list) -> tuple[list, dict]:
        dtypes = self.jax.numpy
        variables = {n: arrays[n] for n in names if dtypes.issubdtype(arrays[n].dtype, dtypes.inexact)}
        again, pull = self.jax.vjp(lambda moved: results(arrays | moved), variables)
        (gradients,) = pull([u.astype(x.dtype) for u, x in zip(dy, again, strict=True)])
        return again, gradients

    def gradients(self, dy: tuple, cache: Any) -> dict[str, np.ndarray]:
        given, y = cache
        with self._types(given):
            try:  # a cotangent of JAX is the complex conjugate of what is called a gradient here
                again, gradients = self._call("pulled", given, [self.as_jax(np.conj(u)) for u in dy])
            except (TypeError, ValueError) as error:
                if "vjp" not in str(error).lower():
                    raise
                raise GradientError(str(error)) from error  # of a number or shape that JAX refuses
            outputs = labelled("y", list(map(np.asarray, again)))
            expect_equal(outputs, labelled("y", y), "the forward rule does not return the same values as the function")
            return {n: np.conj(gradients[n]) for n in self.variables if n in gradients}

    def as_jax(self, x: Any) -> Any:
        """A copy of an array as one of JAX: the check writes to NumPy's."""
        return self.jax.numpy.array(x) if isinstance(x, np.ndarray) else x

    def _types(self, arrays: dict[str, Any]) -> AbstractContextManager:
        """Enables float64 if one of the arrays needs it."""
        jax = self.jax
        if not any(x.dtype in (np.float64, np.complex128) for x in arrays.values()):
            return nullcontext()
        return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


class _JaxSecondOrder(_JaxPair):
    """The gradients of a function as a function of dy and its arrays."""

    option = "order=2"

    def __init__(self, function: Callable, arrays: tuple, options: dict[str, Any]) -> None:
        super().__init__(function, arrays, options)
        self.differentiate()
        self.shapes |= {n: u.shape for n, u in self.upstream.items()}

    def results(self, arrays: dict[str, Any]) -> list:
        if not self.upstream:
            return super().results(arrays)
        names = [n for n in self.variables if n not in self.upstream]
        _, gradients = self._pulled(super().results, names, arrays, [arrays[n] for n in self.upstream])
        return list(gradients.values())
