"""The tests that `pytest -m quick` runs: the gradient of everything that has one."""

import subprocess
import sys
from pathlib import Path

from scratchformer.testing.cases import LAYERS, OPERATIONS

HERE = Path(__file__).parent


def test_the_quick_tests_check_the_gradient_of_every_operation_layer_and_model():
    """On NumPy, of every case: test_all_operations.py and test_all_layers.py say that nothing is without one."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "quick", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=--import-mode=importlib", HERE / "ops", HERE / "nn"]
    told = subprocess.run([*map(str, command), "-p", "no:xdist"], cwd=HERE.parent, capture_output=True, text=True)
    found = {line.partition("::")[2] for line in told.stdout.splitlines() if "::test_gradients" in line}
    expected = {f"test_gradients[{name}-numpy]" for name in OPERATIONS}
    kinds = [f"test_gradients_of_{kind}" for kind in ("layers", "blocks", "models")]
    assert expected <= found, told.stdout + told.stderr
    assert all(any(f"{kind}[numpy-{name}]" in found for kind in kinds) for name in LAYERS)
