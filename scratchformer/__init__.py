"""Transformers from scratch on NumPy and CuPy: every gradient derived and written by hand."""

from . import generation, models, nn, ops, optim
from .backend import CPU, Device, DeviceError, get_device, to_cpu, to_device
from .dispatch import reference_only
from .rng import Key

__version__ = "0.1.0"

__all__ = [
    "CPU",
    "Device",
    "DeviceError",
    "Key",
    "generation",
    "get_device",
    "models",
    "nn",
    "ops",
    "optim",
    "reference_only",
    "to_cpu",
    "to_device",
]
