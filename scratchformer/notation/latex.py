"""Syntax trees as LaTeX, for KaTeX and MathJax."""

from __future__ import annotations

from collections.abc import Sequence

from .grammar import CALLS, GREEK, Condition, Equation, Node

SPELLED = {name: letter for letter, name in GREEK.items()}
PLAIN = {
    "omicron": "o",
    "Omicron": "O",
    "Alpha": "A",
    "Beta": "B",
    "Epsilon": "E",
    "Zeta": "Z",
    "Eta": "H",
    "Iota": "I",
}
PLAIN |= {"Kappa": "K", "Mu": "M", "Nu": "N", "Rho": "P", "Tau": "T", "Chi": "X", "ell": r"\ell"}
RELATIONS = {"=": "=", ":=": ":=", "<": "<", ">": ">", "≤": r"\le", "≥": r"\ge", "≠": r"\ne"}
OPERATORS = {"+": "+", "-": "-", "mod": r"\bmod"}
# How tightly a node holds together: a part that is looser than its place needs parentheses.
SUM, PRODUCT, FACTOR = range(3)


def latex(tree: Node | Equation) -> str:
    """The LaTeX of a syntax tree or of a whole equation."""
    if not isinstance(tree, Equation):
        return expression(tree)
    text = expression(tree.parts[0])
    for part, relation in zip(tree.parts[1:], tree.relations, strict=True):
        text += f" {RELATIONS[relation]} {expression(part)}"
    if tree.bindings:
        bound = ", ".join(f"{letter} = {expression(node)}" for letter, node in tree.bindings)
        text += rf" \quad\text{{with }} {bound}"
    if tree.conditions:
        text += rf" \quad\text{{for }} {conditions(tree.conditions)}"
    return text


def lines(equation: Equation) -> str:
    """A chain of equalities as aligned lines; an equation with one relation as one line."""
    if len(equation.relations) == 1:
        return latex(equation)
    left, *rest = equation.parts
    rows = [f"{RELATIONS[r]} {expression(part)}" for r, part in zip(equation.relations, rest, strict=True)]
    text = expression(left) + " &" + r" \\ &".join(rows)
    tail = latex(equation._replace(parts=equation.parts[:1], relations=()))[len(expression(left)) :]
    return rf"\begin{{aligned}} {text}{tail} \end{{aligned}}"


def letter(name: str) -> str:
    """A name without its d: Greek letters, hats and numbers as such, words upright."""
    if name.endswith("hat") and len(name) > 3:
        return rf"\hat{{{letter(name[:-3])}}}"
    base = name.rstrip("0123456789")
    number = name[len(base) :]
    if base in PLAIN:
        base = PLAIN[base]
    elif base in SPELLED:
        base = rf"\{base}"
    elif len(base) > 1:
        base = r"\mathrm{" + base.replace("_", r"\_") + "}"
    return f"{base}_{{{number}}}" if number else base


def name(spelled: str) -> str:
    """A name: dx is an upright d and x."""
    known = spelled.rstrip("0123456789") in SPELLED
    gradient = spelled.startswith("d") and len(spelled) > 1 and not known and spelled not in ("density", "distance")
    return rf"\mathrm{{d}}{letter(spelled[1:])}" if gradient else letter(spelled)


def indices(nodes: Sequence[Node]) -> str:
    separator = "" if all(node[0] == "idx" for node in nodes) else ", "
    return separator.join(expression(node) for node in nodes)


def indexed(node: Node) -> str:
    base = name(node[1])
    if not node[2]:
        return base
    return f"{{{base}}}_{{{indices(node[2])}}}" if "_" in base else f"{base}_{{{indices(node[2])}}}"


def conditions(clauses: Sequence[Condition]) -> str:
    """Conditions with commas between them; a chain such as 0 ≤ j < T is written as one."""
    text, last = "", None
    for relation, a, b in clauses:
        right = f" {RELATIONS[relation]} {expression(b)}"
        text += right if last is not None and a == last else f"{', ' if text else ''}{expression(a)}{right}"
        last = b
    return text


def hold(node: Node, place: int) -> str:
    """The LaTeX of a node, in parentheses if it is looser than its place."""
    looseness = {"+": SUM, "-": SUM, "neg": SUM, "cases": SUM, "*": PRODUCT, "mod": PRODUCT, "over": PRODUCT}
    text = expression(node)
    sized = node[0] == "over" and node[1] != "sum"  # these have parentheses of their own
    return rf"\left({text}\right)" if looseness.get(node[0], FACTOR) < place and not sized else text


