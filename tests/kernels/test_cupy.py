"""The twins for a GPU compared with the references: large cases on the CPU in float64, small ones on the GPU."""

import copy
import functools
import itertools
from functools import partial

import numpy as np
import pytest

from scratchformer import Key, models, ops
from scratchformer.backend import CPU, DeviceError, get_device, to_cpu, to_device
from scratchformer.catalogue import OPERATIONS, Draw
from scratchformer.data import SegmentBatches, TextBatches
from scratchformer.dispatch import TwinCache, fast, reference_only
from scratchformer.generation import KeyValueCache, generate
from scratchformer.nn.layer import add_gradients
from scratchformer.optim import Adam, AdamW, Muon, adam, clip_by_global_norm, newton_schulz, optimizer
from scratchformer.optim.optimizer import global_norm, share_for
from scratchformer.testing import check_precision
from scratchformer.testing.contracts import as_tuple, is_array, is_floating
from scratchformer.training import Replicas

try:
    GPU = get_device("gpu")
except DeviceError as error:
    pytest.skip(str(error), allow_module_level=True)

from scratchformer.kernels import cupy_cudnn

TYPES = ["float64", "float32", "bfloat16", "float16"]
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}


def has_twin(name):
    op = OPERATIONS[name](Draw()).op
    return any(GPU.xp.ndarray in twins for twins in getattr(op, "chosen", ()))


TWINS = [name for name in OPERATIONS if has_twin(name)]
RNG = np.random.default_rng(0)


def dtype_of(name):
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name)


def draw(*shape, scale=1.0):
    return scale * RNG.standard_normal(shape)


LENGTHS = np.array([256, 1, 100])


def heads(T, D, H=4, G=4, B=3, S=None):
    return draw(B, H, T, D), draw(B, G, S or T, D), draw(B, G, S or T, D)


LARGE = {  # name: op, backward, arguments, options; sizes for which the kernels take their fast paths
    "linear": (ops.linear, ops.linear_backward, (draw(4, 96, 128), draw(128, 256), draw(256)), {}),
    "linear of a transposed w": (ops.linear, ops.linear_backward, (draw(4, 96, 128), draw(1001, 128).T), {}),
    "linear, long and odd": (ops.linear, ops.linear_backward, (draw(1, 600, 515), draw(515, 601), draw(601)), {}),
    "linear, odd": (ops.linear, ops.linear_backward, (draw(2, 7, 33), draw(33, 15), draw(15)), {}),
    **{
        f"dense, {name}": (
            ops.dense,
            ops.dense_backward,
            (draw(2, 128, 64), draw(64, 256), draw(256)),
            {"activation": name},
        )
        for name in ("relu", "gelu", "gelu_tanh", "silu")
    },
    **{
        f"layernorm of {C}": (ops.layernorm, ops.layernorm_backward, (draw(2, 301, C), draw(C), draw(C)), {})
        for C in (48, 128, 256, 768, 1000, 1600, 2048)
    },
    **{
        f"cross_entropy of {V}": (
            ops.cross_entropy,
            ops.cross_entropy_backward,
            (draw(3, 50, V, scale=3), RNG.integers(-1, V, (3, 50))),
            {"ignore_index": -1, "label_smoothing": smoothing},
        )
        for V, smoothing in ((2, 0.0), (256, 0.1), (257, 0.0), (50_257, 0.0), (8192, 0.1))
    },
    "embedding, small": (ops.embedding, ops.embedding_backward, (RNG.integers(0, 256, (4, 300)), draw(256, 64)), {}),
    "embedding, large": (ops.embedding, ops.embedding_backward, (RNG.zipf(1.3, (4, 900)) % 5000, draw(5000, 96)), {}),
    "add": (ops.add, ops.add_backward, (draw(5, 7, 33), draw(5, 7, 33)), {}),
    "dropout": (ops.dropout, ops.dropout_backward, (draw(5, 7, 33), 0.3, Key(3)), {}),
    "attention": (ops.attention, ops.attention_backward, heads(256, 64), {}),
    "attention, causal": (ops.attention, ops.attention_backward, (*heads(256, 64), ops.Causal()), {}),
    "attention, causal and narrow": (ops.attention, ops.attention_backward, (*heads(300, 32), ops.Causal()), {}),
    "attention, padded": (ops.attention, ops.attention_backward, (*heads(256, 16), ops.Padding(LENGTHS)), {}),
    "attention, causal and padded": (
        ops.attention,
        ops.attention_backward,
        (*heads(256, 64), ops.Causal() & ops.Padding(LENGTHS)),
        {},
    ),
    "attention, local": (
        ops.attention,
        ops.attention_backward,
        (*heads(300, 16), ops.Causal() & ops.Local(40)),
        {},
    ),
    "attention, sparse": (
        ops.attention,
        ops.attention_backward,
        (*heads(300, 16), ops.Causal() & ops.Heads(ops.Local(40), ops.Strided(20))),
        {},
    ),
    "attention, every fifth of many keys": (
        ops.attention,
        ops.attention_backward,
        (*heads(3, 16, S=3000), ops.Strided(5)),
        {},
    ),
    **{
        f"relative attention, {M} in memory": (
            ops.relative_attention,
            ops.relative_attention_backward,
            (*heads(130, 16, S=130 + M), draw(4, 259 + M, 16), draw(4, 16), draw(4, 16), ops.Causal()),
            {},
        )
        for M in (0, 70, 500)
    },
    "attention in groups": (ops.attention, ops.attention_backward, (*heads(256, 64, 4, 2), ops.Causal()), {}),
    "attention, longer memory": (ops.attention, ops.attention_backward, (*heads(64, 32, S=192), ops.Causal()), {}),
    "attention, longer queries": (ops.attention, ops.attention_backward, (*heads(256, 32, S=64), ops.Causal()), {}),
}


