"""Gradient checks for the operations that a file tests."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scratchformer.backend import CPU
from scratchformer.dispatch import reference_only
from scratchformer.testing.cases import OPERATIONS, Draw, check_operation
from scratchformer.testing.strategies import SCALES


def pytest_generate_tests(metafunc):
    """Run a test that takes `case` for every case of the operations in the module that its file tests."""
    if "case" in metafunc.fixturenames:
        module = metafunc.module.__name__.rpartition("test_")[2]
        cases = [name for name in OPERATIONS if OPERATIONS[name](Draw()).op.__module__.endswith(f"ops.{module}")]
        assert cases, f"scratchformer.testing.cases has no operation of ops/{module}.py"
        metafunc.parametrize("case", cases)


@pytest.fixture(params=SCALES)
def check_gradients(request, device):
    """A function that checks a case at one scale, on shapes and numbers from drawn seeds.

    It compares every element, and random directions, with central differences, and checks the contract of the pair
    (what may be written to, what may share memory) and the types: see `scratchformer.testing.check_gradients`. An
    operation that has fast twins is checked twice, with the twin and with the reference.
    """

    def check(case):
        has_twins = device is CPU and bool(OPERATIONS[case](Draw()).op.twins)

        @settings(max_examples=max(2, settings.default.max_examples // 12))
        @given(seed=st.integers(0, 2**32 - 1))
        def check_seed(seed):
            check_operation(case, Draw(seed, request.param, device))
            if has_twins:
                with reference_only():
                    check_operation(case, Draw(seed, request.param, device))

        check_seed()

    return check
