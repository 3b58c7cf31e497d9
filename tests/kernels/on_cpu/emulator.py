"""CUDA kernels on a CPU: compiled by g++ with cuda.h, whose threads take turns.

    Kernel(source, "row_sums")((grid,), (block,), (x, y, np.int32(N), np.int32(C)))

What is compiled is kept for the next run in the folder COMPILED, a variable, if it is set.
"""

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace

import numpy as np

HERE = Path(__file__).parent
TEMPORARY = tempfile.TemporaryDirectory()
FOLDER = Path(os.environ.get("COMPILED", TEMPORARY.name))
COMPILER = ["g++", "-std=c++17", "-O0", "-w", "-fPIC", f"-I{FOLDER}", f"-I{HERE}"]


@cache
def compile_header():
    """Once, since it takes longer than a kernel: the compiler finds cuda.h.gch in place of cuda.h."""
    for header in "cuda_bf16.h", "cuda_fp16.h":
        (FOLDER / header).write_text("")
    if not (FOLDER / "cuda.h.gch").exists():
        subprocess.run([*COMPILER, "-x", "c++-header", HERE / "cuda.h", "-o", FOLDER / "cuda.h.gch"], check=True)


@cache
def compiled(text):
    path = FOLDER / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        path.with_suffix(".cc").write_text(text)
        compile_header()
        subprocess.run([*COMPILER, "-shared", path.with_suffix(".cc"), "-o", path], check=True)
    return ctypes.CDLL(str(path))


def compile_together(kernels):
    """Compile kernels as one program, which takes less time than one by one."""
    parts = ['#include "cuda.h"']
    for i, kernel in enumerate(kernels):
        source = re.sub(r'#include .*|extern "C"', "", kernel.source)
        undefined = "".join(f"\n#undef {name}" for name in re.findall(r"#define (\w+)", source))
        parts.append(f"""namespace unit{i} {{
{source}
extern "C" const char* parameters{i}() {{ return codes({kernel.name}); }}
extern "C" bool call{i}(const int* sizes, void** arguments) {{ return launch({kernel.name}, sizes, arguments); }}
}}{undefined}
""")
    found = compiled("\n".join(parts))
    for i, kernel in enumerate(kernels):
        parameters, call = found[f"parameters{i}"], found[f"call{i}"]
        parameters.restype, call.restype = ctypes.c_char_p, ctypes.c_bool
        kernel.__dict__["library"] = SimpleNamespace(parameters=parameters, call=call)


def code(dtype):
    """A type as cuda.h writes it; the kind of bfloat16 is V."""
    return {"V": "f", "b": "u"}.get(dtype.kind, dtype.kind) + str(dtype.itemsize)


class Kernel:
    """As cupy.RawKernel, for NumPy arrays: a kernel of a CUDA program, which declares it `extern "C"`.

    Raises TypeError for arguments of other types than the kernel's, AssertionError if the threads of a block wait for
    each other for ever. Arrays in shared memory need a fixed size. The only shuffle is __shfl_xor_sync.
    """

    def __init__(self, source, name, options=()):
        self.source, self.name = source, name

    @cached_property
    def library(self):
        compile_together([self])
        return self.__dict__["library"]

    def __call__(self, grid, block, arguments):
        given = "".join(f"{'*' * isinstance(a, np.ndarray)}{code(np.asarray(a).dtype)} " for a in arguments)
        parameters = self.library.parameters().decode()
        if given != parameters:
            raise TypeError(f"{self.name}: expected {parameters}, got {given}")
        sizes = (ctypes.c_int * 4)(*(*grid, 1)[:2], *(*block, 1)[:2])
        values = [np.array(a.ctypes.data if isinstance(a, np.ndarray) else a) for a in arguments]
        at = (ctypes.c_void_p * len(values))(*(a.ctypes.data for a in values))
        assert self.library.call(sizes, at), f"the threads of {self.name} wait for each other"
