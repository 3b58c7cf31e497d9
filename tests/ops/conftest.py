"""Gradient checks for the operations that a file tests."""

import pytest

from scratchformer.backend import CPU
from scratchformer.catalogue import OPERATIONS, Draw
from scratchformer.catalogue.check import check_operation
from scratchformer.dispatch import reference_only, twins_of
from scratchformer.testing.strategies import SCALES


def pytest_generate_tests(metafunc):
    """Run a test that takes `case` for every case of the operations in the module that its file tests: the tests of
    their gradients, which are among the quick ones.
    """
    if "case" in metafunc.fixturenames:
        module = metafunc.module.__name__.rpartition("test_")[2]
        cases = [name for name in OPERATIONS if OPERATIONS[name](Draw()).op.__module__.endswith(f"ops.{module}")]
        assert cases, f"scratchformer.catalogue has no operation of ops/{module}.py"
        metafunc.parametrize("case", [pytest.param(name, marks=pytest.mark.quick) for name in cases])


@pytest.fixture
def check_gradients(device, combinations, thorough):
    """A function that checks a case at drawn scales, on shapes and numbers from drawn seeds; at one scale on the
    strict device, which shows where arrays of two kinds meet.

    It compares elements, and random directions, with central differences, and checks the contract of the pair (what
    may be written to, what may share memory) and the types: see `scratchformer.testing.check_gradients`. An operation
    that has fast twins is checked twice, with the twin and with the reference.
    """

    def check(case):
        has_twins = device is CPU and bool(twins_of(OPERATIONS[case](Draw()).op))
        elements = 200 if thorough else 20
        for drawn in combinations(4 if device is CPU or thorough else 1, scale=SCALES):
            check_operation(case, Draw(drawn["seed"], drawn["scale"], device), max_elements=elements)
            if has_twins:
                with reference_only():
                    check_operation(case, Draw(drawn["seed"], drawn["scale"], device), max_elements=elements)

    return check
