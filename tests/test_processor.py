"""How many cores a process may use: affinity, limits of cgroups, and logical processors that share a core."""

import math
import os
from types import SimpleNamespace

import pytest

from scratchformer import processor
from scratchformer.commands import doctor
from scratchformer.processor import Processors, described, instructions, processors, quota

SLICE, JOB = "/user.slice", "/user.slice/job"
V2 = "0::/user.slice/job"
MOUNT2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "4:memory:/other\n3:cpuacct,cpu:/user.slice/job\n1:name=systemd:/"
MOUNT1 = "32 31 0:29 {} /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpuacct,cpu"
OTHER = "31 23 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n33 31 0:30 / /sys/fs/cgroup/memory rw - cgroup x rw,memory"


@pytest.fixture
def write(tmp_path):
    """write({path: text}): files below a folder that stands for /; returns the folder."""

    def write(files):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(f"{text}\n")
        return tmp_path

    return write


def proc(cgroup, *mounts):
    return {"proc/self/cgroup": cgroup, "proc/self/mountinfo": "\n".join(mounts)}


def limit2(path, limit):
    return {f"sys/fs/cgroup{path}/cpu.max": limit}


def limit1(path, most, period="100000"):
    folder = f"sys/fs/cgroup/cpu{path}"
    return {f"{folder}/cpu.cfs_quota_us": most, f"{folder}/cpu.cfs_period_us": period}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, math.inf),
        (proc(V2, MOUNT2), math.inf),
        (proc(V2, MOUNT2) | limit2(JOB, "max 100000"), math.inf),
        (proc(V2, OTHER, MOUNT2) | limit2(JOB, "250000 100000"), 2.5),
        (proc(V2, MOUNT2) | limit2(JOB, "max 100000") | limit2(SLICE, "150000 50000"), 3),
        (proc(V2, MOUNT2) | limit2(JOB, "400000 100000") | limit2(SLICE, "150000 50000"), 3),
        (proc("0::/", MOUNT2) | limit2("", "50000 100000"), 0.5),  # a container
        (proc("0::/../other", MOUNT2) | limit2("", "50000 100000"), 0.5),
        (proc(V2, OTHER) | limit2(JOB, "250000 100000"), math.inf),  # not mounted
        (proc(V1, OTHER, MOUNT1.format("/")) | limit1(JOB, "-1"), math.inf),
        (proc(V1, OTHER, MOUNT1.format("/")) | limit1(JOB, "150000"), 1.5),
        (proc(V1, MOUNT1.format("/")) | limit1(JOB, "150000") | limit1("", "10000", "20000"), 0.5),
        (proc(V1, MOUNT1.format("/user.slice/job")) | limit1("", "700000"), 7),  # a container's own part
        (proc(V1 + "\n0::/", MOUNT1.format("/"), MOUNT2) | limit1(SLICE, "200000"), 2),  # both versions
    ],
)
def test_the_smallest_limit_up_to_the_root_counts(write, files, expected):
    assert quota(write(files)) == expected


def topology(*cores, file="core_cpus_list"):
    cpus = {cpu: core for core in cores for cpu in map(int, core.split(","))}
    files = {f"sys/devices/system/cpu/cpu{cpu}/topology/{file}": core for cpu, core in cpus.items()}
    return files | {"sys/devices/system/cpu/online": f"0-{max(cpus)}"}


SMT = ("0,4", "1,5", "2,6", "3,7")


@pytest.mark.parametrize(
    ("files", "allowed", "expected", "useful"),
    [
        (topology(*SMT), range(8), Processors(8, 4, 8, 4, math.inf), 4),
        (topology(*SMT, file="thread_siblings_list"), range(8), Processors(8, 4, 8, 4, math.inf), 4),
        (topology(*SMT), [0, 4], Processors(8, 4, 2, 1, math.inf), 1),
        (topology(*SMT), [0, 1, 5, 6], Processors(8, 4, 4, 3, math.inf), 3),
        (topology(*map(str, range(64))), range(3, 64), Processors(64, 64, 61, 61, math.inf), 61),
        ({}, [0, 2, 3], Processors(3, 3, 3, 3, math.inf), 3),
        (
            topology(*SMT) | proc(V2, MOUNT2) | limit2(JOB, "250000 100000"),
            range(8),
            Processors(8, 4, 8, 4, 2.5),
            3,
        ),
        (topology(*SMT) | proc(V2, MOUNT2) | limit2(JOB, "900000 100000"), range(8), Processors(8, 4, 8, 4, 9), 4),
        (proc(V2, MOUNT2) | limit2(JOB, "1000 100000"), [0, 1], Processors(2, 2, 2, 2, 0.01), 1),
    ],
)
def test_one_replica_for_each_core_within_affinity_and_quota(write, files, allowed, expected, useful):
    found = processors(write(files), allowed)
    assert found == expected and found.useful == useful


def test_the_number_of_cores_follows_the_affinity(monkeypatch):
    monkeypatch.setattr(processor, "affinity", lambda: {0})
    assert processor.cores() == 1


