"""How many files and functions one training step passes through."""

import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "path_of_a_step.py"


def test_a_step_of_the_plain_language_model_passes_through_few_functions_and_files():
    environment = os.environ | {"SCRATCHFORMER_FAST": "0"}
    printed = subprocess.run(
        [sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=True
    ).stdout
    functions, files = map(int, re.search(r"^(\d+) functions in (\d+) files, ", printed, re.MULTILINE).groups())
    assert 50 < functions <= 150 and 10 < files <= 25, printed
