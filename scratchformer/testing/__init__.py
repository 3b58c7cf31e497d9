"""Gradient checks for operations and layers, this package's and your own.

`check_gradients(op, op_backward, *args)` and `check_layer(layer, *inputs)` raise GradientError or return a Report.
`check_drawn(op, op_backward, "B T C")` draws the arrays itself, of several kinds. `check_torch` and `check_jax` check
functions of PyTorch and JAX, and `check` also objects with a forward and a backward. `check_precision` checks float16,
bfloat16 or float32, and `diagnose` says what a wrong gradient looks like.

Other modules are imported separately: `strategies` draws shapes and arrays with Hypothesis; `strict` is a stand-in for
device arrays that refuses to mix with NumPy arrays; `shrink` and `paste` make small counterexamples; `known` takes
known mistakes; `mutate` plants mistakes in a backward and runs your tests.
"""

from .adapters import check_jax, check_torch
from .contracts import Diagnosis, GradientError
from .drawn import check_drawn
from .gradcheck import Report, check_gradients, check_layer, diagnose
from .libraries import check
from .precision import check_precision

__all__ = [
    "Diagnosis",
    "GradientError",
    "Report",
    "check",
    "check_drawn",
    "check_gradients",
    "check_jax",
    "check_layer",
    "check_precision",
    "check_torch",
    "diagnose",
]
