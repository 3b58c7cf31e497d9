"""Folders of published weights: what is loaded, and the errors for those that do not fit."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from scratchformer.models import GPT2, Llama
from scratchformer.models.pretrained import PretrainedError, TensorSource, load_weights, read_config
from scratchformer.nn import Layer, Linear
from scratchformer.rng import Key
from scratchformer.training.readers import load_writer

CONFIG = {"model_type": "gpt2", "vocab_size": 11, "n_embd": 6, "n_head": 2, "n_layer": 2, "n_positions": 5}


def their_tensors(draw, prefix="transformer."):
    """GPT-2's tensors for CONFIG, with its names."""
    V, C, P = CONFIG["vocab_size"], CONFIG["n_embd"], CONFIG["n_positions"]
    shapes = {"wte.weight": (V, C), "wpe.weight": (P, C), "ln_f.weight": (C,), "ln_f.bias": (C,)}
    for i in range(CONFIG["n_layer"]):
        for name, shape in {
            "ln_1": (C,), "attn.c_attn": (C, 3 * C), "attn.c_proj": (C, C), "ln_2": (C,), "mlp.c_fc": (C, 4 * C),
            "mlp.c_proj": (4 * C, C),
        }.items():  # fmt: skip
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[-1:]}
    return {prefix + name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write(folder, tensors=None, **changes):
    """Write a folder with these tensors, and CONFIG with `changes`; None removes a setting."""
    config = {name: value for name, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(their_tensors(Key(0).generator()) if tensors is None else tensors, folder / "model.safetensors")


@pytest.fixture
def tensors():
    return their_tensors(Key(0).generator())


@pytest.mark.parametrize("value", [np.float32(np.nan), np.float64(1e300)])
def test_weights_that_are_not_finite_are_refused(tmp_path, tensors, value):
    name = "transformer.wpe.weight"
    tensors[name] = tensors[name].astype(value.dtype)
    tensors[name][1, 2] = value
    write(tmp_path, tensors)
    with pytest.raises(PretrainedError, match=r"wpe\.weight: expected finite numbers that fit in float32$"):
        GPT2.from_pretrained(tmp_path)


def test_every_tensor_arrives_where_it_belongs(tmp_path, tensors):
    write(tmp_path, tensors)
    model = GPT2.from_pretrained(tmp_path, dropout=0.3)
    state, C = model.state_dict(), 6
    sizes = dict(vocab_size=11, d_model=6, heads=2, depth=2, context=5)
    assert model.config == dict(
        **sizes, dropout=0.3, d_ff=None, eps=1e-5, recompute=False, tied=True, activation="gelu_tanh"
    )
    for i, part in enumerate(("query", "key", "value")):
        columns = slice(i * C, (i + 1) * C)
        stored = tensors["transformer.h.1.attn.c_attn.weight"], tensors["transformer.h.1.attn.c_attn.bias"]
        assert np.array_equal(state[f"body.blocks.1.attention.{part}.w"], stored[0][:, columns])
        assert np.array_equal(state[f"body.blocks.1.attention.{part}.b"], stored[1][columns])
    for ours, theirs in {
        "tokens.table": "wte.weight",
        "positions.table": "wpe.weight",
        "blocks.0.attention.unify.w": "h.0.attn.c_proj.weight",
        "blocks.0.feedforward.up.b": "h.0.mlp.c_fc.bias",
        "blocks.1.feedforward.down.w": "h.1.mlp.c_proj.weight",
        "blocks.1.norm1.gamma": "h.1.ln_1.weight",
        "blocks.1.norm2.beta": "h.1.ln_2.bias",
        "final_norm.gamma": "ln_f.weight",
    }.items():
        assert np.array_equal(state[f"body.{ours}"], tensors[f"transformer.{theirs}"]), ours
    assert model.output.table is model.body.tokens.table


def test_half_precision_becomes_float32(tmp_path, tensors):
    write(tmp_path, {name: array.astype(np.float16) for name, array in tensors.items()})
    model = GPT2.from_pretrained(tmp_path)
    assert {p.data.dtype for p in model.parameters()} == {np.dtype(np.float32)}
    assert np.array_equal(model.body.tokens.table.data, tensors["transformer.wte.weight"].astype(np.float16))


def write_bfloat16(path, tensors):
    """Write tensors like the library, every other one in float32. For NumPy the upper halves are integers."""
    header, data = {}, b""
    for i, (name, array) in enumerate(tensors.items()):
        kind, bits = ("F32", array) if i % 2 else ("BF16", (array.view(np.uint32) >> 16).astype("<u2"))
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [len(data), len(data) + bits.nbytes]}
        data += bits.tobytes()
    header = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def test_bfloat16_becomes_float32(tmp_path, tensors):
    write(tmp_path, tensors)
    write_bfloat16(tmp_path / "model.safetensors", tensors)
    model = GPT2.from_pretrained(tmp_path)
    assert {p.data.dtype for p in model.parameters()} == {np.dtype(np.float32)}
    table = tensors["transformer.wte.weight"]
    upper = (table.view(np.uint32) >> 16 << 16).view(np.float32)
    assert np.array_equal(model.body.tokens.table.data, upper)
    np.testing.assert_allclose(upper, table, rtol=2**-7)
    assert np.array_equal(model.body.positions.table.data, tensors["transformer.wpe.weight"])  # this one is float32


def write_shards(folder, tensors, count=3, **changes):
    """Write the tensors to `count` files, and the index of where they are, with `changes`."""
    write(folder, tensors)
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{i % count + 1:05}-of-{count:05}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(places.values()):
        save_file({name: tensors[name] for name, place in places.items() if place == shard}, folder / shard)
    index = {"metadata": {"total_size": 1}, "weight_map": places | changes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return places


def test_weights_in_several_files(tmp_path, tensors):
    write(tmp_path, tensors)
    whole = GPT2.from_pretrained(tmp_path).state_dict()
    places = write_shards(tmp_path, tensors)
    state = GPT2.from_pretrained(tmp_path).state_dict()
    assert all(np.array_equal(array, whole[name]) for name, array in state.items())
    write_bfloat16(
        tmp_path / "model-00002-of-00003.safetensors", {n: tensors[n] for n, p in places.items() if "02" in p}
    )
    half = GPT2.from_pretrained(tmp_path).state_dict()
    changed = {name for name, array in half.items() if not np.array_equal(array, whole[name])}
    assert changed and all(np.allclose(half[name], whole[name], rtol=2**-7) for name in changed)


def test_files_that_do_not_go_together(tmp_path, tensors):
    name, shard = "transformer.wpe.weight", "model-00002-of-00003.safetensors"
    places = write_shards(tmp_path, tensors)
    assert places[name] == shard
    (tmp_path / shard).unlink()
    with pytest.raises(PretrainedError, match=f"{shard}: No such file or directory$"):
        GPT2.from_pretrained(tmp_path)
    (tmp_path / shard).write_bytes(b"12")
    with pytest.raises(PretrainedError, match=f"{shard} is damaged"):
        GPT2.from_pretrained(tmp_path)

    index = r"model\.safetensors\.index\.json"
    for place in "../model.safetensors", "/etc/passwd", "..", 3:
        write_shards(tmp_path, tensors, more=place)
        with pytest.raises(PretrainedError, match=rf"{index}: more: expected a file NAME.safetensors in the folder"):
            GPT2.from_pretrained(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    for damaged in "{", "3", "{}", '{"weight_map": 3}':
        path.write_text(damaged)
        with pytest.raises(PretrainedError, match=rf"{index} is damaged"):
            GPT2.from_pretrained(tmp_path)


def test_a_pickle_is_not_read(tmp_path):
    """The message says how to convert the weights; the file is not read."""
    write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    message = r"model\.safetensors: no such file; pytorch_model\.bin is a pickle, .*save_pretrained\(folder, safe_ser"
    with pytest.raises(PretrainedError, match=message):
        GPT2.from_pretrained(tmp_path)


def test_an_output_with_weights_of_its_own(tmp_path, tensors):
    """Its matrix is (out, in), unlike the others of GPT-2. A folder without it is rejected."""
    write(tmp_path, tensors, tie_word_embeddings=False)
    with pytest.raises(PretrainedError, match=r"missing: lm_head\.weight"):
        GPT2.from_pretrained(tmp_path)
    head = Key(5).generator().standard_normal((11, 6), np.float32)
    write(tmp_path, tensors | {"lm_head.weight": head}, tie_word_embeddings=False)
    model = GPT2.from_pretrained(tmp_path)
    assert model.config["tied"] is False and np.array_equal(model.output.w.data, head.T) and model.output.b is None
    ids = np.array([[1, 4, 2]])
    assert np.array_equal(model(ids), model.body(ids) @ head.T)
    write(tmp_path, tensors | {"lm_head.weight": head})
    with pytest.raises(PretrainedError, match=r"lm_head\.weight: expected a copy of wte\.weight"):
        GPT2.from_pretrained(tmp_path)


def test_tensors_of_a_type_that_is_not_read(tmp_path, tensors):
    write(tmp_path, tensors | {"transformer.wpe.weight": np.zeros((5, 6), np.int32)})
    with pytest.raises(PretrainedError, match=r"wpe\.weight: expected one of the types F64, F32, F16, BF16, got I32"):
        GPT2.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("transformer.h.1.ln_2.bias"), r"missing: h\.1\.ln_2\.bias"),
        (lambda t: t.update({"transformer.h.2.ln_1.bias": np.zeros(6)}), r"unknown: h\.2\.ln_1\.bias"),
        (lambda t: t.update({"score.weight": np.zeros(6)}), r"unknown: score\.weight"),
        (
            lambda t: t.update({"transformer.wpe.weight": np.zeros((9, 6))}),
            r"wpe\.weight: expected \(5, 6\), got \(9, 6\)",
        ),
        (
            lambda t: t.update({"transformer.h.0.attn.c_attn.weight": np.zeros((6, 17))}),
            r"h\.0\.attn\.c_attn\.weight: expected \(6, 18\), got \(6, 17\)",
        ),
        (
            lambda t: t.update({"transformer.h.0.mlp.c_fc.weight": np.zeros((24, 6))}),
            r"h\.0\.mlp\.c_fc\.weight: expected \(6, 24\), got \(24, 6\)",
        ),
    ],
)  # fmt: skip
def test_weights_of_another_model_are_named(tmp_path, tensors, change, message):
    change(tensors)
    write(tmp_path, tensors)
    with pytest.raises(PretrainedError, match=rf"model\.safetensors: weights of another model: .*{message}"):
        GPT2.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layer": 10**7}, r"missing: h\.2\.attn\.c_attn\.weight; missing: h\.2\.mlp\.c_fc\.weight$"),
        ({"vocab_size": 10**9}, r"wte\.weight: expected \(1000000000, 6\), got \(11, 6\)$"),
        ({"n_positions": 10**9}, r"wpe\.weight: expected \(1000000000, 6\), got \(5, 6\)$"),
        ({"n_inner": 10**9}, r"h\.0\.mlp\.c_fc\.weight: expected \(6, 1000000000\), got \(6, 24\); .*"),
    ],
    ids=str,
)
def test_sizes_are_compared_with_the_tensors_before_a_model_is_made(tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(GPT2, "__init__", None)
    write(tmp_path, **changes)
    with pytest.raises(PretrainedError, match=rf"model\.safetensors: weights of another model: {message}"):
        GPT2.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "expected model_type 'gpt2', got 'bert'"),
        ({"n_head": None, "n_layer": None}, "n_head, n_layer missing"),
        ({"n_head": 4}, "cannot create this model: heads: 4 does not divide d_model 6"),
        ({"n_layer": 0}, "n_layer: expected a whole number >= 1, got 0"),
        ({"n_embd": "6"}, "n_embd: expected a whole number >= 1, got '6'"),
        ({"n_head": 2.0}, "n_head: expected a whole number >= 1, got 2.0"),
        ({"n_inner": 0}, "n_inner: expected a whole number >= 1, got 0"),
        ({"vocab_size": 10**14}, "vocab_size: expected at most 2,147,483,647, got 100000000000000"),
        ({"layer_norm_epsilon": "x"}, "layer_norm_epsilon: expected a number >= 0, got 'x'"),
        ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon: expected a number >= 0, got nan"),
        ({"resid_pdrop": -0.1}, "resid_pdrop: expected a number >= 0, got -0.1"),
        (
            {"activation_function": "relu"},
            "activation_function: expected 'gelu_new' or 'gelu_py.*, got 'relu'",
        ),
        ({"scale_attn_weights": False}, "scale_attn_weights: expected True, got False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: expected False, got True"),
        ({"is_causal": False}, "is_causal: expected True, got False"),
        ({"add_cross_attention": True}, "add_cross_attention: expected False, got True"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: expected True or False, got 'no'"),
    ],
    ids=str,
)
def test_settings_that_are_not_this_model(tmp_path, changes, message):
    write(tmp_path, **changes)
    with pytest.raises(PretrainedError, match=rf"config\.json: {message}"):
        GPT2.from_pretrained(tmp_path)