def test_arrays_that_start_anywhere():
    """Parameters are parts of a flat array, and an argument may be a part of another array."""
    for dtype in map(dtype_of, TYPES):
        for start in 0, 1, 2, 3:

            def part(*shape, start=start, dtype=dtype):
                whole = to_device(RNG.standard_normal(start + int(np.prod(shape))), GPU).astype(dtype)
                return whole[start:].reshape(shape)

            x, w, b, gamma, beta, h = part(40, 48), part(48, 72), part(72), part(48), part(48), part(40, 72)
            strided, same = part(144)[::2], GPU.xp.broadcast_to(b[:1], (72,))
            for op, backward, args, dy in (
                (ops.linear, ops.linear_backward, (x, w, b), h),
                (ops.linear, ops.linear_backward, (x, w, strided), h),
                (ops.linear, ops.linear_backward, (x, w, same), h),
                (ops.dense, ops.dense_backward, (x, w, b), h),
                (ops.dense, ops.dense_backward, (x, w, strided, "gelu"), h),
                (ops.layernorm, ops.layernorm_backward, (x, gamma, beta), part(40, 48)),
                (ops.add, ops.add_backward, (x, part(40, 48)), part(40, 48)),
                (ops.dropout, ops.dropout_backward, (x, 0.4, Key(1)), part(40, 48)),
                (ops.cross_entropy, ops.cross_entropy_backward, (x, GPU.xp.arange(40)), 1.0),
            ):
                with fast():
                    y, cache = op(*args)
                    found = y, *as_tuple(backward(dy, cache))
                with reference_only():
                    y, cache = op(*map(on_cpu, args))
                    right = y, *as_tuple(backward(on_cpu(dy), cache))
                for f, e in zip(found, right, strict=True):
                    f = to_cpu(f).astype(np.float64)
                    assert np.abs(f - e).max() <= TOLERANCE[dtype.name] * np.abs(e).max(), (op, dtype, start)


