"""The memory of this process: how much it uses, and what the C library does with freed memory."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

# From malloc.h of the GNU C library. The library maps some large blocks one by one, and unmaps each when it is freed.
# Blocks of 32 MB or more always are, unless the number of mapped blocks is limited, here to none.
M_TRIM_THRESHOLD, NEVER = -1, 2**31 - 1
M_MMAP_MAX, NONE = -4, 0
M_ARENA_MAX, ONE = -8, 1


def keep_freed_memory() -> bool:
    """Ask the GNU C library to keep freed memory for the next micro-batch. Returns whether it agreed.

    By default it returns large blocks to the system, which clears the same pages and hands them out again a moment
    later; this took a tenth of a training step. There is one arena for all threads, so that one can use what another
    has freed. The setting lasts as long as the process, which then no longer shrinks. If blocks grow from step to
    step, the smaller ones leave holes that cannot be used, so the peak can rise too. With any other C library this does
    nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    options = (M_TRIM_THRESHOLD, NEVER), (M_MMAP_MAX, NONE), (M_ARENA_MAX, ONE)
    return all([mallopt(option, value) for option, value in options])


def resident_bytes(peak: bool = False) -> int:
    """The resident memory of this process now, or its `peak`; 0 if the system does not report it.

    (On Linux `getrusage` would not do: its `ru_maxrss` includes the parent process from before this one started.)
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return 1024 * int(status.split("VmHWM:" if peak else "VmRSS:")[1].split()[0])
    except (OSError, IndexError):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
