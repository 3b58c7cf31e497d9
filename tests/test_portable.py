"""Arithmetic with the same bits on every processor."""

import ast
import hashlib
import operator
import os
import re
import subprocess
import sys
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from scratchformer import portable as portable_module
from scratchformer.backend import CPU, to_cpu
from scratchformer.backend import erf as erf_of
from scratchformer.catalogue import LAYERS, OPERATIONS, Draw
from scratchformer.data import LabelledBatch, TextBatches, TranslationBatch
from scratchformer.dispatch import fast, reference_only
from scratchformer.generation import quantize
from scratchformer.models import Classifier, EncoderDecoder, LanguageModel, Llama, TransformerXL
from scratchformer.nn import Linear, recompute_blocks
from scratchformer.optim import Adam, AdamW, Cosine, Muon
from scratchformer.portable import CUT, PortableArray, PortableKey, make_portable, portable, product, total
from scratchformer.testing.contracts import as_tuple, is_array, is_floating
from scratchformer.testing.strict import STRICT
from scratchformer.training import (
    Replicas,
    Run,
    evaluate_language_model,
    mean_loss,
)

FUNCTIONS = [getattr(portable_module, name) for name in ("exp", "log", "log1p", "tanh", "erf")]
# The instructions that NumPy found on this processor and chose loops for; their names differ between its versions.
CHOSEN = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])  # type: ignore[call-overload, index]


def rounded(x):
    """A Fraction rounded to float32, to even in a tie, as IEEE 754 says."""
    if not x:
        return np.float32(0)
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    exponent -= abs(x) < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    return np.float32(float(round(x / unit) * unit))


@pytest.mark.parametrize("scale", [2.0**-12, 2.0**-71])
def test_a_product_is_a_chain_of_fused_multiply_adds(scale):
    """Also of numbers below 2⁻¹²⁶."""
    rng = np.random.default_rng(0)
    a = np.float32(scale) * (rng.integers(-(2**13), 2**13, (20, 3)) * 2.0 ** rng.integers(-12, 12, (20, 3))).astype(
        "f4"
    )
    b = np.float32(scale) * rng.integers(-(2**13), 2**13, (3, 20)).astype("f4")
    c = product.reference(a, b)
    assert (c != 0).any()
    for i, j in np.ndindex(c.shape):
        chain = Fraction(0)
        for k in range(3):
            chain = Fraction(float(rounded(Fraction(float(a[i, k])) * Fraction(float(b[k, j])) + chain)))
        assert Fraction(float(c[i, j])) == chain


def test_factors_whose_shapes_do_not_fit():
    with pytest.raises(ValueError, match=r"^b: expected 3 rows, one for each column of a, got shape \(2, 3\)$"):
        product(np.ones((2, 3), np.float32), np.ones((2, 3), np.float32))


@pytest.mark.parametrize("size", [1.0, -1.0, 2.0**-60, 2.0**60])
def test_a_sum_that_float64_rounds_to_a_tie_is_rounded_once(size):
    """1 + 2⁻²³ + 2⁻²⁴ (1 − 2⁻³⁶) is less than the middle of two numbers of float32, but not in float64."""
    a = np.array([[1 + 2.0**-23, 2.0**-24 * (1 + 2.0**-18)]], np.float32)
    b = np.array([[size], [size * (1 - 2.0**-18)]], np.float32)
    assert product.reference(a, b).item() == size * (1 + 2.0**-23)
    assert product.reference(a, -b).item() == -size * (1 + 2.0**-23)


def test_a_sum_is_one_tree():
    x = np.float32([1e8, 1, -1e8, 3, 5])
    assert total(x) == np.float32((np.float32(1e8) + np.float32(3)) + np.float32(-1e8)) + np.float32(1 + 5)
    y = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
    assert np.array_equal(total(y, (2, 0)), total(y.transpose(1, 0, 2).reshape(4, 15), 1))
    assert total(y, -1, True).shape == (3, 4, 1) and total(y[:0], 0).tolist() == np.zeros((4, 5)).tolist()


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_functions_are_near_the_exact_ones(function):
    x = np.linspace(-87, 88, 10_001, dtype=np.float32)
    x = np.concatenate([x, x / 1000, np.float32([0, -np.inf, np.inf, np.nan])])
    x = abs(x) if function.__name__.startswith("log") else x
    with np.errstate(divide="ignore"):
        expected = (erf_of if function.__name__ == "erf" else getattr(np, function.__name__))(x.astype(np.float64))
    np.testing.assert_allclose(function(x), expected, rtol=6e-7, atol=1e-37)