@pytest.mark.parametrize("dtype", TYPES)
def test_gradients_are_added_to_what_is_there(dtype):
    """Those of parameters to parts of a flat array, as it has them, and dx to the gradient by another path."""
    dtype = dtype_of(dtype)
    x, w, tied, b, gamma, beta = draw(40, 768), draw(768, 72), draw(1001, 768).T, draw(72), draw(768), draw(768)
    for op, backward, *args in (
        (ops.linear, ops.linear_backward, x, w, b),
        (ops.linear, ops.linear_backward, x, tied),
        (ops.dense, ops.dense_backward, x, w, b, "gelu_tanh"),
        (ops.layernorm, ops.layernorm_backward, x, gamma, beta),
        (ops.layernorm, ops.layernorm_backward, x[:, :37], gamma[:37], beta[:37]),
        (ops.rmsnorm, ops.rmsnorm_backward, x, gamma),
    ):
        with reference_only():
            y, cache = op(*(rounded(a, dtype) for a in args))
            dy, plus = rounded(draw(*y.shape), dtype), rounded(draw(*args[0].shape), dtype)
            dx, *gradients = backward(dy, cache)
        flat = GPU.xp.ones(1 + sum(g.size for g in gradients), np.float64 if dtype == np.float64 else np.float32)
        start, grads = 1, []
        for g in gradients:
            grads.append(flat[start : start + g.size].reshape(g.shape if g.flags.c_contiguous else g.T.shape))
            start += g.size
        grads = [part if part.shape == g.shape else part.T for part, g in zip(grads, gradients, strict=True)]
        with fast():
            _, cache = op(*(on_gpu(a, dtype) for a in args))
            assert cache.twin.adds, op
            found = add_gradients(backward, on_gpu(dy, dtype), cache, grads, on_gpu(plus, dtype))
        for f, e in zip((found, *grads), (dx + plus, *(1 + g for g in gradients)), strict=True):
            assert f.shape == e.shape and np.abs(on_cpu(f) - e).max() <= TOLERANCE[dtype.name] * np.abs(e).max(), op


def on_cpu(x):
    """x in float64, if it is an array of real numbers."""
    return to_cpu(x).astype(np.float64) if is_floating(x) else to_cpu(x) if is_array(x) else x


@pytest.mark.parametrize("dtype", TYPES)
def test_lengths_of_zero_and_beyond_the_end(dtype, monkeypatch):
    monkeypatch.setattr(cupy_cudnn, "LARGE", 0)
    dtype, lengths = dtype_of(dtype), np.array([0, 1000, 7])
    q, k, v = (to_device(a, GPU).astype(dtype) for a in heads(64, 32))
    dy = to_device(draw(*q.shape), GPU).astype(dtype)
    with fast():
        y, cache = ops.attention(q, k, v, ops.Padding(to_device(lengths, GPU)))
        found = y, *ops.attention_backward(dy, cache)
    with reference_only():
        y, cache = ops.attention(*map(on_cpu, (q, k, v)), ops.Padding(lengths))
        right = y, *ops.attention_backward(on_cpu(dy), cache)
    for f, e in zip(found, right, strict=True):
        assert np.abs(on_cpu(f) - e).max() <= TOLERANCE[dtype.name] * np.abs(e).max()


def on_gpu(x, dtype):
    if isinstance(x, ops.Padding):
        return ops.Padding(to_device(x.lengths, GPU))
    if isinstance(x, ops.patterns.Both):
        return on_gpu(x.first, dtype) & on_gpu(x.second, dtype)
    if not is_array(x):
        return x
    moved = to_device(x, GPU)
    return moved.astype(dtype) if is_floating(x) else moved


def rounded(x, dtype):
    """x rounded to `dtype`, as float64."""
    return x.astype(dtype).astype(np.float64) if is_array(x) and is_floating(x) else x


@functools.cache
def expected(name, dtype):
    """y and the gradients in float64 on the CPU, of arguments rounded to `dtype`, and the dy that was used."""
    op, backward, args, options = LARGE[name]
    with reference_only():
        y, cache = op(*(rounded(a, dtype) for a in args), **options)
        dy = rounded(np.asarray(np.random.default_rng(1).standard_normal(np.shape(y))), dtype)
        dy = dy if dy.ndim else 1.0
        return y, as_tuple(backward(dy, cache)), dy


