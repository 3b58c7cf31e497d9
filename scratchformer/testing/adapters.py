"""Gradient checks for functions of PyTorch and JAX, by the contract of `check_gradients` and with its messages.

    print(check_torch(Cube, torch.randn(2, 3)))  # an autograd.Function, a module, or any function of tensors
    print(check_jax(jax.nn.gelu, jnp.ones((2, 3))))

The function becomes a pair of NumPy functions: the forward calls it, and the backward asks the library's autograd. So
every rule of `check_gradients` applies, with one exception: a result may be a view of an argument, and a gradient may
be dy itself, as in `check_layer`. PyTorch keeps track of views, and an array of JAX cannot be written to.

Neither library is imported before it is needed.
"""

from __future__ import annotations

import functools
import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from ..backend import Device
from .contracts import GradientError, Untouched, as_tuple, expect_equal, is_array, is_floating, labelled, repeatable
from .gradcheck import Report, check_gradients
from .layouts import spread
from .runs import argument_names, name_of


@repeatable
def check_torch(function: Callable, *tensors: Any, device: Device | None = None, **options: Any) -> Report:
    """Check the gradients that PyTorch's autograd gives for `function(*tensors)`.

    `function` is any differentiable function of tensors, a subclass of `torch.autograd.Function` (or its `apply`), or
    an `nn.Module`, whose parameters are checked too, by name. Arguments and results are tensors, or lists, tuples and
    dicts of them. Results without a gradient (integers, or detached ones while others have a gradient) are left out.

    Checked are the floating-point tensors that require a gradient, or all of them if none does, and the parameters that
    require one. They are copied as float64, and again as float32 to check the types. What you pass does not change: a
    module runs with copies of its parameters and buffers. Random numbers start from `seed` before each forward, so that
    dropout always draws the same mask.

    The function runs on the device of the first tensor or parameter, or on `device`. `options` are those of
    `check_gradients` (`seed`, `rtol`, `max_elements`, ...) and keyword arguments of the function.

    Returns a Report. Raises GradientError and ValueError as `check_gradients` does, TypeError if the function accepts
    only one of float64 and float32, and ImportError if PyTorch is not installed.
    """
    _expect_installed("torch", "PyTorch")
    return _TorchPair(function, tensors, device, options.get("seed", 0)).check("check_torch", options)


@repeatable
def check_jax(function: Callable, *arrays: Any, **options: Any) -> Report:
    """Check the gradients that JAX gives for `function(*arrays)`: a `custom_vjp`, or any differentiable function.

    Arguments and results are arrays or pytrees of arrays. All floating-point arrays among the arguments are checked,
    under names such as `params['w']`; everything else is passed on. Results that are not floating-point are left out.

    float64 is enabled during the check only; `jax.config` stays as it is. The types are checked in float32, with your
    own configuration. The function must return the same as the forward rule of its `custom_vjp`. A large function is
    checked faster as `jax.jit(function)`.

    `options` are those of `check_gradients`, except `device`, and keyword arguments of the function.

    Returns a Report. Raises GradientError and ValueError as `check_gradients` does, TypeError if the function accepts
    only one of float64 and float32, and ImportError if JAX is not installed.
    """
    _expect_installed("jax", "JAX")
    if "device" in options:
        raise ValueError("device: not an option of check_jax; choose JAX's device with jax.default_device(...)")
    return _JaxPair(function, arrays).check("check_jax", options)


