"""Fixtures and Hypothesis profiles for all tests."""

import itertools
import os
import random

if "PYTEST_XDIST_WORKER" in os.environ:  # tests run on every core, so BLAS, loaded below, gets one thread
    os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import Phase, settings

from scratchformer.backend import CPU, Device, DeviceError, get_device
from scratchformer.testing.diagnosis import without_diagnosis
from scratchformer.testing.strict import STRICT

settings.register_profile("default", deadline=None, max_examples=25, print_blob=True)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=500)
settings.register_profile("unshrunk", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))


@pytest.fixture(autouse=True)
def quick_failures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checks that fail do not say why, except in the tests of what they say: that takes a second each time."""
    with nullcontext() if request.node.get_closest_marker("diagnosis") else without_diagnosis():
        yield


@pytest.fixture(scope="session")
def thorough() -> bool:
    """Whether HYPOTHESIS_PROFILE=thorough: every combination, every element, however long it takes."""
    return settings.get_current_profile_name() == "thorough"


@pytest.fixture
def combinations(request: pytest.FixtureRequest, thorough: bool) -> Callable[..., Iterator[dict[str, Any]]]:
    """combinations(2, scale=SCALES, small=[False, True]) gives two dicts: a scale, a value of small, and a seed.

    The draws depend on the name of the test alone, so they are the same in every run, and differ from case to case. No
    value comes twice before each has come once. `thorough` gives the whole product, and at least five times as many.
    Each dict is printed; when a test fails, pytest shows them, and the last is the one that failed.
    """

    def draw(count: int, **values: Sequence[Any]) -> Iterator[dict[str, Any]]:
        rng = random.Random(request.node.nodeid)
        if thorough:
            product = list(itertools.product(*values.values()))
            rows = itertools.islice(itertools.cycle(product), max(len(product), 5 * count))
        else:
            orders = [itertools.cycle(rng.sample(kind, len(kind))) for kind in map(list, values.values())]
            rows = ([next(order) for order in orders] for _ in range(count))
        for row in rows:
            drawn = {"seed": rng.randrange(2**32), **dict(zip(values, row, strict=True))}
            print(drawn)
            yield drawn

    return draw


def _devices() -> dict[str, Device]:
    """Every backend: NumPy, the strict stand-in for a device, and CuPy where there is a GPU."""
    devices = {"numpy": CPU, "strict": STRICT}
    try:
        return devices | {"cupy": get_device("gpu")}
    except DeviceError:
        return devices


_DEVICES = _devices()


# Of session scope, since Hypothesis objects to function-scoped fixtures together with @given.
@pytest.fixture(scope="session", params=_DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    """Every backend in turn."""
    return _DEVICES[request.param]
