"""Which instructions of the processor compiled code may use."""

import pytest

pytest.importorskip("numba")
numba_code = pytest.importorskip("scratchformer.kernels.numba_code")


@pytest.mark.parametrize(
    ("features", "found"), [("+avx512bf16", True), ("+avx512bf16,+f16c,-avx512bf16", False), ("-f16c", False)]
)
def test_the_last_mention_of_a_feature_counts(monkeypatch, features, found):
    monkeypatch.setattr(numba_code.config, "CPU_FEATURES", features)
    assert numba_code.has("avx512bf16") is found
