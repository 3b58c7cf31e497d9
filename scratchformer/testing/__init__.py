"""Gradient checks for operations and layers, for those of this package and for your own.

`check_gradients(op, op_backward, *args)` and `check_layer(layer, *inputs)` raise GradientError or return a Report.
Two modules are imported when needed: `scratchformer.testing.strategies` draws shapes and arrays with Hypothesis, and
`scratchformer.testing.strict` is a stand-in for a device's arrays that refuses to mix with NumPy's.
"""

from .contracts import GradientError
from .gradcheck import Report, check_gradients, check_layer

__all__ = ["GradientError", "Report", "check_gradients", "check_layer"]
