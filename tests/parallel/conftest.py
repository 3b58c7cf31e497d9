"""The tiny models and data of the training tests."""

from ..training.conftest import make_batches, make_model, reviews, text, train_tiny  # noqa: F401
