"""The size of each room of the package, and of what is around it, beside its limit in the tables of CONTRIBUTING.md.

    python .ci/size.py

Python is counted in tokens without comments and docstrings: short names and crammed lines lower it as little as good
documentation raises it. JavaScript is counted in lines. A limit may be lowered; none is raised but to lower another.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "scratchformer"
AROUND = "tests", "benchmarks", "docs/_ext"
JAVASCRIPT = "pages/static"
LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def tokens(text: str) -> int:
    """The number of tokens of a module, without comments and docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, documented) and ast.get_docstring(n) is not None]
    docstrings = {(node.body[0].lineno, node.body[0].col_offset) for node in nodes}
    read = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in LAYOUT and token.start not in docstrings for token in read)


def sizes(root: Path) -> Counter[str]:
    """The tokens of each room and folder, and the lines of JavaScript, by the names in the tables."""
    counted: Counter[str] = Counter()
    for folder in PACKAGE, *AROUND:
        for path in (root / folder).rglob("*.py"):
            room = path.relative_to(root / PACKAGE).parts[0] if folder == PACKAGE else folder
            name = PACKAGE if room == "__init__.py" else room.removesuffix(".py")
            counted[name] += tokens(path.read_text(encoding="utf-8"))
    for path in (root / PACKAGE / JAVASCRIPT).rglob("*.js"):
        counted[JAVASCRIPT] += len(path.read_text(encoding="utf-8").splitlines())
    return counted


def limits(root: Path) -> dict[str, int]:
    """The limit of each room and folder, by the column "at most" of the tables in CONTRIBUTING.md."""
    text = (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/]+)` \| ([\d,]+) \|", text, re.MULTILINE)
    return {name: int(limit.replace(",", "")) for name, limit in rows}


def main() -> None:
    counted, allowed = sizes(ROOT), limits(ROOT)
    print(f"{'':16}{'size':>9}{'at most':>9}")
    for name, limit in allowed.items():
        print(f"{name:16}{counted[name]:9,}{limit:9,}")
    rooms = allowed.keys() - {*AROUND, JAVASCRIPT}
    print(f"{'the package':16}{sum(counted[n] for n in rooms):9,}{sum(allowed[n] for n in rooms):9,}")


if __name__ == "__main__":
    main()
