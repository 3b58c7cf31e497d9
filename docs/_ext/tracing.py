"""A trace of a real forward and backward: every call of a layer and of an operation, with its arrays and products.

    call = trace(nn.SelfAttention(24, 4), x)
    call.calls            # query, key, value, attention, unify
    call.backward.flop    # of the matrix products that ran

Nothing in scratchformer knows of it. `sys.setprofile` reports when one of the watched functions starts and returns, and
for the time of the trace `a @ b` and `np.matmul` in operations, twins and layers note the shapes that they multiply.

FLOP. A product of (m, k) and (k, n) counts 2 m n k, times the axes before, from the shapes that were multiplied.
Nothing else is counted: no exponentials, sums or additions, and no product of a matrix and a vector, with which some
twins compute sums.
"""

from __future__ import annotations

import ast
import inspect
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from scratchformer import ops
from scratchformer.dispatch import Twin
from scratchformer.nn import Layer
from scratchformer.rng import Key

PHASES = {"forward": "forward", "loss": "forward", "backward": "backward", "loss_backward": "backward"}
PRODUCT = "_counted_product"  # the name that stands for @ while a trace runs
COUNTED = tuple(f"scratchformer.{part}" for part in ("ops", "kernels", "nn", "models"))
Shape = tuple[int, ...]


@dataclass(eq=False)
class TracedCall:
    """One call of a layer's or an operation's forward, or of its backward."""

    name: str  # "body.blocks.0.attention.query", or the name of the class or operation
    kind: str  # the class of the layer, or the name of the operation
    phase: str  # "forward" or "backward"
    layer: Layer | None  # None for an operation
    twin: bool  # whether a twin ran, not the reference
    arguments: dict[str, Any]
    returned: Any = None
    values: dict[str, Any] = field(default_factory=dict)  # the local variables of an operation when it returned
    products_here: list[tuple[Shape, int]] = field(default_factory=list)  # the shape of each result, and k
    calls: list[TracedCall] = field(default_factory=list)
    backward: TracedCall | None = None  # of a forward call

    def walk(self) -> Iterator[TracedCall]:
        """This call and all below it, in the order in which they started."""
        yield self
        for call in self.calls:
            yield from call.walk()

    def products(self) -> list[tuple[Shape, int]]:
        """The matrix products of this call and all below it: the shape of the result, and the size summed over."""
        return [product for call in self.walk() for product in call.products_here]

    @property
    def flop(self) -> int:
        return sum(2 * math.prod(shape) * k for shape, k in self.products())

    @property
    def output(self) -> Any:
        """The y of a forward, which returns (y, cache); all that a backward returns."""
        return self.returned[0] if self.phase == "forward" else self.returned

    @property
    def cache(self) -> Any:
        return self.returned[1]

    def inputs(self) -> dict[str, np.ndarray]:
        """The arrays that were passed, by name: no parameters, and of a backward only the gradient of the output."""
        first = next(iter(self.arguments))
        given = {first: self.arguments[first]} if self.phase == "backward" else self.arguments
        arrays: dict[str, np.ndarray] = {}
        for name, x in given.items():
            several = dict(zip(given_names(name, x), x, strict=False)) if isinstance(x, tuple) else {name: x}
            arrays |= {n: part for n, part in several.items() if isinstance(part, np.ndarray)}
        trained = {id(owner(p.data)) for p in self.parameters.values()}
        return {name: x for name, x in arrays.items() if id(owner(x)) not in trained}

    def gradients(self) -> dict[str, np.ndarray]:
        """What the backward of an operation returned: "dx" is the gradient of the argument x."""
        returned = self.backward.returned if self.backward else ()
        floating = [name for name, x in self.inputs().items() if x.dtype.kind == "f"]
        parts = returned if isinstance(returned, tuple) else (returned,)
        return {f"d{name}": dx for name, dx in zip(floating, parts, strict=True)}

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """The parameters of the layer and of all below it, each once."""
        return self.layer.named_parameters() if self.layer is not None else {}

    @cached_property
    def kept(self) -> dict[int, np.ndarray]:
        """The blocks of memory in the cache by their ids, without those of the layer's parameters."""
        trained = {id(owner(p.data)) for p in self.parameters.values()}
        return {key: block for key, block in blocks(self.cache).items() if key not in trained}