FUSED = [(name, dtype) for name in LARGE for dtype in ("bfloat16", "float16") if "attention" in name]


@pytest.mark.parametrize(
    ("name", "dtype", "fused"),
    [*((*case, False) for case in itertools.product(LARGE, TYPES)), *((*case, True) for case in FUSED)],
)
def test_large_cases(name, dtype, fused, monkeypatch):
    """fused: attention by cuDNN also where there are few scores."""
    monkeypatch.setattr(cupy_cudnn, "LARGE", 0 if fused else np.inf)
    monkeypatch.setattr(cupy_cudnn, "OFTEN", np.inf)
    op, backward, args, options = LARGE[name]
    dtype = dtype_of(dtype)
    y, gradients, dy = expected(name, dtype)
    with fast():
        moved = [on_gpu(a, dtype) for a in args]
        found, cache = op(*moved, **options)
        assert isinstance(cache, TwinCache) or "Cuda" in type(cache).__name__ or name == "add", "the reference ran"
        back = as_tuple(backward(dy if isinstance(dy, float) else on_gpu(dy, dtype), cache))
    assert found.dtype == dtype or (not found.shape and dtype.itemsize == 2)
    for f, e in zip((found, *back), (y, *gradients), strict=True):
        f = to_cpu(f).astype(np.float64)
        assert f.shape == np.shape(e)
        largest = max(np.abs(e).max(), 1e-3 * max(np.abs(g).max() for g in gradients))
        assert np.abs(f - e).max() <= TOLERANCE[dtype.name] * largest, np.abs(f - e).max() / largest


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", TWINS)
def test_small_cases(name, dtype, combinations):
    """All cases of `scratchformer check` with a twin, against the reference on the GPU."""
    for drawn in combinations(3, scale=[1e-2, 1.0, 10.0]):
        case = OPERATIONS[name](Draw(drawn["seed"], drawn["scale"], GPU, largest=17))
        args = [on_gpu(a, dtype) for a in case.args]
        results = []
        for context in fast, reference_only:
            with context():
                y, cache = case.op(*args, **case.options)
                rng = np.random.default_rng(0)
                dy = to_device(rng.standard_normal(y.shape).astype(dtype), GPU)
                results.append([to_cpu(a) for a in (y, *as_tuple(case.op_backward(dy, cache)))])
        largest = max(np.abs(a).max() for a in results[1])
        for f, p in zip(*results, strict=True):
            assert f.shape == p.shape and f.dtype == p.dtype
            tolerance = (1e-11 if dtype == "float64" else 2e-5) * max(1, drawn["scale"] ** 2)
            np.testing.assert_allclose(f, p, rtol=0, atol=tolerance * max(np.abs(p).max(), 0.1 * largest))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", [name for name in TWINS if "attention" not in name])
def test_half_precision_is_within_its_bounds(name, dtype):
    dtype = dtype_of(dtype)
    case = OPERATIONS[name](Draw(1, 0.5, GPU))

    def as_half(dy, cache):
        return tuple(g.astype(dtype) for g in as_tuple(case.op_backward(dy, cache)))

    with fast():
        check_precision(case.op, as_half, *case.args, dtype=dtype, seed=1, device=GPU, **case.options)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1, 1000, 100_003])
