"""Derivations compiled into loops: the equations of a docstring, written once, are what runs.

A derivation goes through these modules, from the text to loops that run:

- `equations` reads the docstring and chooses the form in which each name is computed.
- `trees` turns each form into what a loop computes for one element.
- `plan` arranges these elements in passes over a row. Its heading says what a plan is. `axes` changes the axes of a
  plan, and `derivation` makes the plans of a forward and its backward.
- `numba_code`, `cuda_code` and `javascript_code` print a plan as source. `printer` is what they share.
- `numba_target` and `cuda_target` run the source on arrays; `python_target` runs it without Numba, for comparisons.
  `twins` calls the loops in place of an operation, and `in_place` does so for operations that change arrays in place,
  such as the step of an optimizer, and `cuda_pieces` on a GPU for many parts of arrays together.
- `javascript_arrays` is for a page: each name of a derivation is an array with loops of its own, products too.

`pairs` compiles a user's functions, and `show` prints the loops for a reader.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .errors import CompileError

if TYPE_CHECKING:
    from .twins import Target

__all__ = ["CompileError", "add_all", "compile"]


def compile(op: Callable, op_backward: Callable, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """An operation and its backward as a pair that runs compiled loops, made from the derivation in op's docstring.

    op, op_backward: functions as in `check_derivation`, or already decorated with `@operation` and `@backward`, which
    then get the loops themselves. The backward has the name of op and "_backward". Returns the pair. Inside `fast()`,
    calls with NumPy arrays run loops that Numba compiles, and calls with CuPy arrays run loops for the GPU, if there is
    one. Arguments that the loops do not take, such as empty arrays or arrays of several types, go to the functions as
    before, and so do all calls outside `fast()`.

        swish, swish_backward = scratchformer.compile(swish, swish_backward)
        with scratchformer.fast():
            y, cache = swish(x)
            dx = swish_backward(dy, cache)

    The loops compute what the equations say, not what the functions do. So both are compared here, with the functions,
    on arguments that are drawn: of several sizes and scales, with each option, other numbers than by default, means of
    ±1,000 in float32. args, kwargs: an example of arguments to compare too, for functions that refuse all that
    are drawn. The loops do not check arguments as the functions may: `@operation(given=check)` names a function that
    does.

    Raises DerivationError if a result or a gradient differs; `check_derivation` then says which equation is wrong.
    Raises CompileError, with the line of the docstring, for what cannot be compiled or compared; ImportError without
    the extra `fast`, unless there is a GPU; TypeError for anything but functions.
    """
    from .pairs import compiled

    return compiled(op, op_backward, args, kwargs)


def add_all(target: Target) -> None:
    """Register the twins of all operations of `ops`, and of those in `in_place`, for the arrays of a target."""
    from .. import ops
    from .in_place import IN_PLACE, add_in_place
    from .twins import add_twins

    for name in ops.__all__:
        op: Any = getattr(ops, name)
        op_backward = getattr(ops, f"{name}_backward", None)
        if hasattr(op, "reference") and op_backward is not None:
            add_twins(op, op_backward, target)
    for op in IN_PLACE:
        add_in_place(op, target)
