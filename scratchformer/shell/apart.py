"""Work in a separate process, with limits on time and memory, for code that cannot be bounded in any other way."""

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
    """Nothing more can be read from the process. status: its exit status, or None if it is still running."""

    def __init__(self, status: int | None) -> None:
        broken = f"it closed the connection or sent a message of more than {MAX_MESSAGE:,} bytes"
        super().__init__(broken if status is None else f"it ended with status {status}")
        self.status = status


def run_apart(work: Callable[..., None], *given: Any, seconds: float, memory: int) -> Iterator[Any]:
    """Run `work(send, *given)` in another process, without a terminal, and yield each JSON value that it sends.

    Closing the iterator kills the process and everything that it started. The iterator has no end of its own: stop
    reading once you have what you need. Raises ProcessEnded when the process ends, even if its work is done, and
    TimeoutError after `seconds`.
    memory: how many bytes of address space it may add to those it starts with. Only Linux enforces this.
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
        with suppress(OSError, AttributeError):  # Windows has no process groups
            os.killpg(process.pid, signal.SIGKILL)
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
