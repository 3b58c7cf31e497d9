"""A small language model for the generation tests."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scratchformer.backend import CPU, Device
from scratchformer.models import LanguageModel
from scratchformer.rng import Key


@pytest.fixture(scope="session")
def make_model() -> Callable[..., LanguageModel]:
    """make_model(device=CPU, dtype=float32, vocab_size=31, context=12, **options): two blocks of width 12."""

    def make(
        device: Device = CPU, dtype: type = np.float32, vocab_size: int = 31, context: int = 12, **options: Any
    ) -> LanguageModel:
        model = LanguageModel(vocab_size, 12, 3, 2, context, key=Key(0), **options)
        model.output.w.data *= 4  # so that the most likely tokens stand out
        return model.to(device, dtype)

    return make
