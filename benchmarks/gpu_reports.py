"""A plugin of pytest: the name, outcome and seconds of each test, and why it failed, as they come. A part of gpu.py.

Each is a line of JSON in the file that the environment variable GPU_REPORTS names.
"""

import json
import os
import sys

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)}
    if report.failed:
        line["why"] = report.longreprtext[-3000:]
    elif report.skipped:
        line["why"] = str(report.longrepr)[-200:]
    with open(os.environ["GPU_REPORTS"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """End a worker after an error from which CUDA does not recover in a process. pytest-xdist then starts another."""
    cupy = sys.modules.get("cupy")
    if cupy is not None and "PYTEST_XDIST_WORKER" in os.environ:
        try:
            cupy.cuda.runtime.deviceSynchronize()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            print(error, file=sys.__stderr__, flush=True)
            os._exit(1)
