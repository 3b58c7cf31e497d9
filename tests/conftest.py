"""Fixtures and Hypothesis profiles for all tests."""

import itertools
import math
import os
import random
import shutil
import signal

if "PYTEST_XDIST_WORKER" in os.environ:  # tests run on every core, so BLAS, loaded below, gets one thread
    os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings

from scratchformer.backend import CPU, Device, DeviceError, get_device, to_device
from scratchformer.rng import Key
from scratchformer.shell.process import SIGNALS
from scratchformer.testing.diagnosis import without_diagnosis
from scratchformer.testing.strict import STRICT

settings.register_profile("default", deadline=None, max_examples=25, print_blob=True)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=500)
settings.register_profile("unshrunk", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))


@pytest.fixture(autouse=True)
def quick_failures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checks that fail do not say why, except in the tests of what they say: that takes a second each time."""
    with nullcontext() if request.node.get_closest_marker("diagnosis") else without_diagnosis():
        yield


@pytest.fixture(scope="session")
def thorough() -> bool:
    """Whether HYPOTHESIS_PROFILE=thorough: every combination, every element, however long it takes."""
    return settings.get_current_profile_name() == "thorough"


@pytest.fixture
def combinations(request: pytest.FixtureRequest, thorough: bool) -> Callable[..., Iterator[dict[str, Any]]]:
    """combinations(2, scale=SCALES, small=[False, True]) gives two dicts: a scale, a value of small, and a seed.

    The draws depend on the name of the test alone, so they are the same in every run, and differ from case to case. No
    value comes twice before each has come once. `thorough` gives the whole product, and at least five times as many.
    Each dict is printed; when a test fails, pytest shows them, and the last is the one that failed.
    """

    def draw(count: int, **values: Sequence[Any]) -> Iterator[dict[str, Any]]:
        rng = random.Random(request.node.nodeid)
        if thorough:
            product = list(itertools.product(*values.values()))
            rows = itertools.islice(itertools.cycle(product), max(len(product), 5 * count))
        else:
            orders = [itertools.cycle(rng.sample(kind, len(kind))) for kind in map(list, values.values())]
            rows = ([next(order) for order in orders] for _ in range(count))
        for row in rows:
            drawn = {"seed": rng.randrange(2**32), **dict(zip(values, row, strict=True))}
            print(drawn)
            yield drawn

    return draw


def _devices() -> dict[str, Device]:
    """Every backend: NumPy, the strict stand-in for a device, and CuPy where there is a GPU."""
    devices = {"numpy": CPU, "strict": STRICT}
    try:
        return devices | {"cupy": get_device("gpu")}
    except DeviceError:
        return devices


_DEVICES = _devices()


# Of session scope, since Hypothesis objects to function-scoped fixtures together with @given.
@pytest.fixture(scope="session", params=_DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    """Every backend in turn."""
    return _DEVICES[request.param]


# Signals


@pytest.fixture(scope="session", autouse=True)
def heed_signals() -> None:
    """Let processes that tests start heed all signals, also if pytest was started in the background or under nohup.

    A new process inherits which signals are ignored, and not which are handled. So what this process ignores, it
    handles from now on, by doing nothing.
    """
    set_by_python = {getattr(signal, name, None) for name in ("SIGPIPE", "SIGXFSZ")}
    for number in signal.valid_signals() - set_by_python:
        if signal.getsignal(number) == signal.SIG_IGN:
            child_ends = number == getattr(signal, "SIGCHLD", None)  # if that is ignored, no exit status is known
            signal.signal(number, signal.SIG_DFL if child_ends else lambda *_: None)


@pytest.fixture
def default_signals() -> Iterator[None]:
    """For tests that send signals to this process: they act as in a terminal, however pytest was started."""
    usual = dict.fromkeys(SIGNALS, signal.SIG_DFL) | {signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def check_loss_backward(device: Device) -> Callable[..., None]:
    """A function that compares `loss_backward` with a central difference along a random direction of all weights."""

    def check(model: Any, *batch: np.ndarray) -> None:
        """model: in float64. batch: the NumPy arrays that its `loss` takes."""
        arrays = [to_device(x, device) for x in batch]
        flat, key, dloss, h = model.flat, Key(4), 2.5, 1e-6
        _, cache = model.loss(*arrays, key=key)
        model.loss_backward(dloss, cache)
        direction = to_device(np.random.default_rng(0).standard_normal(flat.data.size), device)
        start, losses = flat.data.copy(), []
        for step in (h, -h):
            flat.data[...] = start + step * direction
            losses.append(float(model.loss(*arrays, key=key)[0]))
        numeric = dloss * (losses[0] - losses[1]) / (2 * h)
        assert math.isclose(float(flat.grad @ direction), numeric, rel_tol=1e-5)

    return check


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's chromium, without a window."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs Debian's chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--force-prefers-reduced-motion",
        "--window-size=1200,1000",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield started
    started.quit()
