"""The notation of derivations as MathML, which browsers show by themselves: no JavaScript, and nothing to load."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from html import escape
from typing import Any

from ..notation.grammar import Condition, Equation, Node, NotationError, parse
from ..notation.spelling import GREEK_LETTERS

# How tightly a node holds together: a part that is looser than its place needs parentheses.
SUM, PRODUCT, FACTOR = range(3)
LOOSENESS = dict.fromkeys(("+", "-", "neg", "cases"), SUM) | dict.fromkeys(("*", "flat /", "mod", "over"), PRODUCT)
RELATIONS = {":=": "≔", "<": "&lt;", ">": "&gt;"}
POWERS = {"²": "2", "³": "3", "⁴": "4", "⁻¹": "−1"}
SIGNS = {"+": "+", "-": "−", "mod": "mod"}
FLAT = {"/": "flat /", "partial": "flat partial"}
WORDS = ("density", "distance")  # they begin with d and are no gradients
GAP = '<mspace width="0.17em"/>'
WIDE = '<mspace width="1em"/>'


def mathml(text: str, names: Collection[str] = (), display: bool = False) -> str:
    """A text in the notation as MathML: an expression, or an equation."""
    try:
        return of_equation(parse(text, names), display)
    except NotationError as error:
        try:
            tree = parse(f"{text} = 0", names)
        except NotationError:
            raise error from None
        return wrapped(expression((tree if display else flat(tree)).parts[0]), display)


def of_equation(whole: Equation, display: bool = True) -> str:
    """An equation as MathML; a chain of equalities in aligned lines."""
    if not display:
        return wrapped("".join(sides(flat(whole))), display)
    return wrapped(aligned(whole) if len(whole.relations) > 1 else "".join(sides(whole)), display)


def pieces(whole: Equation) -> list[str]:
    """An equation up to its first right side, then each further part with its relation: a line may break between."""
    first, second, *rest = sides(whole)
    return [wrapped(piece, display=True) for piece in (first + second, *rest)]


def sides(whole: Equation) -> list[str]:
    """The first side of an equation, and each further one with its relation before it; the last ends on the clauses."""
    first, *rest = map(expression, whole.parts)
    parts = [first, *(relation(sign) + part for sign, part in zip(whole.relations, rest, strict=True))]
    return [*parts[:-1], parts[-1] + clauses(whole)]


def wrapped(inside: str, display: bool) -> str:
    return f'<math display="{"block" if display else "inline"}"><mrow>{inside}</mrow></math>'


def flat(tree: Any) -> Any:
    """The tree with its fractions on one line, for use in a line of text."""
    if not isinstance(tree, tuple):
        return tree
    parts = [flat(part) for part in tree]
    if parts and parts[0] in FLAT:
        parts[0] = FLAT[parts[0]]
    return type(tree)(*parts) if isinstance(tree, Equation) else tuple(parts)


def aligned(whole: Equation) -> str:
    first, *rest = sides(whole)
    lefts = [first, *[""] * (len(rest) - 1)]
    rows = "".join(
        f'<mtr><mtd style="text-align: right">{left}</mtd><mtd>{right}</mtd></mtr>'
        for left, right in zip(lefts, rest, strict=True)
    )
    return f'<mtable displaystyle="true" class="aligned">{rows}</mtable>'


def clauses(whole: Equation) -> str:
    parts = [f"<mi>{letter(name)}</mi>{relation('=')}{expression(node)}" for name, node in whole.bindings]
    text = f"{WIDE}<mtext>with&nbsp;</mtext>{comma(parts)}" if parts else ""
    return text + (f"{WIDE}<mtext>for&nbsp;</mtext>{conditions(whole.conditions)}" if whole.conditions else "")


def relation(sign: str) -> str:
    return f"<mo>{RELATIONS.get(sign, sign)}</mo>"


def comma(parts: Sequence[str]) -> str:
    return "<mo>,</mo>".join(parts)


def group(inside: str) -> str:
    return f"<mrow>{inside}</mrow>"


def fenced(inside: str, left: str = "(", right: str = ")") -> str:
    return group(f'<mo fence="true" form="prefix">{left}</mo>{inside}<mo fence="true" form="postfix">{right}</mo>')


def index(text: str) -> str:
    """An index letter, which may have primes."""
    plain = text.rstrip("'")
    primes = "′" * (len(text) - len(plain))
    return f"<msup><mi>{plain}</mi><mo>{primes}</mo></msup>" if primes else f"<mi>{plain}</mi>"


def letter(name: str) -> str:
    """A name without its d: Greek letters, hats and numbers as such."""
    base = name.rstrip("0123456789")
    number = name[len(base) :]
    if base.endswith("hat") and len(base) > 3:
        shown = f'<mover accent="true">{letter(base[:-3])}<mo stretchy="false">^</mo></mover>'
    else:
        shown = f"<mi>{escape(GREEK_LETTERS.get(base, base))}</mi>"
    return f"<msub>{shown}<mn>{number}</mn></msub>" if number else shown


def named(name: str) -> str:
    """A name; that of a gradient is an upright d and the name of the array."""
    gradient = name.startswith("d") and len(name) > 1 and name.rstrip("0123456789") not in (*GREEK_LETTERS, *WORDS)
    return f'<mi mathvariant="normal">d</mi>{letter(name[1:])}' if gradient else letter(name)


def indexed(node: Node) -> str:
    name = named(node[1])
    if not node[2]:
        return name
    shown = [index(i[1]) if i[0] == "idx" else expression(i) for i in node[2]]
    below = "".join(shown) if all(i[0] == "idx" for i in node[2]) else comma(shown)
    return f"<msub>{group(name)}{group(below)}</msub>"


def conditions(clauses: Sequence[Condition]) -> str:
    """Conditions with commas between them; a chain such as 0 ≤ j < T is written as one."""
    text, last = "", None
    for sign, a, b in clauses:
        right = relation(sign) + expression(b)
        text += right if last is not None and a == last else f"{'<mo>,</mo>' if text else ''}{expression(a)}{right}"
        last = b
    return text


def hold(node: Node, place: int) -> str:
    """A node, in parentheses if it is looser than its place."""
    sized = node[0] == "over" and node[1] != "sum"  # these have parentheses of their own
    loose = LOOSENESS.get(node[0], FACTOR) < place and not sized
    return fenced(expression(node)) if loose else expression(node)


def bare(node: Node) -> Node:
    """The node without its parentheses."""
    return node[1] if node[0] == "group" else node


def product(a: Node, b: Node) -> str:
    number_next = b[0] == "num" or (b[0] in ("/", "*") and b[1][0] == "num")
    dot = number_next or (a[0] == "/" and b[0] == "/")
    return hold(a, PRODUCT) + ("<mo>·</mo>" if dot else GAP) + hold(b, PRODUCT)


def quotient(a: Node, b: Node) -> str:
    """a/b as a fraction; (x/y · z)/b as two."""
    if a[0] == "*" and a[1][0] == "/":
        return product(a[1], ("/", a[2], b))
    return fraction(expression(bare(a)), expression(bare(b)))


def over(function: str, letters: Sequence[str], body: Node, clauses: Sequence[Condition]) -> str:
    below = comma([index(i) for i in dict.fromkeys(letters)])
    if clauses:
        below = (f"{below}<mo>:</mo>" if len(letters) > 1 else "") + conditions(clauses)
    if function in ("sum", "prod"):
        return f"<munder><mo>{'∑' if function == 'sum' else '∏'}</mo>{group(below)}</munder>{hold(body, PRODUCT)}"
    script = "munder" if function in ("max", "min", "argmax") else "msub"
    name = f'<mo movablelimits="true">{function}</mo>' if script == "munder" else f"<mi>{function}</mi>"
    return f"<{script}>{name}{group(below)}</{script}>{fenced(expression(bare(body)))}"


def number(value: float, spelling: str) -> str:
    if "e" in spelling:
        mantissa, power = spelling.split("e")
        ten = f"<msup><mn>10</mn><mn>{int(power)}</mn></msup>".replace("-", "−")
        return ten if mantissa == "1" else f"<mn>{mantissa}</mn><mo>·</mo>{ten}"
    if spelling == "½":
        return '<mfrac displaystyle="false"><mn>1</mn><mn>2</mn></mfrac>'
    return f"<mi>{spelling}</mi>" if spelling in "π∞" else f"<mn>{spelling}</mn>"


def call(function: str, arguments: Sequence[Node]) -> str:
    if function == "sqrt":
        return f"<msqrt>{expression(bare(arguments[0]))}</msqrt>"
    return f"<mi>{function}</mi>{fenced(comma([expression(bare(a)) for a in arguments]))}"


def power(base: Node, exponent: Node) -> str:
    text = POWERS.get(exponent[-1]) if exponent[0] == "num" else None
    above = f"<mn>{text}</mn>" if text else expression(bare(exponent))
    simple = base[0] in ("name", "num", "group", "idx")
    return f"<msup>{group(expression(base) if simple else fenced(expression(base)))}{group(above)}</msup>"


def cases(rows: Sequence[tuple[Node, Sequence[Condition]]], otherwise: Node) -> str:
    lines = [(expression(value), f"<mtext>where&nbsp;</mtext>{conditions(when)}") for value, when in rows]
    lines.append((expression(otherwise), "<mtext>elsewhere</mtext>"))
    table = "".join(f"<mtr><mtd>{value}</mtd><mtd>{when}</mtd></mtr>" for value, when in lines)
    return group(f'<mo fence="true" form="prefix">{{</mo><mtable displaystyle="true" class="cases">{table}</mtable>')


def fraction(top: str, bottom: str) -> str:
    return f"<mfrac>{group(top)}{group(bottom)}</mfrac>"


def sign(kind: str) -> Callable[[Node, Node], str]:
    left, right = (PRODUCT, FACTOR) if kind == "mod" else (SUM, PRODUCT)
    return lambda a, b: f"{hold(a, left)}<mo>{SIGNS[kind]}</mo>{hold(b, right)}"


KINDS: dict[str, Callable[..., str]] = {
    "num": number,
    "idx": index,
    "name": lambda *node: indexed(("name", *node)),
    "group": lambda a: fenced(expression(a)),
    "neg": lambda a: f'<mo form="prefix">−</mo>{hold(a, PRODUCT)}',
    "+": sign("+"),
    "-": sign("-"),
    "mod": sign("mod"),
    "*": product,
    "/": quotient,
    "flat /": lambda a, b: f"{hold(a, PRODUCT)}<mo>/</mo>{hold(b, FACTOR)}",
    "^": power,
    "floor": lambda a: fenced(expression(a), "⌊", "⌋"),
    "abs": lambda a: fenced(expression(a), "|", "|"),
    "call": call,
    "over": over,
    "bracket": lambda clauses: fenced(conditions(clauses), "[", "]"),
    "delta": lambda a, b: f"<msub><mi>δ</mi>{group(expression(a) + expression(b))}</msub>",
    "cases": cases,
    "partial": lambda a, b: fraction(f"<mo>∂</mo>{expression(a)}", f"<mo>∂</mo>{expression(b)}"),
    "flat partial": lambda a, b: f"<mo>∂</mo>{expression(a)}<mo>/</mo><mo>∂</mo>{expression(b)}",
}


def expression(node: Node) -> str:
    """A syntax tree as MathML."""
    return KINDS[node[0]](*node[1:])
