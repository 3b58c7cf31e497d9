"""Work in a process of its own, with limits of time and memory: for what cannot be bounded in any other way."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

METHOD = "fork" if sys.platform == "linux" else "spawn"  # a fork is faster; elsewhere it is unsafe, or missing
MAX_MESSAGE = 1 << 24  # bytes

Send = Callable[[Any], None]


class ProcessEnded(Exception):
    """The process ended too early, with this exit status, or could not be read (None)."""

    def __init__(self, status: int | None) -> None:
        how = (
            f"expected messages of up to {MAX_MESSAGE:,} bytes" if status is None else f"it ended with status {status}"
        )
        super().__init__(how)
        self.status = status


def run_apart(work: Callable[..., None], *given: Any, seconds: float, memory: int) -> Iterator[Any]:
    """Run `work(send, *given)` in another process, without terminal, and yield what it sends: values of JSON.

    The process is killed, with those that it has started, as soon as nothing more is read from the iterator. Raises
    TimeoutError after `seconds`, ProcessEnded if the process ends before.
    memory: how many bytes it may take, where the system can limit that.
    """
    from multiprocessing import connection, get_context  # here, since they take longer to import than all of `shell`

    context: Any = get_context(METHOD)
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_limited, args=(work, there, memory, *given), daemon=True)
    _start(process)
    there.close()
    end = time.monotonic() + seconds
    try:
        while ready := connection.wait([here, process.sentinel], max(0, end - time.monotonic())):
            try:
                if here not in ready and not here.poll():
                    raise EOFError
                said = json.loads(here.recv_bytes(MAX_MESSAGE))
            except (EOFError, OSError, ValueError) as error:
                process.join(1)
                raise ProcessEnded(process.exitcode) from error
            yield said
        raise TimeoutError(f"still running after {seconds:.0f} seconds")
    finally:
        with suppress(OSError, AttributeError):  # with the processes that it started; Windows has no groups
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()


def _start(process: Any) -> None:
    """Start a process. If it is a new Python, and not a fork, it takes no modules from the current folder."""
    before = os.environ.get("PYTHONSAFEPATH", "")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        process.start()
    finally:
        os.environ["PYTHONSAFEPATH"] = before


def _limited(work: Callable[..., None], there: Connection, memory: int, *given: Any) -> None:
    with suppress(OSError, AttributeError):
        os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    with suppress(ImportError, OSError, ValueError):
        import resource

        size = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + memory, resource.getrlimit(resource.RLIMIT_AS)[1]))
    work(lambda message: there.send_bytes(json.dumps(message).encode()), *given)
