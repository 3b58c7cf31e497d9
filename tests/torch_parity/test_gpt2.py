"""GPT-2 compared with the transformers library, which saves random weights that we load."""

import json

import numpy as np
import pytest

from scratchformer.generation import generate, penalised
from scratchformer.generation.sampling import occurrences
from scratchformer.models import GPT2
from scratchformer.models.pretrained import PretrainedError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

B, T, V = 3, 10, 53
SIZES = {
    "small": dict(n_embd=32, n_head=4, n_layer=2, n_positions=16),
    "other": dict(n_embd=24, n_head=2, n_layer=3, n_positions=12, n_inner=40, layer_norm_epsilon=1e-2),
}
DRAW = np.random.default_rng(0)
IDS = DRAW.integers(0, V, (B, T + 1))


@pytest.fixture(scope="module", params=SIZES)
def saved(request, tmp_path_factory):
    """The library's model without dropout, and the folder where it is saved."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=V, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=None, pad_token_id=0,
        **SIZES[request.param],
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).eval()
    for p in theirs.parameters():  # including biases and norms, and large enough for each part to matter
        p.data += 0.1 * torch.randn_like(p)
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return theirs, folder


def test_logits(saved):
    theirs, folder = saved
    ours = GPT2.from_pretrained(folder)
    logits = ours(IDS[:, :-1])
    expected = theirs(torch.from_numpy(IDS[:, :-1])).logits.detach().numpy()
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
    assert np.abs(expected).max() > 0.5


def test_exact_gelu_and_a_wider_vocabulary(tmp_path):
    config = transformers.GPT2Config(vocab_size=V, activation_function="gelu", **SIZES["small"])
    theirs = transformers.GPT2LMHeadModel(config).eval().double()
    for p in theirs.parameters():
        p.data += 0.3 * torch.randn_like(p)
    theirs.save_pretrained(tmp_path)
    ours = GPT2.from_pretrained(tmp_path, dropout=0.0).to(dtype=np.float64)
    expected = theirs(torch.from_numpy(IDS)).logits.detach().numpy()
    np.testing.assert_allclose(ours(IDS), expected, rtol=1e-5, atol=1e-5)
    tanh = GPT2(**ours.config | {"activation": "gelu_tanh"}).to(dtype=np.float64)
    tanh.load_state_dict(ours.state_dict())
    assert np.abs(tanh(IDS) - expected).max() > 1e-4


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_loss_and_gradients_of_every_parameter(saved, dtype):
    theirs, folder = saved
    theirs = theirs.to(torch.from_numpy(np.zeros(0, dtype)).dtype)
    ours = GPT2.from_pretrained(folder, dropout=0.0).to(dtype=dtype)
    tolerance = 1e-4 if dtype == np.float32 else 1e-9
    loss, cache = ours.loss(IDS[:, :-1], IDS[:, 1:])
    ours.loss_backward(1.0, cache)
    theirs.zero_grad()
    logits = theirs(torch.from_numpy(IDS[:, :-1])).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(IDS[:, 1:]).flatten())
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=tolerance)
    parameters = {name.removeprefix("transformer."): p.grad.numpy() for name, p in theirs.named_parameters()}
    seen, sources = set(), ours.tensors()
    for name, p in ours.named_parameters().items():
        tensor = sources[name]
        grad = parameters[tensor.name][..., tensor.columns]
        seen.add(tensor.name)
        # The bias of a key shifts all scores of a query equally: its gradient is zero up to rounding.
        size = np.linalg.norm(parameters[tensor.name])
        assert np.linalg.norm(p.grad - grad) <= tolerance * size, name
    assert seen == parameters.keys()
    theirs.float()


def test_greedy_generation_is_the_same(saved):
    theirs, folder = saved
    ours, prompt = GPT2.from_pretrained(folder), IDS[:, :4]
    count = ours.context - 4
    found = np.stack(list(generate(ours, prompt, count, temperature=0)), axis=1)
    options = dict(max_new_tokens=count, do_sample=False, attention_mask=torch.ones(B, 4, dtype=torch.long))
    expected = theirs.generate(torch.from_numpy(prompt), **options)[:, 4:].numpy()
    np.testing.assert_array_equal(found, expected)
    assert len(set(found.flatten().tolist())) > 1


@pytest.mark.parametrize("penalty", [0.7, 1.3, 5.0])
def test_a_repetition_penalty_is_theirs(saved, penalty):
    """Of one logit or another, and so of the whole text."""
    theirs, folder = saved
    ours, prompt = GPT2.from_pretrained(folder), IDS[:, :4]
    logits, occurred = ours(prompt)[:, -1].astype(np.float64), occurrences(prompt, ours.config["vocab_size"])
    processed = transformers.RepetitionPenaltyLogitsProcessor(penalty)(
        torch.from_numpy(prompt), torch.from_numpy(logits)
    )
    np.testing.assert_allclose(penalised(logits, occurred, penalty), processed.numpy(), rtol=1e-12)
    count = ours.context - 4
    found = np.stack(list(generate(ours, prompt, count, temperature=0, repetition_penalty=penalty)), axis=1)
    options = dict(max_new_tokens=count, do_sample=False, attention_mask=torch.ones(B, 4, dtype=torch.long))
    expected = theirs.generate(torch.from_numpy(prompt), repetition_penalty=penalty, **options)[:, 4:].numpy()
    np.testing.assert_array_equal(found, expected)


def test_names_with_and_without_the_prefix_and_old_buffers(saved, tmp_path):
    """The published files have no prefix, and two buffers beside each layer's weights."""
    from safetensors.numpy import load_file, save_file

    _, folder = saved
    tensors = load_file(folder / "model.safetensors")
    assert all(name.startswith("transformer.") for name in tensors)
    bare = {name.removeprefix("transformer."): array for name, array in tensors.items()}
    mask = np.tril(np.ones((1, 1, 4, 4), np.float32))
    bare |= {"h.0.attn.bias": mask, "h.0.attn.masked_bias": np.float32([-1e4]), "lm_head.weight": bare["wte.weight"]}
    save_file(bare, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    first, second = (GPT2.from_pretrained(path).state_dict() for path in (folder, tmp_path))
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_the_published_sizes_have_the_names_that_the_library_gives(saved):
    theirs, _ = saved
    model = GPT2(V, 24, 2, theirs.config.n_layer, 12)
    ours = {source.name for source in model.tensors().values()}
    assert ours == {name.removeprefix("transformer.") for name, _ in theirs.named_parameters()}


def test_config_is_read_as_it_is_written(saved):
    theirs, folder = saved
    found, written = GPT2.from_pretrained(folder).config, json.loads((folder / "config.json").read_text())
    assert found["d_ff"] == theirs.config.n_inner and found["eps"] == written["layer_norm_epsilon"]
    assert [found[name] for name in ("d_model", "heads", "depth", "context")] == [
        written[name] for name in ("n_embd", "n_head", "n_layer", "n_positions")
    ]


FORMS = {
    "bfloat16": (torch.bfloat16, {}),
    "float16": (torch.float16, {}),
    "several files": (torch.float32, {"max_shard_size": "20KB"}),
    "several files of bfloat16": (torch.bfloat16, {"max_shard_size": "10KB"}),
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_the_weights(tied, form, tmp_path):
    """Half precision, several files, and an output that is not tied to the token table."""
    dtype, saving = FORMS[form]
    torch.manual_seed(0)
    kept = dict(vocab_size=V, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=None)
    config = transformers.GPT2Config(**kept, **SIZES["small"])
    theirs = transformers.GPT2LMHeadModel(config).eval()
    for p in theirs.parameters():
        p.data += 0.1 * torch.randn_like(p)
    theirs = theirs.to(dtype)
    theirs.save_pretrained(tmp_path, **saving)
    assert (tmp_path / "model.safetensors.index.json").exists() == bool(saving)
    ours = GPT2.from_pretrained(tmp_path)
    assert ("output.w" in ours.named_parameters()) is not tied
    expected = theirs.float()(torch.from_numpy(IDS[:, :-1])).logits.detach().numpy()
    logits = ours(IDS[:, :-1])
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
    assert np.abs(expected).max() > 0.5


def test_what_the_message_on_a_pickle_says_to_do(saved, tmp_path):
    theirs, _ = saved
    theirs.config.save_pretrained(tmp_path)
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(PretrainedError, match=r"pytorch_model\.bin is a pickle, .* NAME\.from_pretrained"):
        GPT2.from_pretrained(tmp_path)
    (name,) = json.loads((tmp_path / "config.json").read_text())["architectures"]
    model = getattr(transformers, name).from_pretrained(tmp_path)
    model.save_pretrained(tmp_path, safe_serialization=True)
    expected = theirs(torch.from_numpy(IDS[:, :-1])).logits.detach().numpy()
    np.testing.assert_allclose(GPT2.from_pretrained(tmp_path)(IDS[:, :-1]), expected, rtol=0, atol=1e-5)
