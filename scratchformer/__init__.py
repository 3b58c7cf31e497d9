"""Transformers from scratch on NumPy and CuPy: every gradient derived and written by hand.

    import scratchformer as sf

The public names are those in `__all__` here, and in the `__all__` of each of these modules:

    sf.ops          the operations, each with its backward
    sf.nn           layers that own parameters
    sf.models       the models
    sf.data         corpora, vocabularies and batches
    sf.optim        optimizers, schedules and clipping
    sf.training     the loop, replicas, snapshots, evaluation
    sf.generation   sampling, beam search and the key-value caches
    sf.testing      gradient checks for your own operations and layers

There are also keys for random numbers, devices, `reference_only` and `fast`, `compile`, which makes fast loops of a
derivation, and `check`, which checks the gradients of code in any library that it knows. One import is enough for all
of these. `scratchformer.dispatch` has the decorators that make an operation of two functions of your own.
"""

from .shell import starting  # first  # isort: skip  # noqa: F401

from importlib.util import find_spec

from . import data, generation, models, nn, ops, optim, testing, training
from .backend import CPU, Device, DeviceError, get_device, to_cpu, to_device
from .compiler import CompileError, compile
from .dispatch import fast, reference_only
from .rng import Key
from .testing import check
from .version import __version__ as __version__

testing.known.learn_from(f"{__name__}.catalogue")

if find_spec(f"{__name__}.kernels"):  # fast twins; without that folder everything runs, slower
    from . import fast_twins as fast_twins

__all__ = [
    "CPU",
    "CompileError",
    "Device",
    "DeviceError",
    "Key",
    "check",
    "compile",
    "data",
    "fast",
    "generation",
    "get_device",
    "models",
    "nn",
    "ops",
    "optim",
    "reference_only",
    "testing",
    "to_cpu",
    "to_device",
    "training",
]
