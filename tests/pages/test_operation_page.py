"""`scratchformer page`: the page of a user's operation works from disk, shows nothing of the file as markup, and bad
files get clear errors.
"""

import re
import stat
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import user_operations

from scratchformer import ops
from scratchformer.commands import cli
from scratchformer.notation import check_derivation
from scratchformer.pages.live import FILES
from scratchformer.pages.operation_page import GENERATOR
from scratchformer.pages.user_operation import MAX_NUMBERS, drawn_arguments, read_operation

FILE = Path(user_operations.__file__)
NAMES = [name.removesuffix("_backward") for name in vars(user_operations) if name.endswith("_backward")]
WIDTHS = (390, 1440)
# New numbers are drawn; what is marked as wrong, and the inputs, the output and the gradients.
DRAW = """
let x = 1;
Math.random = () => (x = (x * 16807) % 2147483647) / 2147483647;
const { page } = document.querySelector('.live');
const { data } = page;
const shown = [...data.inputs, ...data.outputs.map(([y]) => y), ...Object.keys(data.gradients)];
return Array.from({ length: 60 }, () => {
  page.draw();
  page.refresh();
  page.check();
  const bad = [...document.querySelectorAll('.live-badge.bad, td.wrong')].map((each) => each.textContent);
  const values = shown.map((name) => page.model.array(name)).map(({ shape, data }) => [shape, [...data]]);
  return [bad, Object.fromEntries(shown.map((name, i) => [name, values[i]]))];
});
"""
PLANT = """
const { page } = document.querySelector('.live');
page.reset();
const marked = page.data.mistakes.map((mistake, k) => {
  page.plant(k);
  page.check();
  return document.querySelectorAll('td.wrong').length;
});
page.plant(-1);
return marked;
"""
SIMPLE = '''
def triple(x):
    """Three times each number.

    x: (N, C)

        y_nc = 3 x_nc
        dx_nc = 3 dy_nc
    """
    return 3 * x, None


def triple_backward(dy, cache):
    return 3 * dy
'''


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages of all operations of `user_operations`."""
    folder = tmp_path_factory.mktemp("pages")
    for name in NAMES:
        cli.run_command(["page", f"{FILE}::{name}", "--out", str(folder / f"{name}.html")])
    return {name: folder / f"{name}.html" for name in NAMES}


@pytest.fixture
def user_file(tmp_path: Path) -> Any:
    """user_file(text) writes my_op.py, after the import of NumPy, and returns its path."""

    def write(text: str, name: str = "my_op.py") -> str:
        path = tmp_path / name
        path.write_text(f"import numpy as np\n{text}", encoding="utf-8")
        return str(path)

    return write


def show(browser: Any, page: Path, width: int) -> None:
    metrics = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page.as_uri())
    assert browser.execute_script("return Boolean(document.querySelector('.live').page)")


@pytest.fixture(autouse=True)
def usual_width(request: pytest.FixtureRequest) -> Any:
    yield
    if "browser" in request.fixturenames:
        request.getfixturevalue("browser").execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("name", NAMES)
def test_a_page_works_from_disk(browser: Any, pages: dict[str, Path], name: str) -> None:
    for width in WIDTHS:
        show(browser, pages[name], width)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        for bad, values in browser.execute_script(DRAW):
            assert not bad
            expect_numpy(name, {n: np.array(flat, float).reshape(shape) for n, (shape, flat) in values.items()})
        assert not browser.execute_script(
            "return performance.getEntriesByType('resource').map(({ name }) => name)"
            ".filter((name) => !name.startsWith('data:'))"
        )
        assert not browser.get_log("browser")


def expect_numpy(name: str, shown: dict[str, np.ndarray]) -> None:
    """The output and the gradients are those of the operation, for the inputs on the page."""
    user = read_operation(f"{FILE}::{name}")
    parameters = list(signature(user.op).parameters)
    args = []
    for parameter, value in zip(parameters, user.args, strict=True):
        given = shown.get(parameter, value)
        args.append(np.asarray(given).astype(value.dtype) if isinstance(value, np.ndarray) else float(given))
    y, cache = user.op(*args)
    output = next(n for n in ("y", "loss") if n in shown)
    np.testing.assert_allclose(shown[output], y, rtol=1e-9, atol=1e-9)
    gradients = user.op_backward(shown[f"d{output}"], cache)
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    floating = [p for p, x in zip(parameters, args, strict=True) if isinstance(x, np.ndarray) and x.dtype.kind == "f"]
    for parameter, gradient in zip(floating, gradients, strict=True):
        np.testing.assert_allclose(shown[f"d{parameter}"], gradient, rtol=1e-9, atol=1e-9, err_msg=parameter)


@pytest.mark.parametrize("name", NAMES)
def test_every_mistake_that_can_be_planted_shows(browser: Any, pages: dict[str, Path], name: str) -> None:
    show(browser, pages[name], 1440)
    marked = browser.execute_script(PLANT)
    assert marked
    assert all(marked)


def test_nothing_of_the_file_is_markup_or_a_script(browser: Any, user_file: Any, tmp_path: Path) -> None:
    bad = "</script><script>document.title = 'run'</script><img src=x onerror=\"document.title='run'\"><!--<script>"
    text = SIMPLE.replace("Three times", f"{bad} `{bad}` Three times").replace("3 dy_nc\n", f"3 dy_nc   ({bad})\n")
    cli.run_command(["page", user_file(text.replace("    return 3 * x", f"    # {bad}\n    return 3 * x"))])
    page = tmp_path / "triple.html"
    show(browser, page, 1440)
    assert browser.title == "triple"
    assert not browser.find_elements("css selector", "img")
    assert len(browser.find_elements("css selector", "script:not([type])")) == 1 + len(FILES)
    assert browser.find_element("css selector", "main > p").text.startswith("</script><script>")
    assert not browser.get_log("browser")


def test_the_browser_lets_no_other_script_run(browser: Any, pages: dict[str, Path], tmp_path: Path) -> None:
    text = pages["sigmoid"].read_text(encoding="utf-8")
    changed = tmp_path / "changed.html"
    changed.write_text(text.replace("<h1>", "<script>document.title = 'run'</script><h1>"), encoding="utf-8")
    show(browser, changed, 1440)
    assert browser.title == "sigmoid"
    assert "Content Security Policy" in browser.get_log("browser")[0]["message"]


def test_the_loops_lead_to_the_equations(pages: dict[str, Path]) -> None:
    text = pages["log_sum_exp"].read_text(encoding="utf-8")
    links = re.findall(r'class="c1" href="#([^"]*)"', text)
    assert links
    assert all(f'id="{link}"' in text for link in links)
    assert "def log_sum_exp(" in text
    assert "No loops are made from these equations. bilinear: line" in pages["bilinear"].read_text(encoding="utf-8")


def test_what_the_tests_of_the_file_miss_is_on_the_page(user_file: Any, tmp_path: Path) -> None:
    file = user_file(SIMPLE)
    cli.run_command(["page", file])
    assert "No mistakes were planted in the code" in (tmp_path / "triple.html").read_text(encoding="utf-8")
    user_file(
        "from my_op import triple_backward\n\ndef test_zero():\n    assert triple_backward(0, None) == 0\n",
        "test_my_op.py",
    )
    cli.run_command(["page", file])
    text = (tmp_path / "triple.html").read_text(encoding="utf-8")
    assert re.search(r"Of (\d+) mistakes .* the tests in <code>test_my_op.py</code> find \d\. They miss these:", text)
    assert "+     return dy" in text
    user_file("def test_wrong():\n    import my_op\n    assert False\n", "test_my_op.py")
    with pytest.raises(ValueError, match="even without a mistake, the tests do not pass"):
        cli.run_command(["page", file])


def test_a_case_gives_the_arguments(user_file: Any, browser: Any, tmp_path: Path) -> None:
    file = user_file(
        '''
def logarithm(x, c):
    """The logarithm of each number, times c_n.

        y_n = c_n log(x_n)
        dx_n = dy_n c_n/x_n
        dc_n = dy_n log(x_n)
    """
    return c * np.log(x), (x, c)


def logarithm_backward(dy, cache):
    x, c = cache
    return dy * c / x, dy * np.log(x)
'''
    )
    with pytest.raises(ValueError, match=r"y has NaN or infinity with x \(3,\), c \(3,\); logarithm_case\(\) in the"):
        cli.run_command(["page", file])
    for returned in ("[0.25, 1, 3.5], np.ones(3)", '{"c": [1.0, -2, 1], "x": np.array([0.25, 1, 3.5])}'):
        user_file(Path(file).read_text(encoding="utf-8") + f"\n\ndef logarithm_case():\n    return {returned}\n")
        cli.run_command(["page", file])
        show(browser, tmp_path / "logarithm.html", 390)
        drawn = browser.execute_script(DRAW)
        assert not any(bad for bad, _ in drawn)
        assert all(0.25 <= x <= 3.5 for _, values in drawn for x in values["x"][1])


def test_only_a_page_is_overwritten(user_file: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, page = user_file(SIMPLE), tmp_path / "triple.html"
    opened = list[str]()
    monkeypatch.setattr("webbrowser.open", opened.append)
    for _ in range(2):
        cli.run_command(["page", file])
    assert GENERATOR in page.read_text(encoding="utf-8")
    page.write_text("my notes", encoding="utf-8")
    with pytest.raises(ValueError, match=r"was not made by this command: choose another --out"):
        cli.run_command(["page", file])
    assert page.read_text(encoding="utf-8") == "my notes"
    page.unlink()
    cli.run_command(["page", file, "--open"])
    assert opened == [page.as_uri()]
    assert GENERATOR in page.read_text(encoding="utf-8")
    assert stat.S_IMODE(page.stat().st_mode) & 0o400
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "link.html").symlink_to(page)
    for out, message in [
        (file, r"--out: expected a file that ends in \.html"),
        (tmp_path / "no" / "x.html", "--out: expected a file in an existing folder"),
        (tmp_path / "folder.html", "which is a folder or a link"),
        (tmp_path / "link.html", "which is a folder or a link"),
    ]:
        with pytest.raises(ValueError, match=message):
            cli.run_command(["page", file, "--out", str(out)])


@pytest.mark.parametrize(
    "text, message",
    [
        ("", r"expected a function, such as my_op, and its my_op_backward, got none"),
        ("def f(x): ...", r"and its my_op_backward, got none"),
        (f"{SIMPLE}{SIMPLE.replace('triple', 'threefold')}", r"got triple, threefold: name one, .*my_op\.py::triple"),
        ("1/0", r"cannot be loaded: ZeroDivisionError"),
        ("import nothing_of_this_name", r"cannot be loaded: ModuleNotFoundError"),
        (SIMPLE.replace("dy, cache", "dy"), r"triple_backward: expected two parameters, .*got \(dy\)"),
        (SIMPLE.replace("(dy, cache)", "(grad, cache)"), r"as in \(dy, cache\), got \(grad, cache\)"),
        (SIMPLE.replace("(x)", "(x, scale)"), r"scale: expected a shape in the docstring of triple, .*scale: \(N, C\)"),
        (SIMPLE.replace("3 * x, None", "3 * x"), r"triple: expected y and the cache, as in `return y, cache`, got"),
        (SIMPLE.replace("3 * x, None", "{}, None"), r"triple: expected y to be an array or a number, got dict"),
        (SIMPLE.replace("3 * x, None", "x @ x, None"), r"triple: ValueError with x \(3, 4\): matmul"),
        (f"{SIMPLE}triple_case = 3", r"triple_case: expected a function that returns arguments, got int"),
        (f"{SIMPLE}def triple_case(): return 1, 2", r"triple_case: expected the arguments of triple\(x\): too many"),
        (
            f"{SIMPLE}def triple_case(): return {{'z': 1}}",
            r"triple_case: expected the arguments of triple\(x\): missing",
        ),
        (
            f"{SIMPLE}def triple_case(): return [[]]",
            r"triple_case: x: expected finite numbers, got float64 of shape \(0,",
        ),
        (f"{SIMPLE}def triple_case(): return np.array(['a'])", r"triple_case: x: expected finite numbers, got <U1"),
        (f"{SIMPLE}def triple_case(): return np.ones((100, 100))", rf"expected at most {MAX_NUMBERS} numbers .* 10000"),
        (f"{SIMPLE}def triple_case(): raise KeyError('no')", r"triple_case: KeyError: 'no'"),
    ],
)
def test_bad_files_get_clear_errors(user_file: Any, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        cli.run_command(["page", user_file(text)])
    assert not [*tmp_path.glob("*.html")]


@pytest.mark.parametrize(
    "text, message",
    [
        (SIMPLE.replace("dx_nc = 3", "dx_nc = 4"), r"triple: line 6: dx_nc = 4 dy_nc\n"),
        (SIMPLE.replace("y_nc = 3 x_nc", "y_nc = \\\\frac{3} x_nc"), r"line 5"),
        (SIMPLE.replace("        y_nc = 3 x_nc\n        dx_nc = 3 dy_nc\n", ""), r"its docstring has no equations"),
        (SIMPLE.replace("return 3 * dy", "return 2 * dy"), r"dx_nc = 3 dy_nc\n    is not true"),
    ],
)
def test_a_wrong_derivation_gets_the_message_of_the_check(
    user_file: Any, text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["page", user_file(text)])
    assert re.search(message, str(ended.value.code))
    assert not [*tmp_path.glob("*.html")]


PIECES = '''
def f(x, c=1000.0):
    """Twice x, but another slope beyond c.

        y_n = FORWARD
        dx_n = BACKWARD
    """
    return np.where(x < c, 2 * x, 5 * x - 3 * c), (x, c)

def f_backward(dy, cache):
    x, c = cache
    return np.where(x < c, 2, 5) * dy
'''
BEYOND = "\ndef f_case():\n    return np.array([1.0, 2000.0, -3.0])\n"


@pytest.mark.parametrize(
    "forward, backward, case",
    [
        ("2 x_n where x_n < c, 5 x_n − 4 c elsewhere", "2 dy_n", "5 x_n − 4 c elsewhere"),
        ("5 x_n where x_n ≥ c, 2 x_n elsewhere", "2 dy_n", "5 x_n where x_n ≥ c"),
        ("2 x_n", "2 dy_n where x_n < c, 7 dy_n elsewhere", "7 dy_n elsewhere"),
        ("2 x_n + x_n [x_n ≥ c]", "2 dy_n", "[x_n ≥ c]"),
        ("2 x_n\n        g_n = 2 for x_n < c        g_n = 7 for x_n ≥ c", "g_n dy_n", "g_n = 7 for x_n ≥ c"),
    ],
)
def test_a_case_that_no_number_reaches_is_not_approved(
    user_file: Any, forward: str, backward: str, case: str, tmp_path: Path
) -> None:
    text = PIECES.replace("FORWARD", forward).replace("BACKWARD", backward)
    with pytest.raises(SystemExit) as ended:
        cli.main(["page", user_file(text)])
    assert f"reaches these cases, so they are not checked:\n    {case}\n" in str(ended.value.code)
    with pytest.raises(SystemExit) as ended:
        cli.main(["page", user_file(text + BEYOND)])
    assert "not true" in str(ended.value.code) or "differs" in str(ended.value.code)
    assert not [*tmp_path.glob("*.html")]


def test_arguments_are_drawn_that_reach_every_case(user_file: Any) -> None:
    source = Path(FILE).read_text(encoding="utf-8").replace("delta, delta (|", "delta, 7 delta (|")
    with pytest.raises(SystemExit) as ended:
        cli.main(["page", f"{user_file(source)}::huber"])
    assert "loss" in str(ended.value.code) and "not true" in str(ended.value.code)


@pytest.mark.parametrize(
    "name, shapes, whole",
    [
        ("linear", {"x": (3, 4), "w": (4, 2), "b": (2,)}, set()),
        ("layernorm", {"x": (3, 4), "gamma": (4,), "beta": (4,)}, set()),
        ("embedding", {"ids": (3,), "table": (4, 2)}, {"ids"}),
        ("gather", {"x": (3, 4, 2), "places": (3, 5)}, {"places"}),
        ("cross_entropy", {"logits": (3, 4), "targets": (3,)}, {"targets"}),
        ("tanh", {"x": (3,)}, set()),
    ],
)
def test_arguments_follow_from_the_docstring(name: str, shapes: dict[str, tuple[int, ...]], whole: set[str]) -> None:
    op, op_backward = getattr(ops, name).reference, getattr(ops, f"{name}_backward").reference
    arguments, ranges = drawn_arguments(op, op_backward)
    arrays = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray)}
    assert {name: x.shape for name, x in arrays.items()} == shapes
    assert {name for name, x in arrays.items() if x.dtype.kind == "i"} == whole
    assert [(low, high) for _, low, high in ranges] == [(0, 3)] * len(whole)
    check_derivation(op, op_backward, *arguments.values())


def test_other_functions_of_a_file_are_named(user_file: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a function cube and its cube_backward, but my_op\.py has triple"):
        cli.run_command(["page", f"{user_file(SIMPLE)}::cube"])
    with pytest.raises(ValueError, match=r"none\.py is not a Python file"):
        cli.run_command(["page", "none.py"])
