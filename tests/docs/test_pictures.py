"""Pictures of layers, operations and step sizes: complete, readable, and with every size as its letter."""

import inspect
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from changes import BEFORE, model_changes
from layer_pictures import layer_picture
from letters import SIZES, Letters, LetterSizes, written
from operation_pictures import WITHOUT_BACKWARD, operation_picture
from traced import CASES, traced
from tracing import trace

from scratchformer import models, nn, ops
from scratchformer.catalogue import OPERATIONS, Draw, OperationCase
from scratchformer.dispatch import reference_only
from scratchformer.pages.step_curves import STEPS, in_words, step_curve, step_errors
from scratchformer.rng import Key

PLAIN = {"Layer", "Param", "FlatParameters", "Model"}  # not layers, or nothing to run
LAYERS = [n for m in (nn, models) for n in m.__all__ if inspect.isclass(getattr(m, n)) and n not in PLAIN]
OPERATION_NAMES = [name.removesuffix("_backward") for name in ops.__all__ if name.endswith("_backward")]
SVG = "{http://www.w3.org/2000/svg}"


def expect_readable(svg):
    """It has a title and a description, and no text overlaps another or leaves the picture."""
    root = ET.fromstring(svg)
    title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert root.get("aria-labelledby").split() == [title.get("id"), description.get("id")]
    assert title.text and len(description.text) > 40
    assert "#000" not in svg and "#fff" not in svg  # it takes the colours of the page
    _, _, width, height = map(float, root.get("viewBox").split())
    boxes = [text_box(text) for text in root.iter(f"{SVG}text")]
    for name, x0, y0, x1, y1 in boxes:
        assert x0 >= 0 and x1 <= width and y0 >= 0 and y1 <= height, name
    x0, y0, x1, y1 = np.array([box for _, *box in boxes]).T[:, :, None]
    overlap = (x0 < x1.T) & (x0.T < x1) & (y0 < y1.T) & (y0.T < y1)
    assert not [(boxes[i][0], boxes[j][0]) for i, j in np.argwhere(overlap) if i < j]


def text_box(text):
    """The text and where it is, if the font is as wide as the widest of the usual ones."""
    x, y, size = float(text.get("x")), float(text.get("y")), float(text.get("font-size", 12))
    width = 0.602 * size * len(text.text)
    x -= {"start": 0, "middle": width / 2, "end": width}[text.get("text-anchor", "start")]
    return text.text, x, y - 0.78 * size, x + width, y + 0.2 * size


@pytest.mark.parametrize("name", LAYERS)
def test_picture_of_a_layer(name):
    expect_readable(layer_picture(name))


@pytest.mark.parametrize("name", LAYERS)
def test_forward_runs_again_only_where_it_is_said(name):
    description = ET.fromstring(layer_picture(name)).find(f"{SVG}desc").text
    assert ("runs forward again" in description) == (name == "Recompute")


@pytest.mark.parametrize(
    "name, sums", [("Residual", 1), ("TransformerBlock", 2), ("DecoderBlock", 3), ("LlamaBlock", 2)]
)
def test_the_way_around_a_branch_is_drawn(name, sums):
    texts = [text.text for text in ET.fromstring(layer_picture(name)).iter(f"{SVG}text")]
    assert texts.count("+ x") == texts.count("the gradient goes both ways") == sums
    assert "ops.add" not in texts


@pytest.mark.parametrize("name", OPERATION_NAMES)
def test_pictures_of_an_operation(name):
    expect_readable(operation_picture(name))


@pytest.mark.parametrize("name", ["attention", "cross_entropy", "linear", "relu"])
def test_curve_of_an_operation(name):
    expect_readable(step_curve(OPERATIONS[name](Draw(1)))[0])


@pytest.mark.parametrize("name", WITHOUT_BACKWARD)
def test_picture_of_an_operation_without_backward(name):
    expect_readable(operation_picture(name))


def test_the_picture_says_what_the_trace_counted():
    svg = layer_picture("SelfAttention").replace("\u00a0", " ")
    assert "Parameters: 4 C² + C." in svg
    assert "FLOP forward: 8 B T C² + 4 B T² C." in svg and "FLOP backward: 16 B T C² + 8 B T² C." in svg
    assert "Kept for backward: 4 B T² H + 20 B T C bytes." in svg
    assert "The NumPy twins keep 8 B T H + 20 B T C bytes." in svg
    assert "q, k, v (B H T D)" in svg and "dq, dk, dv (B H T D)" in svg


# Two texts of a BERT, two numbers that the attention twin keeps for each row, two blocks; rows and columns of a grid.
OTHER_SIZES = {"GridPositions": {2, 7}, "SparseTransformer": {2, 4}}


@pytest.mark.parametrize("name", LAYERS)
def test_every_size_is_a_letter(name):
    letters, *calls = traced(name)
    found = set()
    for call in (call for root in calls for call in root.walk()):
        arrays = [*call.inputs().values(), *call.kept.values(), *(p.data for p in call.parameters.values())]
        found |= {n for x in arrays for n in letters.unknown(x.shape)}
    assert found <= OTHER_SIZES.get(name, {2})