def product(a: Node, b: Node) -> str:
    left, right = hold(a, PRODUCT), hold(b, PRODUCT)
    first = b[1] if b[0] in ("/", "*") else b
    number_next = first[0] == "num" and first[2] != "π"
    return rf"{left} \cdot {right}" if number_next else rf"{left}\, {right}"


def over(node: Node) -> str:
    _, function, letters, body, clauses = node
    below = ", ".join(dict.fromkeys(letters)) if not clauses else conditions(clauses)
    if clauses and (len(letters) > 1 or not any(("idx", letters[0]) in condition for condition in clauses)):
        below = ", ".join(letters) + r" \,:\, " + below
    if function in ("sum", "prod"):
        return rf"\{function}_{{{below}}} {hold(body, PRODUCT)}"
    inside = body[1] if body[0] == "group" else body
    command = rf"\{function}" if function in ("max", "min") else rf"\operatorname{{{function}}}"
    return rf"{command}_{{{below}}}\left({expression(inside)}\right)"


def call(node: Node) -> str:
    _, function, arguments = node
    inside = [expression(a[1] if a[0] == "group" else a) for a in arguments]
    if function == "sqrt":
        return rf"\sqrt{{{inside[0]}}}"
    standard = function in CALLS and function not in ("erf", "log1p")
    command = rf"\{function}" if standard else rf"\operatorname{{{function}}}"
    return rf"{command}\left({', '.join(inside)}\right)"


def expression(node: Node) -> str:
    kind = node[0]
    if kind == "num":
        spelling = str(node[2])
        if "e" in spelling:
            mantissa, exponent = spelling.split("e")
            factor = "" if mantissa == "1" else rf"{mantissa} \cdot "
            return f"{factor}10^{{{int(exponent)}}}"
        return {"π": r"\pi", "∞": r"\infty", "½": r"\tfrac{1}{2}"}.get(spelling, spelling)
    if kind == "idx":
        return node[1]
    if kind == "name":
        return indexed(node)
    if kind == "group":
        return rf"\left({expression(node[1])}\right)"
    if kind == "neg":
        return "-" + hold(node[1], PRODUCT)
    if kind in OPERATORS:
        right = hold(node[2], PRODUCT if kind != "mod" else FACTOR)
        return f"{expression(node[1]) if kind != 'mod' else hold(node[1], PRODUCT)} {OPERATORS[kind]} {right}"
    if kind == "*":
        return product(node[1], node[2])
    if kind == "/":
        if node[1][0] == "*" and node[1][1][0] == "/":  # a fraction times a fraction, not one above another
            return product(node[1][1], ("/", node[1][2], node[2]))
        top, bottom = (n[1] if n[0] == "group" else n for n in node[1:])
        return rf"\frac{{{expression(top)}}}{{{expression(bottom)}}}"
    if kind == "^":
        power = {"²": "2", "³": "3", "⁴": "4", "⁻¹": "-1"}.get(node[2][-1]) or expression(
            node[2][1] if node[2][0] == "group" else node[2]
        )
        base = expression(node[1])
        return (
            f"{{{base}}}^{{{power}}}"
            if node[1][0] in ("name", "num", "group", "idx")
            else rf"\left({base}\right)^{{{power}}}"
        )
    if kind == "floor":
        return rf"\left\lfloor {expression(node[1])} \right\rfloor"
    if kind == "abs":
        return rf"\left| {expression(node[1])} \right|"
    if kind == "call":
        return call(node)
    if kind == "over":
        return over(node)
    if kind == "bracket":
        return rf"\left[{conditions(node[1])}\right]"
    if kind == "delta":
        return rf"\delta_{{{indices(node[1:])}}}"
    if kind == "cases":
        rows = [rf"{expression(value)} & \text{{where }} {conditions(clauses)}" for value, clauses in node[1]]
        rows.append(rf"{expression(node[2])} & \text{{elsewhere}}")
        return r"\begin{cases} " + r" \\ ".join(rows) + r" \end{cases}"
    return rf"\frac{{\partial {expression(node[1])}}}{{\partial {expression(node[2])}}}"
