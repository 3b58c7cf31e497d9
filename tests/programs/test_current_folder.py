"""No command executes or obeys a file of the folder in which it is called, which may be a stranger's."""

import gc
import importlib
import os
import pickle
import pkgutil
import shutil
import subprocess
import sys
import zipfile

import pytest

from scratchformer.course.course import exercise

OPERATION = """
def square(x):
    r'''y = x².

        y_i = x_i²
        dx_i = dy_i ∂y_i/∂x_i = 2 dy_i x_i

    dx = 2 * dy * x
    '''
    return x * x, x


def square_backward(dy, cache):
    x = cache
    dx = 2 * dy * x
    return dx
"""
COMMANDS = {
    "doctor": ["doctor"],
    "check": ["check", "relu"],
    "derivations": ["check", "--derivations", "relu"],
    "show": ["show", "relu", "--numba"],
    "generate": ["generate", ".", "--tokens", "2"],
    "evaluate": ["evaluate", ".", "--data", "text.txt", "--device", "cpu"],
    "plot": ["plot", "."],
    "train": ["train", "enwik8", "--resume", ".", "--steps", "3", "--data", "text.txt", "--device", "cpu"],
    "export": ["export", ".", "exported.onnx"],
    "learn": ["learn", "--dir", "answers", "check", "relu"],
    "site": ["site", "--no-open"],
    "page": ["page", "elsewhere/square.py"],
    "translate": ["translate", "translator", "a dog ."],
}
REFUSED = ("site",)  # a clone has none
SETTINGS = {
    "matplotlibrc": "text.usetex: True\nfont.family: serif\ntext.latex.preamble: \\input{evil}\n"
    "figure.hooks: evil:hook\n"
    "backend: module://evil\naxes.prop_cycle: cycler('color', [f'{print()}'])\n",
    ".numba_config.yaml": "cache_dir: cache\n",
    "mca-params.conf": "mca_base_component_path = .\n",
    "ucx.conf": "UCX_MODULE_DIR=.\n",
    ".env": "PYTHONPATH=.\n",
}


class Marker:
    """An object whose pickle makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def put_hostile_files(folder, markers, tools):
    """Fill a folder with files that make a file in the folder `markers` if they are executed, and with settings for
    libraries. tools: a folder of programs that such settings start.
    """
    names = {*sys.stdlib_module_names, *(module.name for module in pkgutil.iter_modules())}
    names |= {"cupy", "tensorboardX", "dotenv", "sitecustomize", "usercustomize", "evil", "__main__", "conftest"}
    code = "open({!r}, 'w')\n"
    for name in names - {"scratchformer"}:
        (folder / f"{name}.py").write_text(code.format(str(markers / name)))
    (folder / "evil.pth").write_text("import evil\n")
    for entry in sys.path:
        if not os.path.isabs(entry) and entry:
            with zipfile.ZipFile(folder / entry, "w") as archive:
                archive.writestr("cupy.py", code.format(str(markers / "archive")))
    for name, text in SETTINGS.items():
        (folder / name).write_text(text)
    for place in folder, tools:
        for name in "latex", "dvipng", "kpsewhich", "nvidia-smi", "mpiexec", "python", "git", "gcc", "ptxas":
            (place / name).write_text(f"#!/bin/sh\necho > {markers / name}\nexit 1\n")
            (place / name).chmod(0o755)
    (tools / "nvidia-smi").unlink()  # `doctor` may start this one, and `python` is the user's
    (tools / "python").unlink()


def put_hostile_caches(folder, markers):
    """Put pickles where Numba would look for the code of this package if settings named the folder "cache"."""
    caching = pytest.importorskip("numba.core.caching")
    for name in "numba_linear", "numba_rows", "numba_extend", "mkl_products":
        importlib.import_module(f"scratchformer.kernels.{name}")
    found = [each for each in gc.get_objects() if isinstance(each, caching.FunctionCache)]
    for each in found:
        file = each._cache_file
        place = folder / "cache" / caching._CacheLocator.get_suitable_cache_subpath(each._impl.locator._py_file)
        place.mkdir(parents=True, exist_ok=True)
        (place / file._index_name).write_bytes(pickle.dumps(Marker(str(markers / "pickle"))))
    assert len(found) > 20


@pytest.fixture(scope="module")
def hostile(enwik8_run, translate_run, text_file, tmp_path_factory):
    """A hostile folder with all that the commands need, the folder of markers, and that of programs."""
    base = tmp_path_factory.mktemp("current")
    folder, markers, tools = (base / name for name in ("folder", "markers", "tools"))
    for each in (markers, tools, folder):
        each.mkdir()
    put_hostile_files(folder, markers, tools)
    put_hostile_caches(folder, markers)
    shutil.copytree(enwik8_run.folder, folder, dirs_exist_ok=True)
    shutil.copytree(translate_run.folder, folder / "translator")
    shutil.copy(text_file, folder / "text.txt")
    for name in "answers", "elsewhere":
        (folder / name).mkdir()
    (folder / "answers" / "relu.py").write_text(exercise("relu").solution)
    (folder / "elsewhere" / "square.py").write_text(OPERATION)
    return folder, markers, tools


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_in_the_current_folder_is_executed(start, environment, hostile, command):
    folder, markers, tools = hostile
    for marker in markers.iterdir():
        marker.unlink()
    without = {name: value for name, value in environment.items() if not name.startswith("NUMBA_")}
    env = without | {"PATH": os.pathsep.join([str(tools), environment["PATH"]])}
    options = {"cwd": folder, "env": env, "stdin": subprocess.DEVNULL}
    _, errors = start("scratchformer", *COMMANDS[command], **options).communicate(timeout=600)
    assert os.listdir(markers) == [], errors
    assert "Traceback" not in errors and (command in REFUSED) == errors.startswith("error: "), errors
