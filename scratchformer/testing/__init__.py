"""Gradient checks for operations and layers, this package's and your own.

`check_gradients(op, op_backward, *args)` and `check_layer(layer, *inputs)` raise GradientError or return a Report.
Two more modules are imported separately: `scratchformer.testing.strategies` draws shapes and arrays with Hypothesis,
and `scratchformer.testing.strict` is a stand-in for device arrays that refuses to mix with NumPy arrays.
"""

from .contracts import GradientError
from .gradcheck import Report, check_gradients, check_layer
from .precision import check_precision

__all__ = ["GradientError", "Report", "check_gradients", "check_layer", "check_precision"]
