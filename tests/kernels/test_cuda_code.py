"""The CUDA kernels without a GPU: NVIDIA's compiler takes them, for the processors of three generations."""

import re
from functools import partial
from pathlib import Path

import pytest

from scratchformer import ops
from scratchformer.compiler import CompileError
from scratchformer.compiler.cuda_code import BITS, BITS_AT, cuda_source
from scratchformer.compiler.derivation import Derivation
from scratchformer.compiler.in_place import IN_PLACE
from scratchformer.compiler.show import loops_of
from scratchformer.ops.rounding import round_into
from scratchformer.optim.adam import adam_step
from scratchformer.optim.optimizer import scale

cupy_code = pytest.importorskip("scratchformer.kernels.cupy_code")
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
REAL = ("float32", "float64")
HALF = ("bfloat16", "float16")
# The types of each file's arrays, and its constants, as the twins set them; W numbers are 16 bytes.
FILES = {
    "attend": ((*REAL, *HALF), lambda W: [{"V": 1, "KEYS": 1, "D": 1}, {"V": W, "KEYS": 2, "D": 64}]),
    "attention": (
        (*REAL, *HALF),
        lambda W: [{"V": 1, "PER": 0}, {"V": 1, "PER": 1}, {"V": W, "PER": 32 // W, "MASKED": 1}],
    ),
    "column_sums": ((*REAL, *HALF), lambda W: [{"V": 1}, {"V": W}]),
    "elementwise": ((*REAL, *HALF), lambda W: [{"V": W}]),
    "embedding": ((*REAL, *HALF), lambda W: [{}]),
    "multiply": (
        (*REAL, *HALF),
        lambda W: [
            {"V": 1, "ROWS": 1, "LANES": 8, "OUT": "T"},
            {"V": W, "ROWS": 1, "LANES": 2, "OUT": "T"},
            {"V": W, "ROWS": 4, "LANES": 2, "OUT": "REAL"},
        ],
    ),
    "optimizer": (REAL, lambda W: [{"V": 1}, {"V": W}]),
}


def sources_of_plans():
    """The source of each kernel that is made from a derivation, by name."""
    found = {}
    for name in ops.__all__:
        op, op_backward = getattr(ops, name), getattr(ops, f"{name}_backward", None)
        if hasattr(op, "reference") and op_backward is not None:
            try:
                found |= {plan.name: source for plan, source in loops_of(op, op_backward, "cuda")}
            except CompileError:
                continue
            plus = Derivation(op.reference, op_backward.reference, op.gives).compile().plus
            found |= {} if plus is None else {plus.name: cuda_source(plus)}
    for op in (adam_step, scale, round_into):
        found |= {plan.name: source for plan, source in loops_of(op, None, "cuda")}
    for op in IN_PLACE:
        plan = Derivation(op.reference, None).compile().forward
        found[f"{plan.name}, pieces"] = cuda_source(plan, pieces=True)
    recorded = {f"recorded_{name}": (name, source) for name, source in found.items() if BITS in source}
    assert recorded
    return found | {new: source.replace(BITS, BITS_AT).replace(name, new) for new, (name, source) in recorded.items()}


GENERATED = sources_of_plans()


def headers():
    """Where cuda_fp16.h is."""
    runtime = pytest.importorskip("nvidia.cu13")
    found = [path for folder in runtime.__path__ for path in Path(folder).rglob("cuda_fp16.h")]
    if not found:
        pytest.skip("nvidia-cuda-runtime is not installed")
    return found[0].parent


def compiled(text, *options):
    """The bindings of NVIDIA's compiler, and a CUDA program that it has compiled with these options."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        status, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernels.cu", 0, None, None)
    except RuntimeError as error:
        pytest.skip(f"nvidia-cuda-nvrtc is not installed: {error}")
    options = ["-std=c++17", f"-I{headers()}", *options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * (size + 1)  # NVRTC writes into it; there is one b" " in the whole process, which must stay as it is
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    return nvrtc, program


def compiled_size(text, architecture, *options):
    """The bytes of machine code that NVIDIA's compiler makes of a CUDA program."""
    nvrtc, program = compiled(text, f"-arch={architecture}", *options)
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


def generated(whole):
    """All kernels that are made from derivations, together, for each type or for one."""
    text = "\n".join(GENERATED.values())
    for dtype in (*HALF, *REAL)[: None if whole else 1]:
        V = 16 // {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}[dtype]
        constants = dict(THREADS=32, ROWS=4, PER=32 // V) if dtype in HALF else dict(THREADS=512, ROWS=1, PER=2)
        constants["WHOLE"] = int(dtype in HALF)
        yield cupy_code.program(text, dtype, V=V, **constants)


# Each program that is compiled: its texts, all of them or some.
PROGRAMS = {file: partial(sources, file) for file in FILES} | {"generated": generated}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_compiler_takes_it(program, architecture, thorough):
    """All texts for the oldest processor, some for the others: none asks for which one it is compiled.

    Code that is optimised little is made in a quarter of the time.
    """
    options = [] if thorough else ["--Ofast-compile=max"]
    for text in PROGRAMS[program](thorough or architecture == ARCHITECTURES[0]):
        assert compiled_size(text, architecture, *options) > 1000


def test_no_file_asks_for_which_processor_it_is_compiled():
    for path in cupy_code.FOLDER.glob("*"):
        assert "__CUDA_ARCH__" not in path.read_text()


def test_every_kernel_is_called():
    calls = "".join(path.read_text() for path in Path(cupy_code.__file__).parent.glob("cupy_*.py"))
    for path in cupy_code.FOLDER.glob("*.cu"):
        names = re.findall(r'extern "C" __global__ void (?:__launch_bounds__\(\w+\)\s+)?(\w+)\(', path.read_text())
        assert names and all(f'"{name}"' in calls for name in names)


def test_only_these_operations_run_without_kernels():
    """All others have a derivation that is compiled, or a twin that is written by hand."""
    text = "".join(path.read_text() for path in Path(cupy_code.__file__).parent.glob("cupy_*.py"))
    by_hand = set(re.findall(r"^ops\.(\w+)\.add_twin\(cupy\.ndarray", text, re.MULTILINE))
    names = [name for name in ops.__all__ if hasattr(getattr(ops, f"{name}_backward", None), "reference")]
    assert {name for name in names if name not in GENERATED} - by_hand == {"relative_shift"}
