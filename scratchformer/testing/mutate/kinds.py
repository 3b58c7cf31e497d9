"""The kinds of mistake: what can be wrong at one node of a backward's syntax tree.

Each function gets a node and the source, and yields (what, place, text): the kind of mistake in words, the node (or the
bytes) to replace, and by what. A text that does not compile, or changes nothing, is left out later.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from functools import singledispatch
from itertools import combinations, pairwise, permutations
from typing import Any, TypeAlias

from .source import Place, Source

Edits: TypeAlias = Iterator[tuple[str, Place, str]]


def operator_type(text: str) -> type:
    """The class of an operator in a syntax tree: ast.Add for "+"."""
    node: Any = ast.parse(f"a {text} b", mode="eval").body
    return type(node.ops[0] if isinstance(node, ast.Compare) else node.op)


OPERATORS = {
    operator_type(text): text
    for text in (*"+ - * / // % ** @ & | and or > >= < <= == != is in".split(), "is not", "not in")
}


def both_ways(*pairs: str) -> dict[str, str]:
    """Each word of a pair by the other."""
    return {a: b for pair in pairs for a, b in permutations(pair.split())}


EXCHANGED = both_ways("+ -", "* /", "& |", "and or")
OTHER_COMPARISONS = {
    **{">": (">=", "<", "=="), ">=": (">", "<=", "=="), "<": ("<=", ">", "=="), "<=": ("<", ">=", "==")},
    **{"==": ("!=",), "!=": ("==",), "is": ("is not",), "is not": ("is",), "in": ("not in",), "not in": ("in",)},
}
# A function is replaced by another one of the same kind, by its inverse or by its derivative.
OTHER_FUNCTIONS = both_ways(
    "sum mean", "max min", "any all", "maximum minimum", "argmax argmin", "exp log", "sqrt square", "log1p expm1",
    "sin cos", "add subtract", "multiply divide",
)  # fmt: skip
REDUCTIONS = ("sum", "mean", "max", "min", "prod", "any", "all", "cumsum", "amax", "amin")
TRANSPOSES = ("swapaxes", "transpose", "moveaxis", "permute", "flip")
COPIES = ("copy", "clone")
ARGUMENTS_DIFFER = ("matmul", "dot", "outer", "where", "subtract", "divide", "tensordot", "kron", "reshape")
# Calls with one argument whose removal changes no result, or leaves nothing that runs.
NOT_A_STEP = (
    "ascontiguousarray",
    "asarray",
    "contiguous",
    "tuple",
    "list",
    "dict",
    "set",
    "len",
    "range",
    "type",
    "iter",
)
MODULE_OF = ("array_module", "get_array_module", "array_namespace")  # which library an array belongs to


@singledispatch
def edits(node: ast.AST, source: Source) -> Edits:
    """(what, place, text) of each mistake that can be made at this node."""
    yield from ()


@edits.register
def of_operation(node: ast.BinOp, source: Source) -> Edits:
    operator = OPERATORS.get(type(node.op), "")
    left, right = source.text(node.left), source.text(node.right)
    lost = "a term dropped" if operator in ("+", "-") else "a factor lost"
    if operator in ("+", "-", "*", "/", "//", "%", "**"):
        yield "a power lost" if operator == "**" else lost, node, left
    if operator == "**" and isinstance(node.right, ast.Name):
        yield "off by one", node.right, f"({node.right.id} + 1)"
    if operator in ("+", "*"):
        yield lost, node, right
    if operator == "-":
        yield lost, node, f"-{source.atom(node.right)}"
    yield from another_operator(node, node.left, node.right, operator, source)
    yield from of_product(node, source)


def another_operator(node: ast.expr, left: ast.expr, right: ast.expr, operator: str, source: Source) -> Edits:
    if new := EXCHANGED.get(operator):
        what = "a sign flipped" if operator in ("+", "-") else f"{operator} turned into {new}"
        yield what, node, source.with_part(node, source.operator(left, right, operator), new)


def of_product(node: ast.BinOp, source: Source) -> Edits:
    if not isinstance(node.op, ast.MatMult):
        return
    yield "operands exchanged", node, f"{source.atom(node.right)} @ {source.atom(node.left)}"
    for operand in (node.left, node.right):
        if not is_transpose(operand):
            yield "a transpose added", operand, f"{source.atom(operand)}.swapaxes(-1, -2)"


def is_transpose(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr in TRANSPOSES
    return isinstance(node, ast.Attribute) and node.attr in ("T", "mT")


@edits.register
def of_sign(node: ast.UnaryOp, source: Source) -> Edits:
    if isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield "a sign flipped", node, source.text(node.operand)
    if isinstance(node.op, (ast.Not, ast.Invert)):
        yield "a condition negated", node, source.text(node.operand)


@edits.register
def of_comparison(node: ast.Compare, source: Source) -> Edits:
    sides = [node.left, *node.comparators]
    for i, kind in enumerate(node.ops):
        operator = OPERATORS[type(kind)]
        place = source.operator(sides[i], sides[i + 1], operator)
        for new in OTHER_COMPARISONS[operator]:
            yield f"{operator} turned into {new}", node, source.with_part(node, place, new)


@edits.register
def of_logic(node: ast.BoolOp, source: Source) -> Edits:
    yield from another_operator(node, node.values[0], node.values[1], OPERATORS[type(node.op)], source)
    for value in node.values:
        yield "a condition lost", node, source.text(value)


@edits.register
def of_condition(node: ast.If | ast.IfExp, source: Source) -> Edits:
    if isinstance(node.test, (ast.Name, ast.Attribute, ast.Call)):
        yield "a condition negated", node.test, f"not {source.text(node.test)}"
    if isinstance(node, ast.IfExp):
        yield "a case left out", node, source.text(node.body)
        yield "a case left out", node, source.text(node.orelse)
    elif not node.orelse:
        yield "a statement deleted", node, "pass"


@edits.register
def of_number(node: ast.Constant, source: Source) -> Edits:
    if not isinstance(node.value, (int, float)) or isinstance(node.value, bool) or is_axis(node, source):
        return
    place: ast.expr = node
    parent, value = source.parents[node], node.value
    if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.USub):
        place, value = parent, -value
    if value == -1 and isinstance(call := source.parents[place], ast.Call) and called(call) in ("reshape", "view"):
        return  # not a number but "as many as fit"
    if isinstance(value, int):
        yield "off by one", place, repr(value + 1)
        yield "off by one", place, repr(value - 1)
    elif value == 0:
        yield "another number", place, "1.0"
    if value and not isinstance(source.parents[place], (ast.Subscript, ast.Slice)):
        yield "a number doubled", place, repr(2 * value)


def is_axis(node: ast.expr, source: Source) -> bool:
    """Whether this number is an axis, alone or in a tuple."""
    while isinstance(parent := source.parents[node], (ast.UnaryOp, ast.Tuple)):
        node = parent
    if isinstance(parent, ast.keyword):
        return parent.arg in ("axis", "axes", "dim", "dims")
    return isinstance(parent, ast.Call) and called(parent) in (*TRANSPOSES, *REDUCTIONS) and node is not parent.func


def called(node: ast.Call) -> str:
    """The last name of what is called: "sum" of x.sum(0) and of np.sum(x, 0)."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def operand(node: ast.Call, source: Source) -> str:
    """What a call such as x.sum(0), np.sum(x, 0), exp(x) computes with: x; "" if that is not clear."""
    if is_method(node, source):
        return source.text(node.func.value)  # type: ignore[attr-defined]
    return source.text(node.args[0]) if node.args and not isinstance(node.args[0], ast.Starred) else ""


