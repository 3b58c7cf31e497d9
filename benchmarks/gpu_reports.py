"""A plugin of pytest: the name, outcome and seconds of each test, and why it failed, as they come. A part of gpu.py.

Each is a line of JSON in the file that the environment variable GPU_REPORTS names.
"""

import json
import os

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
