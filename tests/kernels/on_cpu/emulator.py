"""CUDA kernels on a CPU: compiled by g++ with cuda.h, whose threads take turns.

    Kernel(source, "row_sums")((grid,), (block,), (x, y, np.int32(N), np.int32(C)))

What is compiled is kept for the next run in the folder COMPILED, a variable, if it is set. Several processes may share
it.
"""

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
TEMPORARY = tempfile.TemporaryDirectory()
FOLDER = Path(os.environ.get("COMPILED", TEMPORARY.name))
TOGETHER = 40  # kernels in a program
COMPILER = ["g++", "-std=c++17", "-O0", "-w", "-fPIC", f"-I{FOLDER}", f"-I{HERE}"]


@cache
def compile_header():
    """Once, since it takes longer than a kernel: the compiler finds cuda.h.gch in place of cuda.h."""
    for header in "cuda_bf16.h", "cuda_fp16.h":
        (FOLDER / header).touch()
    if not (FOLDER / "cuda.h.gch").exists():
        compile_file("-x", "c++-header", HERE / "cuda.h", to=FOLDER / "cuda.h.gch")


def compile_file(*options, to):
    """Another process that finds the file finds all of it."""
    part = to.with_suffix(f".{os.getpid()}")
    subprocess.run([*COMPILER, *options, "-o", part], check=True)
    part.rename(to)


def key_of(*texts):
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:16]


library_of = cache(ctypes.CDLL)


def compile_together(kernels):
    """Compile kernels as one program, which takes less time than one by one. For each, a file names the library."""
    parts = ['#include "cuda.h"']
    for kernel in kernels:
        source = re.sub(r'#include .*|extern "C"', "", kernel.source)
        undefined = "".join(f"\n#undef {name}" for name in re.findall(r"#define (\w+)", source))
        parts.append(f"""namespace unit{kernel.key} {{
{source}
extern "C" const char* parameters{kernel.key}() {{ return codes({kernel.name}); }}
extern "C" bool call{kernel.key}(const int* sizes, void** arguments) {{
    return launch({kernel.name}, sizes, arguments);
}}
}}{undefined}
""")
    compile_header()
    text = "\n".join(parts)
    program = FOLDER / f"{key_of(text)}.{os.getpid()}.cc"
    program.write_text(text)
    compile_file("-shared", program, to=program.with_suffix(".so"))
    for kernel in kernels:
        named = program.with_suffix(f".{kernel.key}")
        named.write_text(str(program.with_suffix(".so")))
        named.rename(kernel.path)


def compile_what_is_called(checks):
    """Call these functions, first without starting a kernel, to compile together all that they would start."""
    kernels, call = {}, Kernel.__call__
    Kernel.__call__ = lambda kernel, *_: kernels.setdefault(kernel.path, kernel)
    with np.errstate(all="ignore"):
        for check in checks:
            with suppress(AssertionError):
                check()
    Kernel.__call__ = call
    new = [kernel for path, kernel in kernels.items() if not path.exists()]
    for first in range(0, len(new), TOGETHER):
        compile_together(new[first : first + TOGETHER])


def code(dtype):
    """A type as cuda.h writes it; the kind of bfloat16 is V."""
    return {"V": "f", "b": "u"}.get(dtype.kind, dtype.kind) + str(dtype.itemsize)


def plant(code, file, old, new):
    """Make the kernels of a file wrong. code: the module `cupy_code`."""
    source = code.source

    def changed(name, *args, **constants):
        text = source(name, *args, **constants)
        if name == file and old not in text:
            raise LookupError(f"{old!r} is not in {file}.cu")
        return text.replace(old, new) if name == file else text

    code.source = changed


class Kernel:
    """As cupy.RawKernel, for NumPy arrays: a kernel of a CUDA program, which declares it `extern "C"`.

    Raises TypeError for arguments of other types than the kernel's, AssertionError if the threads of a block wait for
    each other for ever. Arrays in shared memory need a fixed size. The only shuffle is __shfl_xor_sync.
    """

    def __init__(self, source, name, options=()):
        self.source, self.name, self.key = source, name, key_of(source, name)
        self.path = FOLDER / self.key

    @cached_property
    def library(self):
        """Its functions (parameters, call)."""
        if not self.path.exists():
            compile_together([self])
        library = library_of(self.path.read_text())
        parameters, call = library[f"parameters{self.key}"], library[f"call{self.key}"]
        parameters.restype, call.restype = ctypes.c_char_p, ctypes.c_bool
        return parameters, call

    def __call__(self, grid, block, arguments):
        given = "".join(f"{'*' * isinstance(a, np.ndarray)}{code(np.asarray(a).dtype)} " for a in arguments)
        parameters, call = self.library
        parameters = parameters().decode()
        if given != parameters:
            raise TypeError(f"{self.name}: expected {parameters}, got {given}")
        sizes = (ctypes.c_int * 4)(*(*grid, 1)[:2], *(*block, 1)[:2])
        values = [np.array(a.ctypes.data if isinstance(a, np.ndarray) else a) for a in arguments]
        at = (ctypes.c_void_p * len(values))(*(a.ctypes.data for a in values))
        assert call(sizes, at), f"the threads of {self.name} wait for each other"