# Their formulas have as a number the rows of a grid, or how much of a head is rotated.
BY_NUMBER = {"GridPositions", "SparseTransformer", "Pythia"}


def value(terms, sizes):
    """The number that a formula stands for."""
    T, D, S, M = (sizes.get(letter, 0) for letter in "TDSM")
    known = {**sizes, "(T+1)": T + 1, "(D+1)": D + 1, "(M+T)": M + T, "½": 0.5, "R": S + T - 1 if S else M + 2 * T - 1}
    return sum(n * np.prod([float(known[x]) ** power for x, power in powers]) for powers, n in terms.items())


@pytest.mark.parametrize("name", sorted(set(LAYERS) - BY_NUMBER))
def test_formulas_hold_at_other_sizes(name):
    """A letter that stood for the wrong size would show: all sizes are different from those of the picture."""
    letters, call, _ = traced(name)
    other = LetterSizes(**dict(B=4, T=10, S=12, M=23, H=15, G=5, D=16, C=240, F=960, V=37, I=19, O=29, K=6))
    layer, inputs, options = CASES[name](other)
    if isinstance(layer, models.Model):
        options = {**options, "key": Key(0)}
    with reference_only():
        again = trace(layer, *inputs, loss=hasattr(layer, "loss"), **options)
    sizes = Letters(other.sizes).sizes

    def counts(call, letters):
        yield letters.terms((1, p.data.shape) for p in call.parameters.values())
        yield letters.terms((2, (*shape, k)) for shape, k in call.products())
        yield letters.terms((2, (*shape, k)) for shape, k in call.backward.products())
        yield letters.terms((x.itemsize, x.shape) for x in call.kept.values())

    found = [value(terms, sizes) for terms in counts(call, letters)]
    kept = sum(x.nbytes for x in again.kept.values())
    assert found == [sum(p.data.size for p in again.parameters.values()), again.flop, again.backward.flop, kept]


def test_a_loop_over_heads_counts_what_all_heads_at_once_count():
    counts = []
    for name in ("MultiHeadLoop", "SelfAttention"):
        letters, call, _ = traced(name)
        products = letters.flop(call.products()), letters.flop(call.backward.products())
        counts.append((letters.numbers(call.parameters.values()), *products, letters.bytes(call.kept.values())))
    assert counts[0] == counts[1]


def test_two_letters_of_one_size_are_refused():
    with pytest.raises(ValueError, match="D and T are both 4"):
        Letters({"T": 4, "D": 4})


def test_a_formula_is_written_with_its_signs():
    letters = Letters({"B": 3, "T": 5, "C": 7})
    terms = letters.terms([(2, (3, 5, 7, 7)), (-4, (7,)), (1, (3, 7))])
    assert written(terms).replace("\u00a0", " ") == "2 B T C² + B C − 4 C"
    assert written(letters.terms([(-4, (7,))])).replace("\u00a0", " ") == "−4 C" and written(letters.terms([])) == "0"


def test_the_best_step_is_where_theory_has_it():
    """ε^(1/3) for central differences in float64, ε^(1/2) for forward ones, and ε^(1/3) of float32."""
    softmax, linear, relu = (OPERATIONS[name](Draw(1)) for name in ("softmax", "linear", "relu"))
    errors = step_errors(softmax)
    best = {name: STEPS[int(np.argmin(row))] for name, row in errors._asdict().items()}
    assert 1e-6 < best["central"] < 1e-4 and 1e-9 < best["forward"] < 1e-6 and 1e-3 < best["single"] < 1e-1
    assert "best near h = 10⁻⁵" in step_curve(softmax)[1]
    assert "linear in every element" in step_curve(linear)[1] and "reach across a kink" in step_curve(relu)[1]


def test_a_square_is_not_called_linear():
    square = OperationCase(lambda x: (x**2, x), lambda dy, x: 2 * dy * x, (np.array([0.7, -1.1, 2.3]),))
    words = in_words(step_errors(square))
    assert "a polynomial of second degree in every element" in words and "linear" not in words


def test_a_wrong_gradient_has_no_good_step():
    case = OPERATIONS["tanh"](Draw(1))
    wrong = case._replace(op_backward=lambda dy, cache: 1.01 * ops.tanh_backward(dy, cache))
    assert min(step_errors(wrong).central) > 0.009


@pytest.mark.parametrize("name", BEFORE)
def test_what_changed(name):
    text = model_changes(name).replace("\u00a0", " ")
    assert len(text) > 300
    if name == "GPT2":
        assert "| parameters | −C V + 8 C − V |" in text and "| FLOP forward | the same |" in text
    if name == "Llama":
        assert f"with {SIZES['H']} query heads and {SIZES['G']} of keys and values" in text
        assert "3 times smaller" in text
