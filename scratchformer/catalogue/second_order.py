"""Backwards as operations, with a backward of their own: those of `ops.second_order`."""

from __future__ import annotations

import inspect
from collections import namedtuple
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from .. import ops
from ..backend import Array
from ..notation.run import getdoc
from ..ops import second_order
from ..testing.draw import Draw, Sizes
from ..testing.runs import backward_operation
from .attention import allowed, attention, causal, derived_attention
from .entry import SAME_SHAPE, Arguments, DerivationCase, OperationCase, OperationEntry, normal
from .norms import wide


class BackwardEntry(OperationEntry):
    """What is known of the backward of an operation, whose cases give the arguments of the operation itself.

    added: whether the operation's last argument is only added, so that no gradient depends on it.
    """

    def __init__(
        self, operation: str, names: Callable[..., dict[str, Any]] = lambda *args: {}, added: bool = False
    ) -> None:
        tests = "tests/ops/test_second_order.py"
        super().__init__(f"{operation}_backward", names, file="ops/second_order.py", tests=tests)
        self.added = added
        self.forward, self.backward = (getattr(ops, name).reference for name in (operation, self.name))
        self.second = getattr(second_order, f"{self.name}_backward")

    def gradient_case(self, case: Callable[[Draw], Arguments], d: Draw) -> OperationCase:
        args, options = case(d)
        return OperationCase(self.forward, self.backward, (self.second, *args), {**options, "order": 2})

    def derivation_case(self, case: Callable[[Sizes], Arguments], d: Sizes) -> DerivationCase:
        """The arguments are gy and those of the operation, the gradients are called gx, gw, ..."""
        args, _ = case(d)
        parameters = list(inspect.signature(self.forward).parameters.values())
        names = [p.name for p, x in zip(parameters, args, strict=False) if isinstance(x, np.ndarray)]
        several = namedtuple("Gradients", [f"g{n}" for n in names])  # type: ignore[misc] # the names are not literal
        gradients = backward_operation(self.forward, self.backward, names)
        varied = len(args) - self.added

        def operation(gy: Array, *given: Any) -> tuple[Any, Any]:
            returned, cache = gradients(gy, *given, *args[varied:])
            return several(*returned) if len(names) > 1 else returned, cache

        @wraps(self.second)
        def operation_backward(dgradients: Any, cache: Any) -> Any:
            returned = self.second(dgradients, cache)
            return returned[: 1 + varied] if self.added else returned

        gy = inspect.Parameter("gy", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        operation.__signature__ = inspect.Signature([gy, *parameters[:varied], *parameters[len(args) :]])  # type: ignore[attr-defined]
        given = (d.generator.standard_normal(self.forward(*args)[0].shape), *args[:varied])
        return DerivationCase(operation, operation_backward, given, self.names(*args), docstring=getdoc(self.second))


ENTRIES = [
    BackwardEntry("linear", added=True).case("", normal("B T I", "I O", "O")).case("no bias", normal("B T I", "I O")),
    BackwardEntry("softmax")
    .case("", normal("B T V"))
    .mistake(
        "The probabilities are taken as constants",
        "The second derivatives by z are all 0: a Hessian-vector product lacks the curvature of the softmax.",
        replace={"    dz = softmax_backward(dp, p)\n    return": "    dz = 0 * dp\n    return"},
        tests="tests/ops/test_second_order.py -k softmax",
    ),
    BackwardEntry("layernorm", added=True)
    .case("", normal("B T C", "C", "C"))
    .derivation("", wide)
    .mistake(
        "σ is taken as a constant",
        "x changes σ, and with it the size of the first gradient. Of a row that is normalised, every gradient lacks a "
        "part along x̂.",
        replace={
            "    dx = project(dxhat) - rstd * xhat * xp.mean(dgx * gx, axis=-1, keepdims=True)\n    dgy, dx": (
                "    dx = project(dxhat)\n    dgy, dx"
            )
        },
        tests="tests/ops/test_second_order.py -k layernorm",
    ),
    BackwardEntry("attention", names=allowed)
    .case("", attention)
    .case("causal", attention, pattern=causal, keys="T")
    .case("grouped", attention, group=3)
    .derivation("", derived_attention)
    .derivation("causal", derived_attention, pattern=causal)
    .mistake(
        "The probabilities are taken as constants in gv",
        "gv is a sum of dy with the probabilities as weights, which are functions of q and k. Without this term the "
        "directions of v change no gradient of q and k.",
        replace={"    dp += gy @ xp.matrix_transpose(dgv)\n    da": "    da"},
        tests="tests/ops/test_second_order.py -k attention",
    )
    .survivors(
        "attention_backward_backward",
        {
            "xp, dtype, shape, shape_of_keys = array_module(q), q.dtype, q.shape, k.shape -> "
            "xp, dtype, shape, shape_of_keys = array_module(q), q.dtype, q.shape, v.shape": SAME_SHAPE,
        },
    ),
]
