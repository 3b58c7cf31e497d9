"""Optimizers over flat arrays, learning-rate schedules, and clipping."""

from .adam import Adam, AdamW
from .clip import clip_by_global_norm
from .schedules import Constant, Cosine, InverseSquareRoot
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Constant", "Cosine", "InverseSquareRoot", "clip_by_global_norm"]
