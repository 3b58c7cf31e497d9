"""Progress bars on standard error, for everything that may take more than a few seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

T = TypeVar("T")

DELAY = 2  # seconds before a bar appears
QUIET = 10  # seconds between two lines, if standard error is not a terminal


def progress_bar(what: str | None = None, total: float | None = None, unit: str = "", **options: Any) -> Any:
    """A bar of tqdm that appears after DELAY seconds and is cleared at the end; if standard error is not a terminal, a
    line about every QUIET seconds. what: stands before the bar. total: of what `update` counts, in units of `unit`;
    None if it is not known. options: others of tqdm, or other values.
    """
    from tqdm import tqdm  # here, since it takes a tenth of the package's import time

    defaults: dict[str, Any] = dict(delay=DELAY, leave=False, unit=f" {unit}", dynamic_ncols=True, miniters=1)
    defaults |= dict(mininterval=0.5) if on_terminal() else dict(mininterval=QUIET, position=0)
    return tqdm(desc=what, total=total, **defaults | {"disable": sys.stderr is None} | options)


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
    """The items, with a `progress_bar` that adds `size(item)` when the next one is asked for.

    total: of all sizes; by default the number of items, if it is known.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    with progress_bar(what, total, unit) as bar:
        for item in items:
            yield item
            bar.update(size(item))
