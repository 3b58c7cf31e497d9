"""A failing check as a test that can be pasted: arguments as short literals, with the imports they need."""

from __future__ import annotations

import builtins
import dataclasses
import keyword
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ..backend import CPU, Device
from ..rng import Key
from .contracts import CheckCall, is_array
from .runs import argument_names, name_of
from .shrink import library, values

_WIDTH = 100
_MANY = 20  # zeros, which are not written one by one
_MODULES = {"np": "numpy", "torch": "torch", "jnp": "jax.numpy", "cp": "cupy"}  # by the names they are used by


class Pasted(NamedTuple):
    """The source of a test, the call in one line, and what the source lacks.

    missing: one sentence for each thing that cannot be imported, such as a local function.
    folders: where Python found the imported modules, except installed packages.
    """

    source: str
    call: str
    missing: tuple[str, ...]
    folders: tuple[str, ...]


def as_test(check: Callable, args: Sequence[Any], options: Mapping[str, Any] | None = None, name: str = "") -> str:
    """The source of a test, `test_{name}`, that calls `check(*args, **options)`.

    Functions and classes are imported by module and name. What cannot be imported, such as a local function or a layer,
    is named in a comment: such a test belongs where they are defined.
    """
    return paste(CheckCall(check, tuple(args), dict(options or {})), name).source


def paste(call: CheckCall, name: str = "", comment: str = "") -> Pasted:
    """The source of a test that repeats `call`, and what is known about it; `comment` is put after the call."""
    check, args, options = call
    source = _Source()
    names = _names(check, args)
    lines, written = [], []
    for argument, x in zip(names, args, strict=True):
        if is_array(x):
            lines.append(f"{argument} = {source.literal(x, len(argument) + 7)}")
            written.append(argument)
        else:
            written.append(source.literal(x, argument=argument))
    for option, x in options.items():
        written.append(f"{option}={source.literal(x, argument=option)}")
    lines.append(f"{source.literal(check)}({', '.join(written)})" + f"  # {comment}" * bool(comment))
    body = "\n    ".join(lines)
    head = [*(f"# {sentence}" for sentence in source.missing), *source.import_lines()]
    named = re.sub(r"\W+", "_", name or name_of(args[0] if args else check)).strip("_") or "counterexample"
    text = "\n".join([*head, "", "", f"def test_{named}():", f"    {body}", ""])
    inline = {argument: source.literal(x) for argument, x in zip(names, args, strict=True) if is_array(x)}
    one_line = f"{name_of(check)}({', '.join(' '.join(inline.get(w, w).split()) for w in written)})"
    return Pasted(text, one_line, tuple(source.missing), tuple(source.folders))


def _names(check: Callable, args: Sequence[Any]) -> list[str]:
    """Names for the arguments: those of the operation or of the layer's forward, after those of the check itself."""
    of_check = argument_names(check, tuple(args))
    first = next((i for i, name in enumerate(of_check) if name.endswith("]")), len(of_check))
    target = getattr(args[0], "forward", args[0]) if args else check
    bound = (None,) * isinstance(args[0] if args else None, type)  # ctx of an autograd.Function of PyTorch
    rest = argument_names(target, (*bound, *args[first:]))[len(bound) :]
    taken = {*keyword.kwlist, *dir(builtins), *_MODULES, *map(name_of, filter(callable, (check, *args)))}
    names: list[str] = []
    for name in of_check[:first] + rest:
        name = re.sub(r"\W+", "_", name).strip("_")
        names.append(f"{name}_" if name in taken else name)
        taken.add(names[-1])
    return names