def trace(layer: Layer, *inputs: Any, loss: bool = False, dy: Any = None, **options: Any) -> TracedCall:
    """The call of `layer.forward(*inputs, **options)`, with that of its backward as `.backward`.

    loss: trace `loss` and `loss_backward` of a model. dy: the gradient of the output, standard normal if not given. The
    gradients of the parameters are set to zero first.
    """
    layer.zero_grad()
    names: dict[int, str] = {}
    for name, part in layer.named_layers():
        names.setdefault(id(part), name)
    with _recording(names) as roots:
        y, cache = (layer.loss if loss else layer.forward)(*inputs, **options)
    (forward,) = roots
    if dy is None:
        dy = 1.0 if loss else _normal_like(y)
    with _recording(names, forward) as roots:
        (layer.loss_backward if loss else layer.backward)(dy, cache)
    (forward.backward,) = roots
    return forward


def trace_operation(op: Callable, op_backward: Callable, *args: Any, dy: Any = None, **options: Any) -> TracedCall:
    """The call of an operation, with that of its backward."""
    with _recording({}) as roots:
        y, cache = op(*args, **options)
    (forward,) = roots
    with _recording({}, forward) as roots:
        op_backward(_normal_like(y) if dy is None else dy, cache)
    (forward.backward,) = roots
    return forward


def _normal_like(y: Any) -> Any:
    if isinstance(y, tuple):
        return tuple(map(_normal_like, y))
    draw = Key(0).fold("dy").generator()
    return draw.standard_normal(y.shape).astype(y.dtype) if y.shape else y.dtype.type(1)


def given_names(name: str, parts: tuple) -> list[str]:
    """Names for the parts of an argument that is a tuple, such as *inputs."""
    return [name] if len(parts) == 1 else [f"{name.removesuffix('s')} {i}" for i in range(1, len(parts) + 1)]


def owner(x: np.ndarray) -> np.ndarray:
    """The array that owns the memory of x."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


def blocks(cache: Any) -> dict[int, np.ndarray]:
    """The blocks of memory that a cache refers to, by their ids; those of the patterns in it too."""
    blocks: dict[int, np.ndarray] = {}
    rest, seen = [cache], set()
    while rest:
        x = rest.pop(0)
        if isinstance(x, np.ndarray):
            whole = owner(x)
            blocks.setdefault(id(whole), x if x.nbytes == whole.nbytes else whole)  # x may have more axes
        elif isinstance(x, tuple | list):
            rest[:0] = x
        elif isinstance(x, Mapping):
            rest[:0] = x.values()
        elif isinstance(x, ops.Pattern) and id(x) not in seen:
            seen.add(id(x))
            rest[:0] = vars(x).values()
    return blocks


@contextmanager
def _recording(names: Mapping[int, str], forward: TracedCall | None = None) -> Iterator[list[TracedCall]]:
    """Collect the outermost calls. forward: the call whose backward this is."""
    roots: list[TracedCall] = []
    stack: list[tuple[FrameType, TracedCall | None]] = []
    known: defaultdict[tuple, list[TracedCall]] = defaultdict(list)
    for call in forward.walk() if forward else ():
        known[_key(call, call.cache)].append(call)

    def top() -> TracedCall | None:
        return next((call for _, call in reversed(stack) if call is not None), None)

    def count(a: np.ndarray, b: np.ndarray, **options: Any) -> np.ndarray:
        y = np.matmul(a, b, **options)
        if a.ndim > 1 and b.ndim > 1 and (call := top()) is not None:
            call.products_here.append((y.shape, a.shape[-1]))
        return y

    def profile(frame: FrameType, event: str, returned: Any) -> None:
        if event == "call" and frame.f_code in watched:
            kind, phase, twin = watched[frame.f_code]
            arguments = dict(frame.f_locals)
            layer = arguments.pop("self", None)
            above = top()
            call = TracedCall(names.get(id(layer)) or kind or type(layer).__name__, kind, phase, layer, twin, arguments)
            call.kind = kind or type(layer).__name__
            if above is not None and (above.layer, above.kind, above.phase) == (layer, call.kind, phase):
                stack.append((frame, None))  # `forward` of a class above, or the reference that a twin falls back to
                return
            (roots if above is None else above.calls).append(call)
            stack.append((frame, call))
        elif event == "return" and stack and stack[-1][0] is frame:
            _, call = stack.pop()
            if call is None:
                return
            call.returned = returned
            call.values = dict(frame.f_locals) if call.layer is None else {}
            if call.phase == "forward":
                known[_key(call, returned[1])].append(call)
            elif before := known[_key(call, _cache_of(call))]:
                before.pop().backward = call  # a layer without a cache may be used several times; the last comes first

    with _counting(count), one_thread():
        watched = _watched()
        previous = sys.getprofile()
        sys.setprofile(profile)
        try:
            yield roots
        finally:
            sys.setprofile(previous)


def one_thread() -> AbstractContextManager:
    """Hold BLAS to one thread: the arrays are small, and on a busy machine its threads wait for each other."""
    return _blas().limit(limits=1, user_api="blas")


@cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController()


def _key(call: TracedCall, cache: Any) -> tuple:
    """What a forward has in common with its backward: its kind, and its cache or, without one, its layer."""
    return call.kind.removesuffix("_backward"), id(call.layer if cache is None else cache)


def _cache_of(backward: TracedCall) -> Any:
    return list(backward.arguments.values())[1]


def _watched() -> dict[CodeType, tuple[str, str, bool]]:
    """The code of every forward and backward: the name of the operation ("" for a layer), the phase, whether a twin."""
    codes = {}
    for op in _operations():
        phase = "backward" if op.__name__.endswith("_backward") else "forward"
        codes[op.reference.__code__] = op.__name__, phase, False
        for twin in _twins(op):
            codes[twin.forward.__code__] = op.__name__, "forward", True
            codes[twin.backward.__code__] = f"{op.__name__}_backward", "backward", True
    for kind in _subclasses(Layer):
        for name, phase in PHASES.items():
            if isinstance(function := vars(kind).get(name), FunctionType):
                codes[inspect.unwrap(function).__code__] = "", phase, False
    return codes


def _operations() -> Iterator[Any]:
    yield from (op for name in ops.__all__ if hasattr(op := getattr(ops, name), "reference"))


def _twins(op: Any) -> list[Twin]:
    """The twins for NumPy arrays that are not in half precision."""
    return [t for t in getattr(op, "chosen", [{}])[0].get(np.ndarray, ()) if not t.forward.__module__.endswith("half")]


def _subclasses(kind: type) -> Iterator[type]:
    yield kind
    for below in kind.__subclasses__():
        yield from _subclasses(below)


@contextmanager
def _counting(count: Callable) -> Iterator[None]:
    """While inside, every matrix product of the project's modules is `count(a, b)`."""
    changed = []
    for function, code in _with_products():
        changed.append((function, function.__code__))
        function.__code__ = code
        function.__globals__[PRODUCT] = count
    try:
        yield
    finally:
        for function, code in changed:
            function.__code__ = code
            function.__globals__.pop(PRODUCT, None)