def is_method(node: ast.Call, source: Source) -> bool:
    """Whether this is a call of an array's method, x.sum(0), rather than of a module's function, np.sum(x, 0).

    A module is a name that is not local, or the local name of an array module.
    """
    if not isinstance(node.func, ast.Attribute):
        return False
    base = node.func.value
    while isinstance(base, ast.Attribute):
        base = base.value
    return not isinstance(base, ast.Name) or (base.id in source.bound and base.id not in ("xp", "np", "numpy", "torch"))


def of_reduction(node: ast.Call, source: Source) -> Edits:
    if called(node) not in REDUCTIONS or not operand(node, source) or isinstance(node.func, ast.Name):
        return
    yield "a reduction dropped", node, operand(node, source)
    axes = [word.value for word in node.keywords if word.arg in ("axis", "dim")]
    axes += node.args[0 if is_method(node, source) else 1 :][:1]
    for axis in axes:
        for new in other_axes(axis, source):
            yield "axis changed", axis, new
    for word in node.keywords:
        if word.arg in ("axis", "dim"):
            yield "axis left out", without(node, word, source), ""


def other_axes(axis: ast.expr, source: Source) -> list[str]:
    """Axes to reduce over instead of these."""
    if isinstance(axis, ast.Tuple):
        elements = [source.text(e) for e in axis.elts]
        shorter = [elements[:i] + elements[i + 1 :] for i in range(len(elements))]
        return [f"({', '.join(rest)}{',' * (len(rest) == 1)})" for rest in shorter if rest]
    try:
        number = ast.literal_eval(axis)
    except ValueError:
        return ["0", "-1"]
    return {-1: ["-2", "0"], 0: ["1", "-1"]}.get(number, [str(number + 1), str(number - 1)])


