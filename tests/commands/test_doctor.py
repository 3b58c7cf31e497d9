"""What `scratchformer doctor` says about the driver, without one and with a stand-in for nvidia-smi."""

import configparser
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from scratchformer import kernels
from scratchformer.commands import doctor


def test_it_names_what_a_bug_report_needs():
    subjects = [subject for subject, _ in doctor.report()]
    for wanted in ("Python", "NumPy", "BLAS", "CPU", "free memory", "NVIDIA driver", "CuPy", "GPU", "data cache"):
        assert wanted in subjects or any(s.startswith("gpu:") for s in subjects)


def test_it_lists_every_package_of_the_metadata(monkeypatch):
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg", encoding="utf-8")
    lists = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    requirements = [Requirement(line) for lines in lists for line in lines.split("\n") if line]
    named = {each.name for each in requirements if each.marker is None or each.marker.evaluate()}
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda package: "" if package == "sacrebleu" else version(package))
    found = dict(doctor.report())
    assert {"tokenizers", "sacrebleu", "scikit-learn", "networkx"} <= named
    apart = ("numpy", "cupy", "nvmath", "nvidia")
    assert {name for name in named if not name.startswith(apart)} <= found.keys()
    ways = ("pip install 'scratchformer[test]'", "pip install 'scratchformer[translate]'")
    assert found["sacrebleu"] == f"not installed; {' or '.join(ways)}"


def test_it_names_no_package_that_the_extra_does_not_install_here(monkeypatch):
    """Such as MKL, which there is for x86 only."""
    metadata = ["numpy", "mkl; platform_machine == 'other' and extra == 'fast'", "numba; extra == 'fast'"]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda package: metadata)
    assert doctor._requirements() == {"numpy": [], "numba": ["fast"]}
    monkeypatch.setattr(doctor, "_version", lambda package: "")
    assert doctor._fast(["Neon"], None).startswith("numba not installed; for faster kernels: pip")


@pytest.mark.parametrize(("version", "extra"), [("580.65.06", "cuda13"), ("550.54", "cuda12")])
def test_the_extra_that_fits_the_driver(version, extra, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "{version}, NVIDIA H200, 140000 MiB"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (finding,) = (finding for subject, finding in doctor.report() if subject == "NVIDIA driver")
    assert finding == f"{version}; NVIDIA H200, 140000 MiB free; install scratchformer[{extra}]"


AMX = ["AVX2", "AVX-512", "AVX512-BF16", "AMX"]
SLOWER = "installed; bfloat16 would be slower than float32 on this processor"


@pytest.mark.parametrize(
    ("instructions", "missing", "half", "advice"),
    [
        (AMX, (), "MKL", f"installed; use {doctor.IN_HARDWARE} (AMX)"),
        (AMX, (), "Numba", f"installed; use {doctor.IN_HARDWARE} (AVX512-BF16)"),
        ([], (), "MKL", f"installed; use {doctor.IN_HARDWARE} (MKL)"),  # where the system does not describe it
        (AMX, (), "float32", SLOWER),
        (AMX, (), None, SLOWER),
        (AMX, ["mkl"], "float32", f"mkl not installed; for faster kernels and {doctor.IN_HARDWARE} (AMX)"),
        (AMX, ["mkl"], None, f"mkl not installed; for faster kernels and {doctor.IN_HARDWARE} (AMX)"),
    ],
)
def test_bfloat16_is_recommended_where_it_is_multiplied_or_would_be(monkeypatch, instructions, missing, half, advice):
    monkeypatch.setattr(doctor, "turned_off", lambda: "")
    monkeypatch.setattr(doctor, "_version", lambda package: "" if package in missing else "1.0")
    monkeypatch.setattr(doctor, "_requirements", lambda: {name: ["fast"] for name in ("numba", "ml_dtypes", "mkl")})
    found = doctor._fast(instructions, half and SimpleNamespace(bfloat16=half))
    assert found == advice + ": pip install 'scratchformer[fast]'" * bool(missing)


@pytest.mark.parametrize("tiles", [False, True])
def test_products_name_our_own_code_for_amx_where_it_is_used(monkeypatch, tiles):
    monkeypatch.setattr(doctor, "turned_off", lambda: "")
    monkeypatch.setattr(doctor, "find_spec", lambda package: True)
    monkeypatch.setattr(kernels, "mkl_products", SimpleNamespace(choice=lambda: "by MKL"), raising=False)
    monkeypatch.setattr(kernels, "numba_tiles", SimpleNamespace(available=lambda: tiles), raising=False)
    assert doctor._products() == ("by MKL", "by MKL" + doctor.TILES * tiles)


def test_no_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = (finding for subject, finding in doctor.report() if subject == "NVIDIA driver")
    assert finding.startswith("none found")