class _Source:
    """Writes values as Python source, and remembers what to import and what cannot be imported."""

    def __init__(self) -> None:
        self.imports: dict[str, str] = {}  # name: module
        self.modules: dict[str, str] = {}  # module: the name it is used by
        self.missing: list[str] = []
        self.folders: list[str] = []

    def import_lines(self) -> list[str]:
        by_module: dict[str, list[str]] = {}
        for name, module in self.imports.items():
            by_module.setdefault(module, []).append(name)
        lines = [f"import {module}" + f" as {name}" * (name != module) for module, name in self.modules.items()]
        return sorted(lines) + [f"from {m} import {', '.join(sorted(names))}" for m, names in sorted(by_module.items())]

    def literal(self, x: Any, indent: int = 4, argument: str = "") -> str:
        """The source of `x`. What has none is called `argument`, or by its own name, and noted in `missing`."""
        if is_array(x):
            return self._array(x, indent)
        if isinstance(x, float) and not np.isfinite(x):
            return f'float("{x}")'
        if x is None or type(x) in (bool, int, float, complex, str, bytes):
            return repr(x)
        if isinstance(x, np.generic):
            self.modules["numpy"] = "np"
            return repr(x)
        if type(x) in (tuple, list):
            parts = ", ".join(self.literal(part, argument=argument) for part in x)
            return f"[{parts}]" if isinstance(x, list) else f"({parts}{',' * (len(x) == 1)})"
        if isinstance(x, dict):
            return f"{{{', '.join(f'{self.literal(k)}: {self.literal(v)}' for k, v in x.items())}}}"
        if type(x) is Key:
            return f"{self._imported(Key)}({', '.join(map(str, x.words))})"
        if x is CPU:
            self.imports["CPU"] = "scratchformer"
            return "CPU"
        if isinstance(x, Device):
            self.imports["get_device"] = "scratchformer"
            return f"get_device({x.name!r})"
        if isinstance(x, np.dtype):
            return self._type(x)
        return self._imported(x) or self._made(x) or self._lacks(x, argument)

    def _array(self, x: Any, indent: int) -> str:
        numbers = values(x)
        name = {"torch": "torch", "jax": "jnp", "cupy": "cp"}.get(library(x), "np")
        self.modules[_MODULES[name]] = name
        head = f"{name}.{'tensor' if name == 'torch' else 'array'}("
        text = np.array2string(
            numbers,
            separator=", ",
            threshold=sys.maxsize,
            max_line_width=_WIDTH,
            prefix=" " * (indent + len(head)),
            formatter={"all": str},
        )
        if not numbers.size or (numbers.size > _MANY and not numbers.any()):
            other = f", dtype={self._type(x.dtype)}" if name == "np" and x.dtype != np.float64 else ""
            return f"{name}.zeros({numbers.shape}{self._dtype(x, name) or other})"
        one_line = " ".join(text.split())
        return f"{head}{one_line if len(one_line) <= _WIDTH else text}{self._dtype(x, name)})"

    def _dtype(self, x: Any, name: str) -> str:
        if name == "np":
            usual = x.dtype in (np.float64, np.int64, np.bool_)
            return "" if usual else f", dtype={self._type(x.dtype)}"
        return f", dtype={name}.{str(x.dtype).rpartition('.')[2]}"

    def _type(self, dtype: np.dtype) -> str:
        if dtype.type.__module__ == "numpy":
            self.modules["numpy"] = "np"
            return f"np.{dtype.type.__name__}"
        return self._imported(dtype.type) or f'"{dtype}"'

    def _imported(self, x: Any) -> str:
        """A name under which `x` can be imported, or an empty string; `Class.method` for a method of a class."""
        if isinstance(x, ModuleType):
            self.modules[x.__name__] = x.__name__
            return x.__name__
        owner = getattr(x, "__self__", None)
        if isinstance(owner, type) and getattr(owner, getattr(x, "__name__", ""), None) == x:
            class_name = self._imported(owner)
            return f"{class_name}.{x.__name__}" if class_name else ""
        name, module = getattr(x, "__qualname__", ""), getattr(x, "__module__", None) or ""
        outer = name.partition(".")[0]
        public = [m for m in _shorter(module) if _lookup(m, name) is x]
        if not name or not public or module == "__main__" or self.imports.get(outer, public[0]) != public[0]:
            return ""
        if public[0] == "builtins":
            return name
        if public[0] == "numpy":
            self.modules["numpy"] = "np"
            return f"np.{name}"
        self.imports[outer] = public[0]
        self._remember_folder(public[0])
        return name

    def _made(self, x: Any) -> str:
        """The call of its class for a dataclass or a named tuple, or an empty string."""
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            parts = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if f.init}
        elif isinstance(x, tuple) and hasattr(x, "_asdict"):
            parts = x._asdict()
        else:
            return ""
        class_name = self._imported(type(x))
        arguments = (f"{n}={self.literal(v, argument=n)}" for n, v in parts.items())
        return class_name and f"{class_name}({', '.join(arguments)})"

    def _lacks(self, x: Any, argument: str) -> str:
        """A name for what cannot be imported; says in `missing` what it is."""
        name = getattr(x, "__name__", "")
        name = name if name.isidentifier() else argument or "value"
        code = getattr(x, "__code__", None)
        if code:
            what = f"cannot be imported (it is defined in {Path(code.co_filename).name}, line {code.co_firstlineno})"
        else:
            what = f"cannot be written out (it is a {type(x).__name__})"
        sentence = f"{name} {what}: define it here as in the test that failed."
        if sentence not in self.missing:
            self.missing.append(sentence)
        return name

    def _remember_folder(self, module: str) -> None:
        """Note the folder from which Python imports a module, unless the module belongs to an installed package."""
        file = getattr(sys.modules[module], "__file__", None) or "site-packages"
        if "site-packages" in file or module.partition(".")[0] in (*sys.stdlib_module_names, "scratchformer"):
            return
        path = Path(file).resolve()
        path = path.parent if path.name == "__init__.py" else path
        folder = str(path.parents[module.count(".")])
        if folder not in self.folders:
            self.folders.append(folder)


def _shorter(module: str) -> list[str]:
    """The packages that contain a module of this package, outermost first, and the module; any other module alone."""
    if not module.startswith("scratchformer."):
        return [module]
    parts = module.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]


def _lookup(module: str, name: str) -> Any:
    """What `name` is in a module that has been imported, or None."""
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value
