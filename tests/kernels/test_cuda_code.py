"""The CUDA kernels without a GPU: NVIDIA's compiler takes them, for the processors of three generations."""

import ast
import re
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from scratchformer.notation import check_derivation
from scratchformer.testing import derivations

cupy_code = pytest.importorskip("scratchformer.kernels.cupy_code")
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
REAL = ("float32", "float64")
HALF = ("bfloat16", "float16")
# The types of each file's arrays, and its constants, as the twins set them; W numbers are 16 bytes.
FILES = {
    "attention": ((*REAL, *HALF), lambda W: [{"V": 1, "PER": 0}, {"V": 1, "PER": 1}, {"V": W, "PER": 32 // W}]),
    "column_sums": ((*REAL, *HALF), lambda W: [{"V": 1}, {"V": W}]),
    "cross_entropy": ((*REAL, *HALF), lambda W: [{"V": 1, "THREADS": 32}, {"V": W, "THREADS": 512}]),
    "elementwise": ((*REAL, *HALF), lambda W: [{"V": W, "KIND": kind} for kind in ("RELU", "GELU")]),
    "embedding": ((*REAL, *HALF), lambda W: [{}]),
    "layernorm": (
        (*REAL, *HALF),
        lambda W: [
            dict(C=768, V=W, PER=24 // W, THREADS=32, ROWS=4),
            dict(C=1600, V=W, PER=16 // W, THREADS=128, ROWS=1),
        ],
    ),
    "optimizer": (REAL, lambda W: [{"V": 1}, {"V": W}]),
    "round": (HALF, lambda W: [{"V": 1}, {"V": 4}]),
}


def headers():
    """Where cuda_fp16.h is."""
    runtime = pytest.importorskip("nvidia.cu13")
    found = [path for folder in runtime.__path__ for path in Path(folder).rglob("cuda_fp16.h")]
    if not found:
        pytest.skip("nvidia-cuda-runtime is not installed")
    return found[0].parent


def compiled_size(text, architecture):
    """The bytes of machine code that NVIDIA's compiler makes of a CUDA program."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        status, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernels.cu", 0, None, None)
    except RuntimeError as error:
        pytest.skip(f"nvidia-cuda-nvrtc is not installed: {error}")
    options = ["-std=c++17", f"-arch={architecture}", f"-I{headers()}"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * (size + 1)  # NVRTC writes into it; there is one b" " in the whole process, which must stay as it is
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    return size


def test_every_file_is_compiled():
    assert {path.stem for path in cupy_code.FOLDER.glob("*.cu")} == FILES.keys()


def sources(file, whole):
    """The texts of a file for all types and constants, or for two types and the last constants."""
    types, constants = FILES[file]
    for dtype in types if whole else types[::2] or types:
        some = constants(16 // {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}[dtype])
        yield from (cupy_code.source(file, dtype, **chosen) for chosen in (some if whole else some[-1:]))


# Each program that is compiled: its texts, all of them or some.
PROGRAMS = {file: partial(sources, file) for file in FILES}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_compiler_takes_it(program, architecture, thorough):
    """All texts for the oldest processor, some for the others: none asks for which one it is compiled."""
    for text in PROGRAMS[program](thorough or architecture == ARCHITECTURES[0]):
        assert compiled_size(text, architecture) > 1000


def test_no_file_asks_for_which_processor_it_is_compiled():
    for path in cupy_code.FOLDER.glob("*"):
        assert "__CUDA_ARCH__" not in path.read_text()


def test_every_kernel_is_called():
    calls = "".join(path.read_text() for path in Path(cupy_code.__file__).parent.glob("cupy_*.py"))
    for path in cupy_code.FOLDER.glob("*.cu"):
        names = re.findall(r'extern "C" __global__ void (\w+)\(', path.read_text())
        assert names and all(f'"{name}"' in calls for name in names)


# The twins with equations in their docstrings, which are read from their files, since they cannot be imported without
# CuPy; and the cases of `testing.derivations` that have the names in them.
DERIVED = {
    "adam_step": "adam_step",
    "add": "add.numba",
    "cross_entropy": "cross_entropy.numba",
    "dropout": "dropout.numba",
    "embedding": "embedding.numba",
    "layernorm": "layernorm.numba",
    "round_into": "round_into",
}
OTHERS = {"scale", "sum_of_squares"}  # without equations of their own


def twins():
    """The docstring of each twin, and all statements of its module."""
    found = {}
    for path in Path(cupy_code.__file__).parent.glob("cupy_*.py"):
        tree = ast.parse(path.read_text())
        code = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.stmt)}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and any("cupy.ndarray" in ast.unparse(d) for d in node.decorator_list):
                found[node.name] = ast.get_docstring(node), code
    return found


def as_code(line):
    """A line of a docstring as `ast` writes it, or None if it is not Python."""
    try:
        return ast.unparse(ast.parse(line.strip())) if line.startswith("    ") else None
    except SyntaxError:
        return None


def test_every_twin_has_a_derivation():
    assert twins().keys() == DERIVED.keys() | OTHERS


@pytest.mark.parametrize("name", DERIVED)
def test_the_derivation_is_true(name):
    """Its equations, on the numbers of the twin for a CPU."""
    pytest.importorskip("numba")
    docstring, code = twins()[name]
    text = "\n".join(line for line in docstring.splitlines() if as_code(line) not in code)
    cases = [case for case in derivations.CASES if case.partition(",")[0] == DERIVED[name]]
    assert cases
    for case, seed in product(cases, range(3)):
        found = derivations.CASES[case](derivations.Sizes(seed, 1.0))
        report = check_derivation(
            found.op, found.op_backward, *found.args, names=found.names, docstring=text, **found.options
        )
        assert report.worst < 1e-9 and "compared" in {row.kind for row in report.rows}