def test_flat_arrays(dtype, size):
    """Adam, the sum of squares, and clipping, also of arrays that do not start at a multiple of 16 bytes."""
    for start in 0, 1:
        arrays = [draw(size + start).astype(dtype) for _ in range(3)] + [draw(size + start).astype(dtype) ** 2]
        here = [a[start:].copy() for a in arrays]
        there = [to_device(a, GPU)[start:] for a in arrays]
        with fast():
            assert float(optimizer.sum_of_squares(there[1])) == pytest.approx(
                float(np.sum(here[1].astype(float) ** 2)), 1e-9
            )
            for t in 1, 2, 3:
                adam.adam_step(*there, 0.01, 0.9, 0.999, 1e-8, t)
        with reference_only():
            for t in 1, 2, 3:
                adam.adam_step(*here, 0.01, 0.9, 0.999, 1e-8, t)
        tolerance = 1e-6 if dtype == "float32" else 1e-14
        for f, e in zip(there, here, strict=True):
            np.testing.assert_allclose(to_cpu(f), e, rtol=tolerance, atol=0.1 * tolerance)
        with fast():
            norm = float(clip_by_global_norm(there[1], 1.0))
            assert norm == pytest.approx(np.linalg.norm(here[1].astype(float)), 1e-6)
            np.testing.assert_allclose(to_cpu(there[1]), here[1] / max(norm, 1), rtol=1e-6)
            before = to_cpu(there[2])
            clip_by_global_norm(there[2], 1e9)
            np.testing.assert_array_equal(to_cpu(there[2]), before)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(5, 256, 256), (3, 256, 683), (2, 2, 396, 128), (9, 4)])
def test_the_matrices_of_a_batch(shape, precision):
    """In bfloat16 both round, each in its own places."""
    g = draw(*shape).astype(np.float32)
    with fast():
        found = to_cpu(newton_schulz(to_device(g, GPU), precision=precision))
    expected = newton_schulz.reference(g.astype(np.float64))
    assert found.shape == shape
    assert np.linalg.norm(found - expected) < (1e-4 if precision == "float32" else 5e-2) * np.linalg.norm(expected)


