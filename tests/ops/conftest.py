"""The gradient checks of the operation that a file tests."""

import pytest

from scratchformer.backend import CPU
from scratchformer.dispatch import reference_only
from scratchformer.testing.cases import OPERATIONS, Draw, check_operation
from scratchformer.testing.strategies import SCALES


def pytest_generate_tests(metafunc):
    """A test that takes `case` runs for every case whose operation stands in the module that the test's file is for."""
    if "case" in metafunc.fixturenames:
        module = metafunc.module.__name__.rpartition("test_")[2]
        cases = [name for name in OPERATIONS if OPERATIONS[name](Draw()).op.__module__.endswith(f"ops.{module}")]
        assert cases, f"scratchformer.testing.cases has no operation of ops/{module}.py"
        metafunc.parametrize("case", cases)


@pytest.fixture
def check_gradients(device, combinations, thorough):
    """A function that checks a case at each scale, on drawn shapes and numbers; on the strict device, which shows where
    arrays of two kinds meet, at one scale.

    It compares elements, and random directions, with central differences; then the contract of a pair (what may be
    written to, what may share memory) and its types. See `scratchformer.testing.check_gradients`. An operation that has
    fast twins is checked as it runs, and as the reference.
    """

    def check(case):
        has_twins = device is CPU and bool(OPERATIONS[case](Draw()).op.twins)
        elements = 200 if thorough else 10
        for drawn in combinations(4 if device is CPU or thorough else 1, scale=SCALES):
            check_operation(case, Draw(drawn["seed"], drawn["scale"], device), max_elements=elements)
            if has_twins:
                with reference_only():
                    check_operation(case, Draw(drawn["seed"], drawn["scale"], device), max_elements=elements)

    return check
