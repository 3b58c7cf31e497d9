"""Gradient checks for operations and layers, this package's and your own.

`check_gradients(op, op_backward, *args)` and `check_layer(layer, *inputs)` raise GradientError or return a Report.
Two more modules are imported separately: `scratchformer.testing.strategies` draws shapes and arrays with Hypothesis,
and `scratchformer.testing.strict` is a stand-in for device arrays that refuses to mix with NumPy arrays.
"""

from .adapters import check_jax, check_torch
from .contracts import GradientError
from .diagnosis import Diagnosis, diagnose
from .gradcheck import Report, check_gradients, check_layer
from .precision import check_precision

__all__ = [
    "Diagnosis",
    "GradientError",
    "Report",
    "check_gradients",
    "check_jax",
    "check_layer",
    "check_precision",
    "check_torch",
    "diagnose",
]