@pytest.mark.parametrize("kind", [Adam, AdamW, Muon])
def test_all_parameters_are_stepped_together(kind):
    """With clipping, and copies in half precision of the weights, as on the CPU."""
    states = []
    for device in CPU, GPU:
        model = models.Llama(29, d_model=48, heads=4, depth=2, context=8, kv_heads=2, key=Key(0)).to(device)
        made = kind(model.parameters(), 0.01)
        half = model.flat.data.astype(dtype_of("float16"))
        with fast():
            for step in range(3):
                gradient = 1e-3 * Key(step).generator().standard_normal(model.flat.grad.shape, np.float32)
                model.flat.grad[...] = to_device(gradient, device)
                made.step(share=share_for(global_norm(made.gradients()), 0.1), half=half)
            assert device is CPU or made.work[1]
        states.append([to_cpu(x).astype(np.float64) for x in (model.flat.data, made.m, made.v, half)])
    for found, right in zip(*reversed(states), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding(dtype):
    dtype, x = dtype_of(dtype), draw(10_001).astype(np.float32)
    for start in 0, 1:
        with fast():
            out = GPU.xp.zeros(len(x) - start, dtype)
            ops.rounding.round_into(to_device(x, GPU)[start:], out)
        np.testing.assert_array_equal(to_cpu(out), x[start:].astype(dtype))


def test_the_gradient_of_a_table_is_the_same_in_every_run():
    ids, dy = to_device(RNG.integers(0, 3000, (8, 512)), GPU), to_device(draw(8, 512, 64).astype(np.float32), GPU)
    with fast():
        _, cache = ops.embedding(ids, GPU.xp.zeros((5000, 64), np.float32))
        first, *others = (to_cpu(ops.embedding_backward(dy, cache)) for _ in range(5))
    for other in others:
        np.testing.assert_array_equal(other, first)


MODELS = {
    "LanguageModel": models.LanguageModel,
    "TransformerXL": functools.partial(models.TransformerXL, memory=128),
    "SparseTransformer": functools.partial(models.SparseTransformer, stride=11),
}


def model_and_batches(name="LanguageModel", dropout=0.0):
    model = MODELS[name](256, d_model=64, heads=4, depth=2, context=128, dropout=dropout, key=Key(0))
    text = Key(1).generator().integers(0, 256, 100_000, dtype=np.uint8)
    if name == "TransformerXL":
        return model, SegmentBatches(text, 8, 128, Key(2), depth=2, d_model=64)
    return model, TextBatches(text, 8, 128, Key(2))


def losses(device, precision, name, dropout, steps=12, **options):
    """The losses of some steps, and how many graphs there are."""
    model, batches = model_and_batches(name, dropout)
    model = model.to(device)
    adam = Adam(model.parameters(), 1e-3)
    found = []
    with Replicas(model, 1, precision=precision, **options) as replicas:
        for number in range(steps):
            remember = functools.partial(batches.remember, number) if name == "TransformerXL" else None
            found.append(replicas.gradients(batches.batch(number), Key(5, number), remember))
            clip_by_global_norm(model.flat.grad, 1.0)
            adam.step(replicas.map)
        recorded = len(replicas.graphs.recorded) if replicas.graphs else 0
    return [float(loss) for loss in found], recorded


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("tf32", 2e-3), ("bfloat16", 5e-3)])
@pytest.mark.parametrize("micro_batch", [8, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", MODELS)
def test_a_recorded_step_is_that_of_the_cpu(name, dropout, micro_batch, precision, tolerance, monkeypatch):
    """Losses of training with CUDA graphs, without them, and on the CPU."""
    here, _ = losses(CPU, "float32", name, dropout, micro_batch=micro_batch)
    there, recorded = losses(GPU, precision, name, dropout, micro_batch=micro_batch)
    assert recorded == (1 if micro_batch == 8 else 2)  # of 8 rows, 2 are left after micro-batches of 3
    np.testing.assert_allclose(there, here, rtol=tolerance)
    monkeypatch.setenv("SCRATCHFORMER_GRAPHS", "0")
    plain, _ = losses(GPU, precision, name, dropout, micro_batch=micro_batch)
    # in half precision the recorded step has cuDNN's attention, the plain one not for so few scores
    np.testing.assert_allclose(plain, there, rtol=tolerance if precision == "bfloat16" else 0)


def test_steps_are_recorded(recwarn):
    model, batches = model_and_batches()
    with Replicas(model.to(GPU), 1) as replicas:
        for number in range(4):
            replicas.gradients(batches.batch(number), Key(number))
        assert len(replicas.graphs.recorded) == 1
        assert replicas.graphs.memory() > 0
    assert not recwarn.list


SMALL = dict(d_model=64, heads=4, depth=2, context=16)
GENERATORS = {
    "GPT2": partial(models.GPT2, 301, **SMALL),
    "Llama": partial(models.Llama, 301, kv_heads=2, window=9, **SMALL),
    "LanguageModel": partial(models.LanguageModel, 301, **SMALL),
}


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", GENERATORS)
def test_recorded_tokens_have_the_logits_of_the_cpu(name, dtype, batch, recwarn):
    """Until the context has become full twice."""
    here = GENERATORS[name](key=Key(0)).to(dtype=dtype_of(dtype))
    there, here = copy.deepcopy(here).to(GPU), here.to(dtype=np.float64)
    ids, cache, expected = RNG.integers(0, 301, (batch, 40)), KeyValueCache(there, batch), KeyValueCache(here, batch)
    for token in np.split(ids, ids.shape[1], axis=1):
        right = expected.logits(token)
        with fast():
            error = np.abs(to_cpu(cache.logits(token)).astype(np.float64) - right).max() / np.abs(right).max()
        assert error < TOLERANCE[dtype]
    assert cache.token_step.recording is not None
    assert not recwarn.list


def test_recorded_tokens_are_those_of_a_step_that_is_not(monkeypatch):
    model, texts = GENERATORS["GPT2"](key=Key(0)).to(GPU), []
    for recorded in "1", "0":
        monkeypatch.setenv("SCRATCHFORMER_GRAPHS", recorded)
        texts.append(np.array([*generate(model, np.zeros((2, 3), np.int64), 40, top_p=0.9)]))
    np.testing.assert_array_equal(*texts)
