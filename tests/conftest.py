"""Fixtures and Hypothesis profiles for all tests."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # each core has its tests: BLAS, loaded below, is not to put threads in between
    os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from hypothesis import Phase, settings

from scratchformer.backend import CPU, Device, DeviceError, get_device
from scratchformer.testing.strict import STRICT

settings.register_profile("default", deadline=None, max_examples=25, print_blob=True)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=500)
settings.register_profile("unshrunk", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))


# Of the scope of the session, since Hypothesis objects to function-scoped fixtures beside @given.
@pytest.fixture(scope="session", params=["numpy", "strict", "cupy"])
def device(request: pytest.FixtureRequest) -> Device:
    """Every backend in turn: NumPy, the strict stand-in for a device, and CuPy where there is a GPU."""
    if request.param == "numpy":
        return CPU
    if request.param == "strict":
        return STRICT
    try:
        return get_device("gpu")
    except DeviceError as reason:
        pytest.skip(str(reason))