def _expect_installed(name: str, title: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{title} is not installed; install it with: pip install 'scratchformer[{name}]'") from error


class _Pair(ABC):
    """A function of another library as an operation and its backward, on NumPy arrays."""

    cut: str  # what can keep autograd from reaching an argument

    def __init__(self, function: Callable, name: str, forward: Callable, args: tuple, tree: Any) -> None:
        self.function, self.name, self.tree = function, name, tree
        paths, self.structure = tree.tree_flatten_with_path(args)
        top = argument_names(forward, args)
        self.leaves = {top[path[0].idx] + tree.keystr(path[1:]): leaf for path, leaf in paths}
        self.variables = {n: x for n, x in self.leaves.items() if isinstance(self.to_numpy(x), np.ndarray)}
        self.constants: dict[str, Any] = {}  # floating-point arrays without a gradient

    def check(self, checker: str, options: dict[str, Any]) -> Report:
        """check_gradients of the pair; its messages name the function, the arguments and `checker`."""
        keys = {f"constant {n}": n for n in self.constants}  # they are keyword arguments, which get no gradient
        reached: set[str] = set()  # the arguments whose gradient is not always zero

        def op(*arrays: Any, **kwargs: Any) -> tuple[Any, Any]:
            given = dict(zip(self.variables, arrays, strict=True))
            given |= {n: kwargs.pop(key) for key, n in keys.items()}
            return self._forward(given, kwargs)

        def op_backward(dy: Any, cache: Any) -> tuple:
            gradients = self.gradients(as_tuple(dy), cache)
            reached.update(n for n, g in gradients.items() if g.any())
            return tuple(gradients.values())

        op.__name__, op_backward.__name__ = self.name, f"the backward of {self.name}"
        op.argument_names = list(self.variables)  # type: ignore[attr-defined]
        options = {n: self.to_numpy(x) for n, x in options.items()}
        options |= {key: self.to_numpy(self.constants[n]) for key, n in keys.items()}
        try:
            return check_gradients(op, op_backward, *map(self.to_numpy, self.variables.values()), **options)
        except GradientError as error:
            message, repeat, call = str(error).rpartition("\nRepeat with")
            for n in self.variables:
                if n not in reached and re.search(rf"wrong gradient at {re.escape(n)}[\[: ]", message):
                    message += f"\n  no gradient reaches {n}: look for {self.cut}"
            call = call.replace(f"check_gradients({self.name}, {op_backward.__name__}", f"{checker}({self.name}")
            error.args = (message + repeat + call,)
            raise

    def _forward(self, arrays: dict[str, Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """`forward`, with a clear error if it accepts only one of float64 and float32.

        Empty arrays may be refused with any error.
        """
        try:
            return self.forward(arrays, kwargs)
        except GradientError:
            raise
        except Exception as error:
            if type(error).__name__ == "LinAlgError":
                raise np.linalg.LinAlgError(str(error)) from error  # PyTorch has its own
            if not all(x.size for x in arrays.values()):
                raise ValueError(str(error)) from error  # which PyTorch raises as RuntimeError
            dtype = next(x.dtype for x in arrays.values() if is_floating(x))
            other = np.dtype(np.float32 if dtype == np.float64 else np.float64)
            try:
                self.forward({n: x.astype(other) if is_floating(x) else x for n, x in arrays.items()}, kwargs)
            except Exception:
                raise error from None
            said = str(error).partition("\n")[0] or type(error).__name__
            raise TypeError(f"{self.name} accepts {other} but not {dtype}: {said}") from error

    def arguments(self, arrays: dict[str, Any]) -> tuple:
        """The positional arguments of the function, with `arrays` in their places."""
        return self.structure.unflatten([arrays.get(n, x) for n, x in self.leaves.items()])

    @abstractmethod
    def to_numpy(self, x: Any) -> Any:
        """An array as a NumPy array, of float64 if it is floating-point; anything else is returned unchanged."""

    @abstractmethod
    def forward(self, arrays: dict[str, Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """y and a cache."""

    @abstractmethod
    def gradients(self, dy: tuple, cache: Any) -> dict[str, np.ndarray]:
        """The gradients of the floating-point arguments, by name."""


class _TorchPair(_Pair):
    cut = "detach(), .data, .item(), no_grad() or NumPy"

    def __init__(self, function: Any, tensors: tuple, device: Device | None, seed: int) -> None:
        import torch
        from torch.utils import _pytree

        self.torch, self.seed = torch, seed
        self.module: Any = function if isinstance(function, torch.nn.Module) else None
        forward = self.module.forward if self.module else function
        name = type(function).__name__ if self.module else name_of(function)
        kind = function if isinstance(function, type) else getattr(function, "__self__", None)
        if isinstance(kind, type) and issubclass(kind, torch.autograd.Function):
            rule: Any = kind
            function, name, forward = rule.apply, rule.__name__, rule.forward
            if rule.setup_context is torch.autograd.Function.setup_context:
                forward = functools.partial(forward, None)  # without ctx
        super().__init__(function, name, forward, tensors, _pytree)
        self._add_parameters()
        located = [x for x in self.variables.values() if isinstance(x, torch.Tensor)]
        self.device = located[0].device if located else torch.device("cpu")
        if device is not None:
            self.device = torch.device("cpu" if device.index is None else f"cuda:{device.index}")

    def _add_parameters(self) -> None:
        """Separate variables from constants, and add the module's parameters to them."""
        parameters = dict(self.module.named_parameters()) if self.module else {}
        renamed = {n: f"input {n}" if n in parameters else n for n in self.leaves}
        self.leaves = {renamed[n]: x for n, x in self.leaves.items()}
        inputs = {renamed[n]: x for n, x in self.variables.items()}
        floating = {n: x for n, x in inputs.items() if is_floating(self.to_numpy(x))}
        marked = {n for n, x in floating.items() if getattr(x, "requires_grad", False)}
        self.constants = {n: x for n, x in floating.items() if marked and n not in marked}
        self.constants |= {n: p for n, p in parameters.items() if not p.requires_grad}
        self.variables = {n: x for n, x in (inputs | parameters).items() if n not in self.constants}
        self.parameters = {n: tuple(p.shape) for n, p in parameters.items()}

    def to_numpy(self, x: Any) -> Any:
        if not isinstance(x, self.torch.Tensor):
            return x
        x = x.detach().cpu()
        if x.is_complex():
            raise TypeError(f"{self.name}: expected real tensors, got {x.dtype}; check it on torch.view_as_real(x)")
        return (x.double() if x.is_floating_point() else x).numpy()

    def forward(self, arrays: dict[str, Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        torch = self.torch
        for n in self.parameters:  # `check_empty` tries fewer rows, and with those an LSTM reads beyond its memory
            if arrays[n].shape != self.parameters[n]:
                raise ValueError(f"{n}: expected shape {self.parameters[n]}, got {arrays[n].shape}")
        tensors = {n: self.tensor(x) for n, x in arrays.items()}
        tensors |= {n: tensors[n].contiguous() for n in self.parameters}  # a module chooses their layout
        inexact = {n: t for n, t in tensors.items() if t.is_floating_point() or t.is_complex()}
        leaves = {n: t.requires_grad_() for n, t in inexact.items() if n in self.variables}
        run = functools.partial(self.run, arrays, tensors, {n: self.tensor(x) for n, x in kwargs.items()})
        try:
            with torch.enable_grad():
                results = run()
        except RuntimeError as error:
            if "leaf Variable" not in str(error):
                raise
            untouched = Untouched(arrays)  # find the argument that PyTorch does not let it write to
            with torch.no_grad():
                run()
            untouched.check("forward")
            raise
        outputs = [t for t in results if t.requires_grad]
        if not outputs:
            names = ", ".join(leaves)
            raise GradientError(f"y does not depend on {names} through torch's autograd: look for {self.cut}")
        if any(t.is_complex() for t in outputs) and not any(t.is_complex() for t in leaves.values()):
            raise TypeError(f"{self.name}: expected a real result, got a complex one; return torch.view_as_real(y)")
        tracked = [t.clone() if t._is_view() or t.is_leaf else t for t in outputs]  # autograd keeps track of views
        y = tuple(t.detach().cpu().numpy() for t in tracked)
        return y if len(y) > 1 else y[0], (outputs, leaves)

    def run(self, arrays: dict[str, Any], tensors: dict[str, Any], kwargs: dict[str, Any]) -> list:
        """The tensors that the function returns. What it writes to its arguments is written to `arrays` too."""
        torch, args = self.torch, self.arguments(tensors)
        with self._random_numbers():
            if self.module:
                state = {n: tensors[n] for n in self.parameters} | self._buffers(tensors)
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

    def _as_numpy(self, gradients: tuple, given: list) -> Iterator[np.ndarray]:
        """The gradients as NumPy arrays; those that are dy, or each other, are copied: autograd allows it."""
        seen = {t.untyped_storage().data_ptr() for t in given}
        for g in gradients:
            g = g.detach().to_dense().cpu() if g.is_sparse else g.detach().cpu()
            pointer = g.untyped_storage().data_ptr()
            yield g.numpy().copy() if pointer in seen else g.numpy()
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


class _JaxPair(_Pair):
    cut = "stop_gradient, or a rule that gives zeros"

    def __init__(self, function: Callable, arrays: tuple) -> None:
        import jax

        self.jax = jax
        super().__init__(function, name_of(function), function, arrays, jax.tree_util)

    def to_numpy(self, x: Any) -> Any:
        dtypes = self.jax.numpy
        if not is_array(x):
            return x
        if dtypes.issubdtype(x.dtype, dtypes.complexfloating):
            raise TypeError(f"{self.name}: expected real arrays, got {x.dtype}")
        if dtypes.issubdtype(x.dtype, dtypes.floating):
            return np.asarray(x).astype(np.float64)
        if dtypes.issubdtype(x.dtype, dtypes.integer) or x.dtype == bool:
            return np.asarray(x)
        return x

    def forward(self, arrays: dict[str, Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        with self._types(arrays):
            given = {n: self.as_jax(x) for n, x in arrays.items()}
            kwargs = {n: self.as_jax(x) for n, x in kwargs.items()}
            results = self.results(given, kwargs)
            if not results:
                raise TypeError(f"{self.name}: expected a floating-point result")
            y = tuple(np.array(x) for x in results)
        return y if len(y) > 1 else y[0], (given, kwargs, y)

    def results(self, arrays: dict[str, Any], kwargs: dict[str, Any]) -> list:
        """The floating-point arrays that the function returns."""
        dtypes = self.jax.numpy
        leaves = self.jax.tree_util.tree_leaves(self.function(*self.arguments(arrays), **kwargs))
        return [x for x in leaves if is_array(x) and dtypes.issubdtype(x.dtype, dtypes.inexact)]

    def gradients(self, dy: tuple, cache: Any) -> dict[str, np.ndarray]:
        given, kwargs, y = cache
        with self._types(given):
            variables = {n: x for n, x in given.items() if is_floating(x)}
            try:
                again, pull = self.jax.vjp(lambda moved: self.results(given | moved, kwargs), variables)
                (gradients,) = pull([self.as_jax(u.astype(x.dtype)) for u, x in zip(dy, again, strict=True)])
            except (TypeError, ValueError) as error:
                if "vjp" not in str(error).lower():
                    raise
                raise GradientError(str(error)) from error  # of a number or shape that JAX refuses
            outputs = labelled("y", map(np.asarray, again))
            expect_equal(outputs, labelled("y", y), "the forward rule does not return the same values as the function")
            return {n: np.array(gradients[n]) for n in variables}

    def as_jax(self, x: Any) -> Any:
        """A copy of an array as one of JAX: the check writes to NumPy's."""
        return self.jax.numpy.array(x) if isinstance(x, np.ndarray) else x

    def _types(self, arrays: dict[str, Any]) -> AbstractContextManager:
        """Enables float64 if one of the arrays needs it."""
        jax = self.jax
        if not any(x.dtype in (np.float64, np.complex128) for x in arrays.values()):
            return nullcontext()
        return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()
