"""The pictures of the site, as SVG text."""

from layer_pictures import layer_picture
from operation_pictures import operation_picture
from step_curves import step_curve

__all__ = ["layer_picture", "operation_picture", "step_curve"]
