"""How Numba compiles the loops: which instructions it may use, which sums it may reorder, and whom it tells."""

import sys

import pytest

from scratchformer.dispatch import fast

pytest.importorskip("numba")
numba_code = pytest.importorskip("scratchformer.kernels.numba_code")


@pytest.mark.parametrize(
    ("features", "found"), [("+avx512bf16", True), ("+avx512bf16,+f16c,-avx512bf16", False), ("-f16c", False)]
)
def test_the_last_mention_of_a_feature_counts(monkeypatch, features, found):
    monkeypatch.setattr(numba_code.config, "CPU_FEATURES", features)
    assert numba_code.has("avx512bf16") is found


def test_compiled_code_reorders_nothing_but_the_sums_that_are_written_with_plus():
    """So a maximum or a mean that is subtracted stays subtracted, in whatever loop it is."""
    with fast():
        modules = [m for name, m in sys.modules.items() if name.startswith("scratchformer.kernels.numba_")]
    flags = {
        f"{f.__module__}.{f.__name__}": f.targetoptions["fastmath"]
        for module in modules
        for f in vars(module).values()
        if hasattr(f, "targetoptions")
    }
    assert len(flags) > 50
    reordered = {name for name, found in flags.items() if not found <= {"contract"}}
    assert reordered == {"scratchformer.kernels.numba_code.plus"}


def test_code_on_disk_is_made_again_when_a_constant_or_function_that_it_includes_has_changed():
    """All modules of the package that define what a compiled function refers to are in the checksum."""
    with fast():
        modules = [m for name, m in sys.modules.items() if name.startswith("scratchformer.kernels.numba_")]
    files = {str(file) for file in numba_code.source_files()}
    for module in modules:
        for function in vars(module).values():
            if hasattr(function, "targetoptions"):
                assert function.py_func.__code__.co_filename in files
    package = numba_code.Path(numba_code.__file__).parents[1]
    names = "ops/quantized.py", "ops/activations.py", "backend.py", "rng.py"
    assert {str(package / name) for name in names} <= files
