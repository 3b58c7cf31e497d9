"""The tests that `pytest -m quick` runs: the gradient of everything that has one."""

import re
import subprocess
import sys
from pathlib import Path

from scratchformer.catalogue import LAYERS, OPERATIONS

HERE = Path(__file__).parent


def test_the_quick_tests_check_the_gradient_of_every_operation_layer_and_model():
    """On NumPy, of every case: test_all_operations.py and test_all_layers.py say that nothing is without one."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "quick", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=--import-mode=importlib", HERE / "nn" / "test_all_layers.py"]
    command += [path for path in (HERE / "ops").glob("test_*.py") if path.name != "test_all_operations.py"]
    told = subprocess.run([*map(str, command), "-p", "no:xdist"], cwd=HERE.parent, capture_output=True, text=True)
    found = set(re.findall(r"::test_gradients\w*\[(.*)\]$", told.stdout, re.MULTILINE))
    missing = [n for n in (*OPERATIONS, *LAYERS) if not found & {f"numpy-{n}", f"{n}-numpy"}]  # pytest orders the two
    assert len(found) > len(missing) == 0, (missing, told.stdout, told.stderr)