def test_files_in_an_unknown_format_leave_the_affinity(write, monkeypatch):
    monkeypatch.setattr(processor, "ROOT", write({"proc/self/cgroup": "strange"}))
    monkeypatch.setattr(processor, "affinity", lambda: range(1000, 1005))  # of no other test, since it is remembered
    assert processor.cores() == 5


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no affinity")
def test_this_machine():
    found = processors()
    assert 1 <= found.useful <= found.separate <= found.allowed <= found.logical
    assert found.separate <= found.physical <= found.logical and found.quota > 0


FLAGS = "model name\t: Some CPU\nflags\t\t: fpu {}\n\nmodel name\t: Some CPU\nflags\t\t: fpu"


@pytest.mark.parametrize(
    ("flags", "missing", "half", "found", "advice"),
    [
        (
            "avx2 avx512f avx512_bf16 amx_bf16",
            {"mkl"},
            "Numba",
            "AVX2, AVX-512, AVX512-BF16, AMX",
            "mkl not installed; for faster kernels and --precision bfloat16, which this processor multiplies in "
            "hardware (AMX): pip install 'scratchformer[fast]'",
        ),
        (
            "avx2 avx512f avx512_bf16",
            {},
            "MKL",
            "AVX2, AVX-512, AVX512-BF16",
            "installed; use --precision bfloat16, which this processor multiplies in hardware (AVX512-BF16)",
        ),
        (
            "avx512_bf16",
            {},
            "float32",
            "AVX512-BF16",
            "installed; bfloat16 would be slower than float32 on this processor",
        ),
        (
            "avx2",
            {},
            "float32",
            "AVX2",
            "installed; bfloat16 would be slower than float32 on this processor",
        ),
        (
            "",
            {"numba", "ml_dtypes", "mkl"},
            None,
            "none of AVX2, AVX-512, AVX512-BF16, AMX, Neon, SVE",
            "numba, ml_dtypes, mkl not installed; for faster kernels: pip install 'scratchformer[fast]'",
        ),
    ],
)
def test_doctor_says_what_would_help(write, monkeypatch, flags, missing, half, found, advice):
    for variable in ("SCRATCHFORMER_FAST", "NUMBA_DISABLE_JIT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(doctor, "_version", lambda package: "" if package in missing else "1.0")
    monkeypatch.setattr(doctor, "_requirements", lambda: {name: ["fast"] for name in ("numba", "ml_dtypes", "mkl")})
    choice = half and SimpleNamespace(bfloat16=half)
    monkeypatch.setattr(doctor, "_products", lambda: (choice, half or ""))
    files = topology(*SMT) | proc(V2, MOUNT2) | limit2(JOB, "250000 100000")
    root = write(files | {"proc/cpuinfo": FLAGS.format(flags)})
    assert instructions(root) == [name for name in found.split(", ") if not name.startswith("none")] or not flags
    assert list(doctor._processor(root, range(8))) == [
        ("CPU", "Some CPU: 8 logical processors on 4 cores"),
        (
            "",
            "this process may run on 8 of them (affinity), on 4 cores, with a limit of 2.5 CPUs (cgroup quota): "
            "3 replicas by default",
        ),
        ("instructions", found),
        ("fast", advice),
        *([("products", half)] if half else []),
    ]
    for variable, value in (("NUMBA_DISABLE_JIT", "1"), ("SCRATCHFORMER_FAST", "0")):
        monkeypatch.setenv(variable, value)
        if not missing:
            advice = f"installed, but {variable}={value} turns it off"
            assert dict(doctor._processor(root, range(8)))["fast"] == advice


ARM = """processor\t: {0}
BogoMIPS\t: 243.75
Features\t: fp asimd evtstrm aes atomics {3}
CPU implementer\t: {1}
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: {2}
CPU revision\t: 1
"""


@pytest.mark.parametrize(
    ("cores", "more", "name", "found"),
    [
        (["0xd0c"] * 4, "asimdhp asimddp", "ARM (implementer 0x41, part 0xd0c)", ["Neon"]),  # Neoverse N1
        (["0xd40"] * 2, "sve bf16 i8mm", "ARM (implementer 0x41, part 0xd40)", ["Neon", "SVE"]),  # Neoverse V1
        (
            ["0xd05", "0xd05", "0xd0a"],  # small cores and a large one
            "",
            "ARM (implementer 0x41, part 0xd05; implementer 0x41, part 0xd0a)",
            ["Neon"],
        ),
    ],
)
def test_arm(write, monkeypatch, cores, more, name, found):
    """As Linux 6 describes it: without a name, and with fields of its own."""
    root = write({"proc/cpuinfo": "\n".join(ARM.format(i, "0x41", core, more) for i, core in enumerate(cores))})
    assert (described(root), instructions(root)) == (name, found)
    monkeypatch.setattr(doctor, "_products", lambda: (None, ""))  # as without Numba
    facts = dict(doctor._processor(root, range(len(cores))))
    assert facts["CPU"].startswith(name) and facts["instructions"] == ", ".join(found)
