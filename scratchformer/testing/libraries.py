"""Gradient checks for whatever has gradients: `check` finds out what it is given, and how to check it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from .adapters import check_jax, check_torch, is_leaf
from .contracts import mapped
from .gradcheck import check_layer
from .objects import ObjectPair
from .runs import name_of


def check(function: Any, *args: Any, **options: Any) -> Any:
    """Check the gradients of `function(*args)`, whatever library it is written in; without `args`, at its first call.

        check(function, *args)  # a function of tensors of PyTorch, or of arrays of JAX

        @check  # the first Cube.apply(...) checks it, with the arguments of that call
        class Cube(torch.autograd.Function): ...

    What is checked depends on what `function` and `args` are:

    - of PyTorch and JAX: see `check_torch` and `check_jax`;
    - an `nn.Layer`: see `check_layer`;
    - any other object with `forward` and `backward`, and NumPy arrays: see `ObjectPair`. Its parameters are those named
      in the option `gradients`, as in `check(layer, x, gradients={"W": "dW"})`.

    As a decorator it accepts a function, or a class with `apply` or `forward`, and as `partial(check, order=2)` has
    options. A first call whose gradients are wrong raises the error, and is checked again the next time; a call inside
    a transformation such as `jit`, `grad` or `vmap` is not checked. `options` are those of `check_gradients` and
    keyword arguments of the function, as in `check_torch`.

    Returns a Report, or the decorated function. Raises GradientError and ValueError as `check_gradients` does, and
    TypeError if there is nothing here that it knows.
    """
    kind: Any = function
    made = not isinstance(kind, type) and any(hasattr(kind, name) for name in ("backward", "parameters"))
    if args or (made and options):
        return _checker(function, args)(function, *args, **options)
    if made or not callable(function):
        raise TypeError(f"check: expected arguments for {name_of(function)}, or a function or class to decorate")
    if not isinstance(function, type):
        return _checked_once(function, functools.partial(check, function, **options))
    if "torch" in _libraries([kind]) and hasattr(kind, "setup_context"):
        kind.apply = staticmethod(_checked_once(kind.apply, functools.partial(check, kind, **options)))
    else:
        kind.forward = _checked_once(kind.forward, functools.partial(check, **options))
    return kind


def _checked_once(call: Callable, checker: Callable) -> Callable:
    """`call`, which at its first call also checks its gradients: the first with arrays whose numbers are known."""
    begun = False

    @functools.wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        nonlocal begun
        if not begun and not any(map(_is_traced, _leaves(args))):
            begun = True
            try:
                checker(*args, **kwargs)
            except BaseException:
                begun = False
                raise
        return call(*args, **kwargs)

    return checked


def _is_traced(x: Any) -> bool:
    """Whether `x` stands for arrays inside a transformation, such as jit, grad or vmap."""
    jax, torch = sys.modules.get("jax"), sys.modules.get("torch")
    return bool(
        (jax and isinstance(x, jax.core.Tracer))
        or (torch and isinstance(x, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x))
    )


def _checker(function: Any, args: tuple) -> Callable:
    parts = [function, *_leaves(args)]
    libraries = _libraries(parts)
    for name, checker in {"torch": check_torch, "jax": check_jax, "jaxlib": check_jax}.items():
        if name in libraries:
            return checker
    if hasattr(function, "named_parameters"):
        return check_layer
    if hasattr(function, "backward"):
        return lambda layer, *inputs, **options: ObjectPair(layer, inputs, options).check("check")
    got = ", ".join(type(x).__name__ for x in parts[1:])
    raise TypeError(
        "check: expected tensors of PyTorch, arrays of JAX, or an object with forward and backward, got "
        f"{name_of(function)} with {got or 'no arguments'}; for a pair of NumPy functions there is "
        "check_gradients(op, op_backward, ...)"
    )


def _leaves(args: tuple) -> list:
    """What is in `args`, and in the tuples, lists and dicts there."""
    leaves: list = []
    mapped(lambda _, x: leaves.append(x), "", args, is_leaf)
    return leaves


def _libraries(parts: Iterable[Any]) -> set[str]:
    """The names of the packages that define the types of `parts`, or types that these inherit from."""
    types = {kind for x in parts for kind in (x if isinstance(x, type) else type(x)).__mro__}
    return {kind.__module__.partition(".")[0] for kind in types}