def test_settings_that_are_this_model(tmp_path):
    write(tmp_path, activation_function="gelu_pytorch_tanh", layer_norm_epsilon=1e-3, n_inner=None, n_ctx=5)
    assert GPT2.from_pretrained(tmp_path).body.final_norm.eps == 1e-3
    write(tmp_path, resid_pdrop=0.25, embd_pdrop=0.25)
    assert GPT2.from_pretrained(tmp_path).config["dropout"] == 0.25
    assert GPT2.from_pretrained(tmp_path, dropout=0).config["dropout"] == 0
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"n_inner": None}))
    assert GPT2.from_pretrained(tmp_path).config["d_ff"] is None
    write(tmp_path, n_inner=12)
    with pytest.raises(PretrainedError, match=r"h\.0\.mlp\.c_fc\.weight: expected \(6, 12\), got \(6, 24\)"):
        GPT2.from_pretrained(tmp_path)


def test_a_wrong_argument_is_not_blamed_on_the_folder(tmp_path):
    write(tmp_path)
    with pytest.raises(TypeError, match=r"^recompute: expected True or False, got 'no'$"):
        GPT2.from_pretrained(tmp_path, recompute="no")
    for dropout in (2.0, 1, -0.1):
        with pytest.raises(ValueError, match=f"^dropout: expected 0 <= p < 1, got {dropout}$") as raised:
            GPT2.from_pretrained(tmp_path, dropout=dropout)
        assert raised.type is ValueError


