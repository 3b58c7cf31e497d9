"""The cores that this process may use, and the instructions of its processor.

Linux says so in /proc and /sys; elsewhere only the number of logical processors is known. (`loky.cpu_count`, which
joblib uses, reads the limit of the outermost cgroup only, and for the number of cores it starts `lscpu`, which does not
know the process's affinity.) `root` stands for / in tests.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")
# By their flags in /proc/cpuinfo: of x86 processors, then of ARM's.
INSTRUCTIONS = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX"}
INSTRUCTIONS |= {"asimd": "Neon", "sve": "SVE"}
BFLOAT16 = ("AMX", "AVX512-BF16")  # those that multiply bfloat16, the fastest first


class Processors(NamedTuple):
    """logical: processors of the machine. physical: the cores that they belong to. allowed: the logical ones on which
    this process may run (its affinity). separate: the cores that these belong to. quota: how many of them the process
    may use on average, by the limits of its cgroups; infinite without one.

    A logical processor whose core is not reported counts as a core.
    """

    logical: int
    physical: int
    allowed: int
    separate: int
    quota: float

    @property
    def useful(self) -> int:
        """How many threads can multiply matrices at full speed: one for each core, and at most the quota, rounded up.

        Two logical processors of one core share its arithmetic units, which a single matrix product keeps busy.
        """
        return max(1, math.ceil(min(self.quota, self.separate)))


def cores() -> int:
    """The number of CPU cores this process may use: `Processors.useful`."""
    return _useful(frozenset(affinity()))


def affinity() -> Collection[int]:
    """The logical processors on which this process may run."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def processors(root: Path = ROOT, allowed: Collection[int] | None = None) -> Processors:
    """allowed: by default the affinity of this process. Raises ValueError for files in a format that is not Linux's."""
    allowed = affinity() if allowed is None else allowed
    folder = root / "sys/devices/system/cpu"
    online = {*_numbers(_text(folder / "online")), *allowed}
    core = {cpu: _siblings(folder / f"cpu{cpu}" / "topology") or str(cpu) for cpu in online}
    separate = len({core[cpu] for cpu in allowed})
    return Processors(len(online), len(set(core.values())), len(allowed), separate, quota(root))


def quota(root: Path = ROOT) -> float:
    """The smallest CPU limit, in processors, of this process's cgroup and of all that contain it."""
    return min(_limits(root), default=math.inf)


def described(root: Path = ROOT) -> str:
    """The name of the processor; "" if the system does not report it.

    Linux reports no name of an ARM processor, but the numbers of the maker and the model of each core, such as 0x41 and
    0xd0c for ARM's Neoverse N1.
    """
    cores = dict.fromkeys(zip(_fields(root, "CPU implementer"), _fields(root, "CPU part"), strict=False))
    numbers = "; ".join(f"implementer {implementer}, part {part}" for implementer, part in cores)
    return next(_fields(root, "model name"), f"ARM ({numbers})" if numbers else "")


def instructions(root: Path = ROOT) -> list[str]:
    """Those vector instructions that matter here, and that the processor has."""
    flags = (next(_fields(root, "flags"), "") or next(_fields(root, "Features"), "")).split()
    return [name for flag, name in INSTRUCTIONS.items() if flag in flags]


@functools.cache
def _useful(allowed: frozenset[int]) -> int:
    try:
        return processors(ROOT, allowed).useful
    except ValueError:
        return len(allowed)


def _limits(root: Path) -> Iterator[float]:
    """The limits of the process's cgroup and of each above it, up to the one that is mounted; of cgroups 1 and 2."""
    groups: dict[str, str] = {}  # the process's cgroup, by controller; version 2 has one for all, under ""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), group)
    for line in _text(root / "proc/self/mountinfo").splitlines():
        mount, _, system = line.partition(" - ")
        mounted, point = mount.split()[3:5]
        kind, *_, options = system.split()
        if kind == "cgroup2":
            limit, group = _limit2, groups.get("", mounted)
        elif kind == "cgroup" and "cpu" in options.split(","):
            limit, group = _limit1, groups.get("cpu", mounted)
        else:
            continue
        inside = Path(os.path.relpath(group, mounted)).parts
        if ".." in inside:  # the mounted cgroup is one of another namespace
            inside = ()
        for depth in range(len(inside) + 1):
            yield from limit(root.joinpath(point.lstrip("/"), *inside[:depth]))


def _limit1(group: Path) -> Iterator[float]:
    limit, period = (int(_text(group / f"cpu.cfs_{name}_us") or -1) for name in ("quota", "period"))
    if limit > 0 and period > 0:
        yield limit / period


def _limit2(group: Path) -> Iterator[float]:
    limit, period = (_text(group / "cpu.max") or "max 100000").split()
    if limit != "max":
        yield int(limit) / int(period)


def _siblings(topology: Path) -> str:
    """The logical processors of one core, such as "0,64"; "" if the system does not report them."""
    return _text(topology / "core_cpus_list") or _text(topology / "thread_siblings_list")  # the latter in older kernels


def _numbers(ranges: str) -> Iterator[int]:
    """The numbers 0, 1, 2 and 5 of the text 0-2,5."""
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _fields(root: Path, name: str) -> Iterator[str]:
    """The values with this name in /proc/cpuinfo."""
    for line in _text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            yield value.strip()


def _text(path: Path) -> str:
    """The content of a file of the system; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
