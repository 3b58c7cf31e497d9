"""Helpers of the optimizer tests."""

from collections.abc import Callable

import numpy as np
import pytest

from scratchformer.backend import CPU, Device, array_module, to_device
from scratchformer.nn import Param
from scratchformer.rng import Key


@pytest.fixture(scope="session")
def make_params() -> Callable[..., list[Param]]:
    """make_params((3, 4), (5,), seed=0, device=CPU, dtype=float32): normal parameters of these shapes."""

    def make(*shapes: tuple[int, ...], seed: int = 0, device: Device = CPU, dtype: type = np.float32) -> list[Param]:
        draw = Key(seed).fold("parameters").generator()
        arrays = [draw.standard_normal(shape).astype(dtype) for shape in shapes]
        return [Param(to_device(array, device), f"p{i}") for i, array in enumerate(arrays)]

    return make


@pytest.fixture(scope="session")
def set_gradients() -> Callable[..., None]:
    """set_gradients(params, step): normal gradients that depend on the step alone."""

    def set_(params: list[Param], step: int) -> None:
        for i, p in enumerate(params):
            gradient = Key(step).fold("gradient", i).generator().standard_normal(p.data.shape)
            p.grad[...] = array_module(p.data).asarray(gradient.astype(p.data.dtype))

    return set_
