"""What a program does after it has used the package is the same as without: no setting of another library changes."""

import json
import subprocess
import sys

USE = """
import decimal, gc, importlib, importlib.util, json, locale, logging, multiprocessing, os, random, signal, sys
import threading, warnings
from pathlib import Path

import numpy as np
import threadpoolctl

numba = importlib.util.find_spec("numba") and importlib.import_module("numba")
events = numba and importlib.import_module("numba.core.event")
matplotlib = importlib.util.find_spec("matplotlib") and importlib.import_module("matplotlib.pyplot")
libraries = {each["filepath"] for each in threadpoolctl.threadpool_info()}


def settings():
    found = {
        "numpy": [np.geterr(), np.get_printoptions(), np.random.get_state(legacy=False)],
        "python": [gc.isenabled(), gc.get_threshold(), sys.getrecursionlimit(), sys.getswitchinterval(), sys.path],
        "hooks": [sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook, sys.stdout, sys.stderr],
        "signals": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        "environment": [dict(os.environ), os.getcwd()],
        "locale": [locale.setlocale(locale.LC_ALL)],
        "decimal": [decimal.getcontext()],
        "logging": [logging.root.level, logging.root.handlers, logging.root.manager.disable],
        "processes": [multiprocessing.get_start_method(allow_none=True)],
        "random": [random.getstate()],
        "warnings": [warnings.filters, warnings.showwarning],
        "threads": [each for each in threadpoolctl.threadpool_info() if each["filepath"] in libraries],
    }
    if numba:
        found["numba"] = [{name: getattr(numba.config, name) for name in dir(numba.config) if name.isupper()}]
        found["numba's events"] = [{kind: each for kind, each in events._registered.items() if each}]
    if matplotlib:
        found["matplotlib"] = [dict(matplotlib.rcParams), matplotlib.get_backend(), matplotlib.get_fignums()]
    return {name: repr(value) for name, value in found.items()}


if matplotlib:
    matplotlib.switch_backend("svg")
before = settings()

import scratchformer as sf
from scratchformer import generation, models, ops, optim, testing, training
from scratchformer.commands import plots
from scratchformer.data import TextBatches

functions = {}
exec("def double(x): return 2 * x", functions)
with sf.fast():
    pass
if numba and numba.njit(functions["double"])(4) != 8:
    raise ValueError("Numba does not compile any more")
x = np.ones((2, 8), np.float32)
with sf.fast():
    loss, cache = ops.cross_entropy(x, np.array([0, 1]))
    ops.cross_entropy_backward(1.0, cache)
model = models.LanguageModel(16, 8, 2, 1, 8)
with training.Replicas(model, 2) as replicas:
    batches = TextBatches(np.arange(200, dtype=np.uint8) % 16, 4, 8, sf.Key(0))
    adam, run = optim.Adam(model.parameters(), 1e-3), training.Run("run", 2)
    for step in run.steps(replicas, adam, batches):
        replicas.gradients(batches.batch(step), run.key("train", step))
        replicas.clip(adam, 1.0)
        replicas.step(adam)
testing.check_gradients(ops.softmax, ops.softmax_backward, np.array([[1.0, 2.0]]))
if matplotlib:
    plots.plot_attention(np.ones((1, 1, 2, 2)) / 2, ["a", "b"], Path("attention.png"))

after = settings()
print(json.dumps([name for name in before if before[name] != after[name]]))
"""


def test_using_the_package_changes_no_setting_of_python_or_another_library(tmp_path):
    done = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