def test_no_inexact_function_of_math_is_used():
    """exp, log, sin and pow differ between systems. What is used is exact, or rounded as IEEE 754 says."""
    exact = {"ceil", "factorial", "floor", "frexp", "inf", "isfinite", "nan", "pi", "prod", "sqrt"}
    root, rooms = Path(portable_module.__file__).parent, ("ops", "nn", "optim", "models")
    sources = [path.read_text("utf-8") for room in rooms for path in (root / room).glob("*.py")]
    used = {name for source in sources for name in re.findall(r"\bmath\.(\w+)", source)}
    assert "sqrt" in used and used <= exact
    assert not any("from math import" in source for source in sources)
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    powers = [node.right for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)]
    powers += [node.value for node in nodes if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Pow)]
    numbers = [node.value for power in powers for node in ast.walk(power) if isinstance(node, ast.Constant)]
    assert numbers and not any(isinstance(number, float) for number in numbers)


def test_a_portable_key_draws_normal_and_uniform_numbers():
    draw = PortableKey(0).fold("weights").generator()
    z, u = draw.standard_normal((100, 1000), np.float32), draw.uniform(-1, 3, 100_000)
    moments = [(z**n).mean(dtype=float) for n in (1, 2, 3, 4)]
    np.testing.assert_allclose(moments, [0, 1, 0, 3], atol=0.1)
    assert z.dtype == np.float32 and -1 <= u.min() < -0.99 and 2.99 < u.max() < 3 and abs(u.mean() - 1) < 0.02


REFUSAL = r"^\w+( with [\w, ]+)?: not one of the functions of real numbers|^portable \w+: expected float32"
REFUSED = [
    lambda x: np.sin(x),
    lambda x: np.einsum("ij,ij", x, x),
    lambda x: np.linalg.norm(x),
    *(lambda x, name=name: getattr(x, name)() for name in "std trace var".split()),
    *(
        lambda x, name=name: getattr(x, name)(0)
        for name in "argpartition argsort cumprod dot partition round sort".split()
    ),
    lambda x: x**3,
    lambda x: x**2,
    lambda x: operator.ipow(x, 2),
    lambda x: np.prod(x),
    lambda x: np.exp(x.astype(np.float64)),
    lambda x: np.exp(x > 0),
    lambda x: x.astype(np.float16) @ x.astype(np.float16),
    lambda x: np.add.reduceat(x, [0, 1]),
    lambda x: np.add.accumulate(x),
    lambda x: np.cumsum(x),
    lambda x: np.multiply.outer(x, x),
    lambda x: np.multiply.at(x, [0], 2.0),
    lambda x: np.add(x, x, dtype=np.float64),
    lambda x: np.add(x, x, where=x > 0),
    lambda x: np.maximum(x, x, out=x.copy(), where=x > 0),
    *(lambda x, f=f: f(x, where=x > 0) for f in (np.sum, np.mean)),
    *(lambda x, f=f: f(x, initial=1) for f in (np.sum, np.max)),
    lambda x: np.max(x, where=x > 0, initial=0),
]


@pytest.mark.parametrize("call", REFUSED)
def test_other_functions_are_refused_by_name(call):
    with pytest.raises(TypeError, match=REFUSAL):
        call(portable(np.ones((2, 2), np.float32)))


def test_means_and_sums_of_whole_numbers():
    x = portable(np.array([3, 1, 2, 2, 5]))
    assert x.mean() == 2.6 and (x > 2).mean() == 0.4 and type(x.mean()) is PortableArray
    assert x.sum().dtype == np.int64
    assert np.cumsum(x).tolist() == [3, 4, 6, 8, 13] and type(np.cumsum(x)) is PortableArray


def test_a_zero_has_the_same_sign_whatever_the_order():
    zeros = np.float32([0, -0.0, 0, -0.0])
    for x in zeros, zeros[::-1], zeros[[1, 3, 1, 3]]:
        assert not np.signbit(np.max(portable(x))) and not np.signbit(np.min(portable(x)))
        assert np.signbit(np.maximum(portable(x), zeros)).tolist() == np.signbit(zeros).tolist()


def as_float32(x, kind):
    return kind(x.astype(np.float32) if is_floating(x) else x) if is_array(x) else x


def of_operation(name, kind, device=CPU):
    """The results of a case of an operation, for arrays of a kind, on the CPU or on another device."""
    case = OPERATIONS[name](Draw(3, 1.0, device))
    y, cache = case.op(*(as_float32(x, kind) for x in case.args), **case.options)
    dy = kind(np.random.default_rng(0).standard_normal(y.shape).astype(np.float32))
    return [y, *as_tuple(case.op_backward(dy, cache))]