@cache
def _with_products() -> list[tuple[FunctionType, CodeType]]:
    """Every function that contains a matrix product, with its code compiled to call PRODUCT instead."""
    rewritten = []
    for module in [m for name, m in sys.modules.items() if name.startswith(COUNTED)]:
        tree = _Products().visit(ast.parse(inspect.getsource(module)))
        whole = compile(ast.fix_missing_locations(tree), module.__file__, "exec")
        codes = {(code.co_qualname, code.co_firstlineno): code for code in codes_in(whole)}
        for function in functions_in(module):
            code = codes[function.__code__.co_qualname, function.__code__.co_firstlineno]
            if any(PRODUCT in part.co_names for part in codes_in(code)):
                rewritten.append((function, code))
    return rewritten


class _Products(ast.NodeTransformer):
    """Replaces `a @ b` by PRODUCT(a, b), and `np.matmul` by PRODUCT."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.MatMult):
            return node
        return ast.copy_location(ast.Call(ast.Name(PRODUCT, ast.Load()), [node.left, node.right], []), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr != "matmul":
            return node
        return ast.copy_location(ast.Name(PRODUCT, ast.Load()), node)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def functions_in(module: ModuleType) -> Iterator[FunctionType]:
    """The functions and methods that are defined in a module, and the references and twins among its operations."""
    named = list(vars(module).values())
    named += [value for kind in named if isinstance(kind, type) for value in vars(kind).values()]
    named += [op.reference for op in _operations()]
    named += [f for op in _operations() for twin in _twins(op) for f in (twin.forward, twin.backward)]
    functions = [inspect.unwrap(f) for f in named if isinstance(f, FunctionType)]  # a layer's backward is checked first
    unique = {id(f): f for f in functions if f.__globals__ is vars(module)}
    yield from (f for f in unique.values() if f.__code__.co_filename == module.__file__)
