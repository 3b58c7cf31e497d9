"""Optimizers over flat arrays, with groups of parameters; learning-rate schedules; clipping."""

from .adam import Adam, AdamW
from .muon import Muon, newton_schulz
from .optimizer import Group, clip_by_global_norm
from .schedules import Constant, Cosine, InverseSquareRoot
from .sgd import SGD

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Constant",
    "Cosine",
    "Group",
    "InverseSquareRoot",
    "Muon",
    "clip_by_global_norm",
    "newton_schulz",
]