def test_files_that_are_missing_or_damaged(tmp_path):
    with pytest.raises(PretrainedError, match=r"config\.json: No such file"):
        GPT2.from_pretrained(tmp_path)
    for text in "{", "3", '"gpt2"':
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(PretrainedError, match=r"config\.json is damaged"):
            read_config(tmp_path, "gpt2")
    write(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in whole[:-100], whole[:50], b"":
        weights.write_bytes(damaged)
        with pytest.raises(PretrainedError, match=r"model\.safetensors is damaged"):
            GPT2.from_pretrained(tmp_path)
    weights.unlink()
    with pytest.raises(PretrainedError, match=r"model\.safetensors: no such file; expected a folder with config\.json"):
        GPT2.from_pretrained(tmp_path)


class Three(Layer):
    """Affine maps, one for each way in which a tensor can become a parameter."""

    def __init__(self):
        self.first, self.second, self.third = Linear(3, 2, key=Key(1)), Linear(3, 3, False), Linear(3, 2, False)


THREE = {
    "first.w": TensorSource("both", columns=slice(0, 2)),
    "second.w": TensorSource("both", columns=slice(2, 5)),
    "third.w": TensorSource("turned", transposed=True),
    "first.b": TensorSource("bias"),
}


def write_three(folder, **shapes):
    draw = Key(3).generator()
    shapes = {"both": (3, 5), "turned": (2, 3), "bias": (2,), "old.1": (1,)} | shapes
    tensors = {name: draw.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file({f"model.{name}": array for name, array in tensors.items()}, folder / "model.safetensors")
    return tensors


def test_columns_and_transposed_tensors(tmp_path):
    tensors, model = write_three(tmp_path), Three()
    load_weights(model, tmp_path, THREE, ignored=r"old\.\d", prefix="model.")
    expected = {
        "first.w": tensors["both"][:, :2],
        "second.w": tensors["both"][:, 2:],
        "third.w": tensors["turned"].T,
        "first.b": tensors["bias"],
    }
    assert all(np.array_equal(array, expected[name]) for name, array in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("turned", (3, 2), r"turned: expected \(2, 3\), got \(3, 2\)$"),
        ("both", (3, 6), r"both: expected \(3, 5\), got \(3, 6\)$"),
        ("both", (5,), r"both: expected \(3, 5\), got \(5,\)$"),
        ("bias", (), r"bias: expected \(2,\), got \(\)$"),
    ],
)
def test_a_shape_that_does_not_fit_is_named_and_nothing_is_changed(tmp_path, name, shape, message):
    write_three(tmp_path, **{name: shape})
    model = Three()
    before = model.state_dict()
    with pytest.raises(PretrainedError, match=message):
        load_weights(model, tmp_path, THREE, r"old\.1", "model.")
    assert all(np.array_equal(before[n], array) for n, array in model.state_dict().items())


def test_a_file_that_kept_the_output_of_a_tied_pair(tmp_path, tensors):
    """Some programs save tied weights once, under the output's name."""
    write(tmp_path, tensors)
    expected = GPT2.from_pretrained(tmp_path).state_dict()
    tensors = dict(tensors)
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")
    write(tmp_path, tensors)
    state = GPT2.from_pretrained(tmp_path).state_dict()
    assert all(np.array_equal(state[name], array) for name, array in expected.items())
    write(tmp_path, tensors, tie_word_embeddings=False)
    with pytest.raises(PretrainedError, match=r"wte\.weight"):
        GPT2.from_pretrained(tmp_path)


def test_what_is_given_in_place_of_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF\3\0\0\0" + bytes(100))
    for folder, name in (("meta", "params.json"), ("peft", "adapter_config.json"), ("gguf", "model-q4.gguf")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("{}")
    for path, message in (
        ("a.gguf", "a.gguf: expected a Hugging Face folder, .*, got a GGUF file"),
        ("gguf", "gguf: expected .*, got a GGUF file, model-q4.gguf"),
        ("meta", "meta: expected .*, got Meta's own format"),
        ("peft", "peft: expected .*, got a PEFT adapter"),
        (
            "meta-llama/Llama-3",
            "no such folder; .* download it first: hf download meta-llama/Llama-3 --local-dir FOLDER",
        ),
    ):
        for read in (GPT2.from_pretrained, Llama.from_pretrained, load_writer):
            with pytest.raises(PretrainedError, match=message):
                read(path)
    with pytest.raises(PretrainedError, match=r"nowhere: no such folder$"):
        GPT2.from_pretrained("nowhere")
