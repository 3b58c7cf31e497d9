"""Transformers from scratch on NumPy and CuPy: every gradient derived and written by hand."""

from importlib.util import find_spec

from . import generation, models, nn, ops, optim
from .backend import CPU, Device, DeviceError, get_device, to_cpu, to_device
from .dispatch import reference_only
from .rng import Key

if find_spec(f"{__name__}.kernels"):  # fast twins; without that folder everything runs, slower
    from . import kernels as kernels

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
