"""The memory of this process: how much it has, and what the C library does with what is freed."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

# From malloc.h of the GNU C library, and the largest values that it takes.
M_TRIM_THRESHOLD, NEVER = -1, 2**31 - 1
M_MMAP_THRESHOLD, LARGEST = -3, 32 * 2**20
M_ARENA_MAX, ONE = -8, 1


def keep_freed_memory() -> bool:
    """Ask the GNU C library to keep what is freed for the next micro-batch; says whether it will.

    By default it gives large pieces back to the system, which clears and hands out the same pages again a moment
    later: a tenth of a training step went there. One arena for all threads, so that what one frees another can use.
    Does nothing with another C library. It holds for the process, which does not shrink any more.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    options = (M_TRIM_THRESHOLD, NEVER), (M_MMAP_THRESHOLD, LARGEST), (M_ARENA_MAX, ONE)
    return all([mallopt(option, value) for option, value in options])


def resident_bytes(peak: bool = False) -> int:
    """The memory that this process has now, or the most that it has had; 0 where the system does not say.

    (On Linux the `ru_maxrss` of `getrusage` counts that of the parent process before this one, too.)
    """
    try:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:" if peak else "VmRSS:")[1].split()[0])
    except (OSError, IndexError):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
