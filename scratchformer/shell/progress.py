"""Progress bars on standard error, for everything that may take more than a few seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import cache
from threading import RLock
from typing import Any, TypeVar

T = TypeVar("T")

DELAY = 2  # seconds before a bar appears
QUIET = 10  # seconds between two lines, if standard error is not a terminal


def progress_bar(what: str | None = None, total: float | None = None, unit: str = "", **options: Any) -> Any:
    """A tqdm progress bar, which appears after DELAY seconds and is cleared at the end. If standard error is not a
    terminal, it prints a line about every QUIET seconds instead.

    what: the text before the bar. total: the number at which `update` has counted everything; None if it is not known.
    unit: what is counted, in the plural. options: further options of tqdm, which replace the defaults here.
    """
    defaults: dict[str, Any] = dict(delay=DELAY, leave=False, unit=f" {unit}", dynamic_ncols=True, miniters=1)
    defaults |= dict(mininterval=0.5) if on_terminal() else dict(mininterval=QUIET, position=0)
    return _bar_class()(desc=what, total=total, **defaults | {"disable": sys.stderr is None} | options)


@cache
def _bar_class() -> Any:
    """tqdm with a lock of its own. The lock of tqdm itself would choose how multiprocessing starts processes, which a
    program can choose only once.
    """
    from tqdm import tqdm  # here, since it takes a tenth of the package's import time

    bar: Any = type("Bar", (tqdm,), {})
    bar.set_lock(RLock())
    return bar


def on_terminal() -> bool:
    """Whether standard error is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


def counted(
    items: Iterable[T],
    what: str,
    unit: str,
    total: float | None = None,
    size: Callable[[T], float] = lambda item: 1,
) -> Iterator[T]:
    """The items, with a `progress_bar` that advances by `size(item)` when the next item is asked for.

    total: the sum of all sizes; by default the number of items, if it is known.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    with progress_bar(what, total, unit) as bar:
        for item in items:
            yield item
            bar.update(size(item))
