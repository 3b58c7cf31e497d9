"""No room has more tokens than the tables of CONTRIBUTING.md allow."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("size", ROOT / ".ci" / "size.py")
size = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(size)


def test_no_room_is_larger_than_its_limit():
    counted, allowed = size.sizes(ROOT), size.limits(ROOT)
    assert counted.keys() <= allowed.keys()
    assert {name: (counted[name], limit) for name, limit in allowed.items() if counted[name] > limit} == {}


def test_what_is_counted():
    documented = '"""A module."""\n\n\ndef double(x):\n    """Twice x."""\n    return 2 * x  # exact\n'
    assert size.tokens(documented) == len("def double ( x ) : return 2 * x".split())
    assert size.tokens('TEXT = """no docstring"""\n') == 3


def test_a_room_that_grows_is_found(tmp_path):
    (tmp_path / "scratchformer" / "ops").mkdir(parents=True)
    (tmp_path / "scratchformer" / "ops" / "add.py").write_text("x = 1 + 2\n")
    (tmp_path / "scratchformer" / "__init__.py").write_text("")
    (tmp_path / "CONTRIBUTING.md").write_text("| room | at most |\n|---|---|\n| `ops` | 1,004 | mathematics | |\n")
    assert size.sizes(tmp_path)["ops"] == 5 and size.limits(tmp_path) == {"ops": 1004}
