"""Tests of tests: mistakes are planted in a backward, one at a time, to see which of them the tests miss.

    scratchformer mutate my_ops.py::cube_backward -- tests/test_my_ops.py

`mutants(source, name)` lists the mistakes, `mutate(names, tests)` plants each and runs the tests, and `Runner` is a
process that runs tests with one file replaced.
"""

from .command import mutate
from .mutants import Mutant, mutants
from .run import Runner

__all__ = ["Mutant", "Runner", "mutants", "mutate"]