def without(node: ast.Call, word: ast.keyword, source: Source) -> tuple[int, int]:
    """The place of a keyword argument together with the comma beside it."""
    items: list[ast.AST] = [*node.args, *node.keywords]
    number = items.index(word)
    start, end = source.span(word)
    if number:
        return source.end(items[number - 1]), end
    return (start, source.start(items[1])) if len(items) > 1 else (start, end)


@edits.register
def of_keepdims(node: ast.keyword, source: Source) -> Edits:
    if node.arg in ("keepdims", "keepdim") and isinstance(node.value, ast.Constant):
        yield "keepdims flipped", node.value, str(not node.value.value)


def of_transpose(node: ast.expr, source: Source) -> Edits:
    if not is_transpose(node):
        return
    if isinstance(node, ast.Attribute):
        yield "a transpose dropped", node, source.text(node.value)
    elif isinstance(node, ast.Call):
        yield "a transpose dropped", node, operand(node, source)
        method = is_method(node, source)
        orders = node.args if method else node.args[1:]
        if len(orders) == 1 and isinstance(orders[0], ast.Tuple):
            orders = orders[0].elts
        for a, b in combinations(orders, 2) if len(orders) > 2 else ():
            yield "axes exchanged", node, source.exchanged(node, a, b)


@edits.register
def of_call(node: ast.Call, source: Source) -> Edits:
    yield from of_reduction(node, source)
    yield from of_transpose(node, source)
    name = called(node)
    new = OTHER_FUNCTIONS.get(name)
    if new and (hasattr(math, new) or not source.text(node.func).startswith("math.")):
        end = source.end(node.func)
        yield f"{name} turned into {new}", (end - len(name), end), new
    if name in COPIES:
        yield "a copy left out", node, operand(node, source)
    elif name == "astype":
        yield "a conversion left out", node, operand(node, source)
    elif is_step(node, source):
        yield "a function left out", node, source.text(node.args[0])
    if name in ("maximum", "minimum", "where", "clip") or (name in ("max", "min") and isinstance(node.func, ast.Name)):
        for argument in node.args[1 if name == "where" else 0 :][:2]:
            yield "a case left out", node, source.text(argument)
    if name == "range" or (name in ARGUMENTS_DIFFER and not node.keywords):
        first = 1 if name in ("where", "reshape") and not is_method(node, source) else 0
        for a, b in pairwise(node.args[first:]):
            yield "arguments exchanged", node, source.exchanged(node, a, b)
    if name == "range":
        for argument in node.args:
            yield "off by one", argument, f"{source.atom(argument)} - 1"
    if name == "einsum" and isinstance(node.args[0], ast.Constant):
        yield from of_einsum(node.args[0], source)


def is_step(node: ast.Call, source: Source) -> bool:
    """Whether this is f(x) or np.f(x), possibly with out=..."""
    if is_method(node, source) or called(node) in (*NOT_A_STEP, *MODULE_OF, *REDUCTIONS, *TRANSPOSES):
        return False
    return len(node.args) == 1 and not isinstance(node.args[0], (ast.Starred, ast.GeneratorExp)) and not node.keywords


def of_einsum(node: ast.Constant, source: Source) -> Edits:
    """Neighbouring letters of an operand or of the result exchanged."""
    text = source.text(node)
    for i, (a, b) in enumerate(pairwise(text)):
        if a.isalpha() and b.isalpha():
            yield "letters exchanged", node, text[:i] + b + a + text[i + 2 :]


@edits.register
def of_name(node: ast.Name, source: Source) -> Edits:
    if not isinstance(node.ctx, ast.Load) or node.id not in source.bound:
        return
    parent = source.parents[node]
    if isinstance(parent, ast.Call) and (parent.func is node or called(parent) in MODULE_OF or is_like(parent)):
        return
    if isinstance(parent, ast.Attribute) and parent.attr in ("dtype", "device"):  # which like arrays share
        return
    if isinstance(source.statement(node), ast.Return):  # where gradients are exchanged
        return
    for other, where in source.bound.items():
        if where <= source.start(node) and alike(node.id, other):
            yield f"{other} for {node.id}", node, other