def of_layer(name, kind, device=CPU):
    """The same for a layer, with the gradients of its parameters."""
    case = LAYERS[name](Draw(3, 1.0, device))
    layer = case.layer.to(device, np.float32)
    if kind is portable and layer.parameters():
        make_portable(layer)
    y, cache = layer.forward(*(as_float32(x, kind) for x in case.inputs), **case.options)
    random = np.random.default_rng(0)
    dy = [kind(random.standard_normal(each.shape).astype(np.float32)) for each in as_tuple(y)]
    gradients = layer.backward(dy[0] if is_array(y) else type(y)(dy), cache)
    return [*as_tuple(y), *filter(is_array, as_tuple(gradients)), *(p.grad for p in layer.parameters())]


def all_cases(kind, device=CPU):
    cases = [(of_operation, name) for name in OPERATIONS]
    cases += [(of_layer, name) for name in LAYERS]
    return {name: function(name, kind, device) for function, name in cases}


def digest_of(arrays):
    digest = hashlib.sha256()
    for x in arrays:
        digest.update(np.ascontiguousarray(to_cpu(x), "<f8").tobytes())
    return digest.hexdigest()


def digest(cases):
    """SHA-256 of these results, and of three small models after some steps."""
    arrays = [x for results in cases.values() for x in results]
    sizes = dict(d_model=12, heads=2, depth=1, context=8, dropout=0.1, key=PortableKey(0))
    for kind, optimizer in (LanguageModel, Adam), (Llama, Muon), (partial(TransformerXL, memory=8), AdamW):
        model = make_portable(kind(31, **sizes))
        arrays += trained(model, optimizer(model.parameters(), 0.01))
    return digest_of(arrays)


def trained(model, optimizer, steps=3, shard=False, **options):
    """The parameters after some steps on a text of integers that is always the same, and each step's loss and norm."""
    text = (np.arange(700) ** 2 % 31).astype(np.uint8)
    batches = TextBatches(text, 16, 8, PortableKey(1))
    numbers = []
    with Replicas(model, **{"count": 2, **CUT, **options}) as replicas:
        if shard:
            replicas.shard(optimizer)
        for step in range(steps):
            loss = replicas.gradients(batches.batch(step), PortableKey(2, step))
            numbers += [float(loss), float(replicas.clip(optimizer, 0.1))]
            replicas.step(optimizer)
    return [model.flat.data, np.array(numbers)]


def test_the_bits_depend_neither_on_the_processor_nor_on_numba():
    """Of all operations, layers and models: here with the compiled twins for this processor, in another process with
    NumPy's plainest loops alone. All results are near the ordinary ones.
    """
    environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": " ".join(CHOSEN), "SCRATCHFORMER_FAST": "0"}
    command = [sys.executable, "-W", "ignore", __file__]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as other:
        with fast():
            cases = all_cases(portable)
            here = digest(cases)
        assert other.communicate(timeout=300)[0].strip() == here
    ordinary = all_cases(np.asarray)
    for name, results in cases.items():
        for x, expected in zip(results, ordinary[name], strict=True):
            assert type(x) is PortableArray, name
            size = max(1.0, abs(expected).max())
            np.testing.assert_allclose(np.asarray(x), expected, rtol=0, atol=5e-5 * size, err_msg=name)


def llama():
    return make_portable(Llama(31, d_model=12, heads=2, depth=1, context=8, dropout=0.1, key=PortableKey(0)))


def test_the_bits_do_not_depend_on_replicas_and_ranks():
    """Nor on whether the ranks share the optimizer's state, or blocks are recomputed."""
    from .parallel.ranks_in_threads import run_ranks  # here, since this file is also run as a program

    def parameters(recompute=False, **options):
        model = llama()
        if recompute:
            recompute_blocks(model)
        return digest_of(trained(model, Muon(model.parameters(), 0.01), **options)[:1])

    once = parameters(count=1)
    assert parameters(count=3) == parameters(recompute=True) == once
    for shard in False, True:
        assert {*run_ranks(3, lambda ranks, shard=shard: parameters(count=1, ranks=ranks, shard=shard))} == {once}


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("kind", ["Classifier", "EncoderDecoder"])
def test_padded_texts_in_micro_batches_of_one_row_and_of_two(kind, rows):
    """With the compiled twins and without."""
    ids, lengths, hashes = (np.arange(rows * 6) % 9 + 2).astype(np.int32).reshape(rows, 6), np.full(rows, 4), set()
    for context in fast, reference_only:
        with context():
            if kind == "Classifier":
                model = Classifier(11, 2, d_model=12, heads=2, depth=1, max_length=8, key=PortableKey(0))
                batch = LabelledBatch(ids, lengths, ids[:, 0] % 2)
            else:
                model = EncoderDecoder(11, d_model=12, heads=2, depth=1, key=PortableKey(0))
                batch = TranslationBatch(ids, lengths, ids, ids)
            replicas = Replicas(make_portable(model), 1, **CUT)
            replicas.gradients(batch, PortableKey(1))
            hashes.add(digest_of([model.flat.grad]))
    assert replicas.rows(batch) == rows // 8 and len(hashes) == 1


