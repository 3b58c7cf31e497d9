"""What is public, what importing it costs, and where the version is given."""

import configparser
import inspect
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import scratchformer as sf
from scratchformer import nn, ops, optim
from scratchformer.commands.doctor import report
from scratchformer.optim.adam import adam_step
from scratchformer.optim.muon import nesterov
from scratchformer.optim.optimizer import Optimizer
from scratchformer.rng import Key

ROOT = Path(__file__).parent.parent
PAGES = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
MODULES = ("ops", "nn", "models", "data", "optim", "training", "generation", "testing")


def in_a_fresh_process(code: str) -> str:
    """What the code prints. An earlier process has compiled the modules, as on a user's machine."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout


def test_one_list_says_what_is_public():
    """The docstring lists the modules; every name in the `__all__` of each is defined."""
    assert re.findall(r"^    sf\.(\w+) ", sf.__doc__, re.MULTILINE) == list(MODULES)
    assert {name for name in sf.__all__ if isinstance(getattr(sf, name), ModuleType)} == set(MODULES)
    for module in (sf, *(getattr(sf, name) for name in MODULES)):
        assert sorted(module.__all__) == sorted(set(module.__all__))
        assert not [name for name in module.__all__ if not hasattr(module, name)]


def test_one_import_gives_all_that_is_public():
    names = [f"sf.{name}.{each}" for name in MODULES for each in getattr(sf, name).__all__]
    code = f"import scratchformer as sf\nfor name in {names + [f'sf.{name}' for name in sf.__all__]}: eval(name)"
    in_a_fresh_process(code)


def test_what_the_pages_use_is_public():
    used = {tuple(name.split(".")) for name in re.findall(r"\bsf\.([a-z]\w*\.\w+)", PAGES)}
    imported = re.findall(r"^from scratchformer(?:\.(\w+))? import (.+)$", PAGES, re.MULTILINE)
    used |= {(module, name.strip()) for module, names in imported for name in names.split(",")}
    assert used >= {("models", "LanguageModel"), ("optim", "Adam"), ("testing", "check_layer"), ("", "Key")}
    for module, name in used:
        assert name in (import_module(f"scratchformer.{module}") if module else sf).__all__, f"{module}.{name}"


def test_importing_calls_few_functions():
    """Beyond what NumPy's import calls. Unlike a time, their number is the same on every machine; when this test was
    written it was 57,000, in a fifth of a second. `python benchmarks/before_after.py BEFORE import` measures the time.
    """
    code = "calls = []; sys.setprofile(lambda _, event, __: event == 'call' and calls.append(1)); import scratchformer"
    in_a_fresh_process("import scratchformer")  # compiles the modules
    assert int(in_a_fresh_process(f"import numpy, sys; {code}; sys.setprofile(None); print(len(calls))")) < 70_000


def test_importing_imports_nothing_that_is_optional_or_heavy():
    """Not SciPy, which only GELU needs, or tqdm, which only a progress bar does; of the standard library nothing that
    takes long, such as asyncio or multiprocessing.
    """
    code = "import sys, numpy; before = {*sys.modules}; import scratchformer; print([before, {*sys.modules} - before])"
    before, new = eval(in_a_fresh_process(code))
    names = {name.partition(".")[0] for name in new} - before | new  # NumPy imports ctypes, but not all that is in it
    names = {name for name in names if name == "importlib.metadata" or "." not in name}
    others = "_cython", "cython", "_missing_stdlib"  # the last is Python's own
    libraries = {name for name in names - sys.stdlib_module_names if not name.startswith(others)}
    assert libraries == {"scratchformer", "safetensors", "threadpoolctl"}
    heavy = {"asyncio", "ctypes", "doctest", "email", "http", "importlib.metadata", "inspect", "multiprocessing", "pdb"}
    assert not names & (heavy | {"pydoc", "sqlite3", "ssl", "subprocess", "tkinter", "unittest", "urllib", "xml"})


def test_the_version_is_given_in_one_place():
    """The package has it. What is installed, `scratchformer doctor` and the changelog say the same."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    assert setup["metadata"]["version"] == "attr: scratchformer.version.__version__"
    assert dict(report())["scratchformer"] == sf.__version__
    released = re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert released[0] == sf.__version__


def test_type_checkers_are_told_that_the_package_is_annotated():
    assert (Path(sf.__file__).parent / "py.typed").is_file()


def test_the_same_pythons_are_named_everywhere():
    """The oldest, also in the README and the settings of the tools; all, in the classifiers and the documentation."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    supported = re.findall(r"Python :: (3\.\d+)", setup["metadata"]["classifiers"])
    versions = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8").partition("\n## Versions\n")[2]
    assert re.findall(r"^\| (3\.\d+) \|", versions, re.MULTILINE) == supported
    oldest = supported[0]
    assert setup["options"]["python_requires"] == f">={oldest}"
    assert f"You need Python {oldest} or later" in PAGES and f"\nPython {oldest} or later" in versions
    numpy = re.search(r"NumPy (\S+) or later", versions)[1]
    assert f"numpy>={numpy}" in setup["options"]["install_requires"].split()
    tools = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'python_version = "{oldest}"' in tools and f'"py{oldest}"'.replace(".", "") in tools


# Defaults of ops, nn and optim: published values. What is not here is 0, or off.
DEFAULTS = {
    "eps": 1e-5, "rmsnorm.eps": 1e-6, "RMSNorm.eps": 1e-6, "RotarySelfAttention.eps": 1e-6, "Adam.eps": 1e-8,
    "AdamW.eps": 1e-8, "Muon.eps": 1e-8, "betas": (0.9, 0.999), "Muon.betas": (0.9, 0.99), "Muon.lr": 0.02,
    "Muon.adam_lr": 1e-3, "Muon.momentum": 0.95, "AdamW.weight_decay": 0.01, "Muon.weight_decay": 0.01,
    "newton_schulz.steps": 5, "base": 10_000, "std": 1.0, "scale": 1.0, "share": 1.0, "BlockEnds.width": 1,
    "Linear.bias": True, "recompute_blocks.recompute": True, "key": Key(0),
}  # fmt: skip


INNER = {"adam_step": adam_step, "nesterov": nesterov, "Optimizer": Optimizer}


def test_numbers_that_are_left_out():
    seen = set()
    for room in ops, nn, optim:
        for name, thing in [*((name, getattr(room, name)) for name in room.__all__), *INNER.items()]:
            methods = [f for f in vars(thing).values() if inspect.isfunction(f)] if inspect.isclass(thing) else []
            for function in [thing, *methods] if callable(thing) else []:
                for argument in inspect.signature(function).parameters.values():
                    default, full = argument.default, f"{name}.{argument.name}"
                    if isinstance(default, int | float | Key) or argument.name == "betas":
                        key = full if full in DEFAULTS else argument.name
                        assert default == DEFAULTS.get(key, 0), full
                        seen.add(key)
    assert DEFAULTS.keys() <= seen