def is_like(node: ast.Call) -> bool:
    """Whether this is a call such as zeros_like(x), which takes no number from x."""
    return called(node) in ("empty_like", "zeros_like", "ones_like")


def alike(a: str, b: str) -> bool:
    """Whether two names are alike, as q and k, dy and y, sum_dk and sum_dv, T and S."""
    if a == b:
        return False
    if f"d{a}" == b or f"d{b}" == a:
        return True
    if len(a) == 1 and len(b) == 1:
        return a.isupper() == b.isupper()
    differing = [i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
    return len(a) == len(b) and len(differing) == 1


@edits.register
def of_field(node: ast.Attribute, source: Source) -> Edits:
    """Another field of the same cache, among those that the function uses."""
    yield from of_transpose(node, source)
    if not isinstance(node.ctx, ast.Load) or not isinstance(node.value, ast.Name):
        return
    if node.value.id not in ("cache", "ctx", "self") or isinstance(source.parents[node], ast.Call):
        return
    fields = [
        other.attr
        for other in source.nodes
        if isinstance(other, ast.Attribute) and isinstance(other.value, ast.Name) and other.value.id == node.value.id
    ]
    for other in dict.fromkeys(fields):
        if other != node.attr:
            yield f"{other} for {node.attr}", node, f"{source.text(node.value)}.{other}"


@edits.register
def of_subscript(node: ast.Subscript, source: Source) -> Edits:
    if isinstance(node.slice, ast.Tuple):
        for a, b in pairwise(node.slice.elts):
            yield "indices exchanged", node, source.exchanged(node, a, b)


@edits.register
def of_slice(node: ast.Slice, source: Source) -> Edits:
    for bound in (node.lower, node.upper):
        if bound is None:
            continue
        yield "a bound left out", source.span(bound), ""
        if not isinstance(bound, (ast.Constant, ast.UnaryOp)):
            yield "off by one", bound, f"{source.text(bound)} - 1"
            yield "off by one", bound, f"{source.text(bound)} + 1"


@edits.register
def of_assignment(node: ast.AugAssign, source: Source) -> Edits:
    operator = OPERATORS.get(type(node.op), "")
    place = source.operator(node.target, node.value, f"{operator}=")
    yield f"{operator}= turned into =", place, "="
    if new := EXCHANGED.get(operator):
        yield f"{operator}= turned into {new}=", place, f"{new}="
    yield "a statement deleted", node, "pass"


@edits.register
def of_storing(node: ast.Assign, source: Source) -> Edits:
    (target, *more) = node.targets
    if more or isinstance(target, ast.Tuple):
        return
    if isinstance(target, ast.Name) and not source.bound.get(target.id, source.start(node)) < source.start(node):
        return
    yield "= turned into +=", source.operator(target, node.value, "="), "+="
    yield "a statement deleted", node, "pass"


@edits.register
def of_statement(node: ast.Expr, source: Source) -> Edits:
    yield "a statement deleted", node, "pass"
    if isinstance(node.value, ast.Call) and len(node.value.args) == 3:
        function = node.value.func
        if isinstance(function, ast.Attribute) and function.attr == "at" and isinstance(function.value, ast.Attribute):
            array, indices, values = map(source.text, node.value.args)
            operator = {"add": "+=", "subtract": "-=", "multiply": "*="}.get(function.value.attr, "=")
            yield "repeated indices counted once", node, f"{array}[{indices}] {operator} {values}"


@edits.register
def of_return(node: ast.Return, source: Source) -> Edits:
    """Two gradients exchanged, or one in the place of another; the sign of a single one."""
    if node.value is None:
        return
    tuples = [t for t in ast.walk(node.value) if isinstance(t, ast.Tuple) and not is_index(t, source)]
    for group in tuples:
        for a, b in combinations(group.elts, 2):
            yield "gradients exchanged", group, source.exchanged(group, a, b)
    if not tuples and isinstance(node.value, (ast.Name, ast.Call, ast.BinOp)):
        yield "a sign flipped", node.value, f"-{source.atom(node.value)}"


def is_index(node: ast.expr, source: Source) -> bool:
    return isinstance(source.parents[node], ast.Subscript) or is_axis(node, source)


@edits.register
def of_sequences(node: ast.comprehension, source: Source) -> Edits:
    """Two neighbouring items exchanged in the tuple that a comprehension runs over."""
    if isinstance(node.iter, ast.Tuple):
        for a, b in pairwise(node.iter.elts):
            yield "items exchanged", node.iter, source.exchanged(node.iter, a, b)