@pytest.mark.parametrize("setting", [dict(precision="bfloat16"), dict(precision="tf32"), dict(device=STRICT)])
def test_portable_bits_are_of_float32_on_a_cpu(setting):
    got = f"--precision {setting.get('precision', 'float32')} on {setting.get('device', 'cpu')}"
    with pytest.raises(ValueError, match=f"^bits: portable bits are those of float32 on a CPU .*, got {got}$"):
        Run("unused", 1, bits="portable", **setting)
    with pytest.raises(ValueError, match=r"^bits: expected ordinary or portable, got 'float32'$"):
        Run("unused", 1, bits="float32")


def test_portable_parameters_have_the_same_values():
    layer = Linear(2, 3)
    layer.flat.grad[...] = 7
    before = layer.state_dict()
    assert make_portable(layer) is layer and type(layer.flat.data) is PortableArray
    for name, p in layer.named_parameters().items():
        assert isinstance(p.data, PortableArray) and isinstance(p.grad, PortableArray) and (p.grad == 7).all()
        np.testing.assert_array_equal(p.data, before[name])


@pytest.mark.parametrize(
    ("to", "got"), [(dict(dtype=np.float64), "float64 on cpu"), (dict(device=STRICT), "float32 on strict")]
)
def test_other_parameters_are_not_made_portable(to, got):
    with pytest.raises(ValueError, match=f"^bits: portable bits need float32 on a CPU, got {got}$"):
        make_portable(Linear(2, 3).to(**to))


def test_portable_bits_need_small_numbers():
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("PyTorch cannot make small numbers 0 on this processor")
    try:
        with pytest.raises(RuntimeError, match=r"^bits: another library has made the processor replace "):
            make_portable(Linear(2, 3))
    finally:
        torch.set_flush_denormal(False)
    make_portable(Linear(2, 3))


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_layers_have_portable_bits(bits):
    model = make_portable(quantize(Llama(31, d_model=64, heads=2, depth=1, context=8, key=PortableKey(0)), bits))
    ids = portable(np.arange(8, dtype=np.int32)[None])
    logits = model(ids)
    with fast():
        again = model(ids)
    assert type(logits) is type(again) is PortableArray and digest_of([logits]) == digest_of([again])


def run_of(out, steps, replicas=1, **options):
    """A run of some steps, and an evaluation; returns the scores."""
    run = Run(out, steps, bits="portable", replicas=replicas, **options)
    text = (np.arange(700) ** 2 % 31).astype(np.uint8)
    batches = TextBatches(text, 16, 8, run.key("batches"))
    model = Llama(31, d_model=12, heads=2, depth=1, context=8, dropout=0.1, key=run.key("weights"))
    with run.replicas(model, batches) as replicas:
        optimizer = Adam(model.parameters(), 0.01)
        for step in run.steps(replicas, optimizer, batches):
            loss = replicas.gradients(batches.batch(step), run.key("train", step))
            norm = replicas.clip(optimizer, 1.0)
            optimizer.lr = Cosine(0.01, 2, 6)(step)
            replicas.step(optimizer)
            run.log(loss=loss, norm=norm)
        return [*evaluate_language_model(replicas, text).values(), mean_loss(replicas, [batches.batch(0)])]


HASH = "SHA-256 of the parameters after step 4: ([0-9a-f]{64})\n"


def test_a_run_prints_its_hash_and_is_resumed_without_numba(tmp_path, capsys):
    run_of(tmp_path / "whole", 4)
    printed = capsys.readouterr().out
    whole = re.findall(HASH, printed)
    assert len(whole) == 1 and "micro-batches of 2 rows" in printed
    run_of(tmp_path / "part", 2)
    with reference_only():
        run_of(tmp_path / "part", 4, resume=True)
    captured = capsys.readouterr()
    assert re.findall(HASH, captured.out) == whole and "bits" not in captured.err


def test_a_run_cuts_its_batches_in_one_way(tmp_path, capsys):
    """So its bits and its scores depend neither on what is asked for, nor on the number of replicas."""
    settings = [dict(), dict(micro_batch=1), dict(micro_batch=8), dict(micro_batches=3), dict(replicas=3)]
    scores = {tuple(run_of(tmp_path / str(i), 4, **options)) for i, options in enumerate(settings)}
    hashes = re.findall(HASH, capsys.readouterr().out)
    assert len(hashes) == len(settings) and len(scores) == len({*hashes}) == 1


if __name__ == "__main__":
    print(digest(all_cases(portable)))
