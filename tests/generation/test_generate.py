"""Generating tokens and text."""

import copy
import importlib

import numpy as np
import pytest
from hypothesis import given, strategies

from scratchformer import dispatch
from scratchformer.backend import to_cpu, to_device
from scratchformer.data import Subwords
from scratchformer.dispatch import fast
from scratchformer.generation import cache_for, generate, printable, stream_text, stream_texts
from scratchformer.generation.generate import Writing
from scratchformer.models import GPT2, LanguageModel, Llama, SparseTransformer, TransformerXL
from scratchformer.rng import Key

CONTEXT = 12


def prompt(batch=2, length=5):
    return Key(1).generator().integers(0, 31, (batch, length))


def run(model, ids, tokens, **options):
    """(B, tokens)"""
    return np.stack(list(generate(model, ids, tokens, **options)), axis=1)


def greedy_without_a_cache(model, ids, tokens):
    for _ in range(tokens):
        logits = to_cpu(model(to_device(ids, model.device)))[:, -1]
        ids = np.concatenate([ids, logits.argmax(axis=-1)[:, None]], axis=1)
    return ids[:, -tokens:]


def test_greedy_generation_is_the_argmax_of_the_full_forward(device, make_model):
    model = make_model(device)
    found = run(model, prompt(), CONTEXT - 5, temperature=0)
    np.testing.assert_array_equal(found, greedy_without_a_cache(model, prompt(), CONTEXT - 5))


def test_the_output_follows_the_prompt_and_does_not_repeat_it(device, make_model):
    """The output has the requested number of tokens, without the prompt; the first depends on the prompt's last."""
    model = make_model(device)
    assert run(model, prompt(), 4).shape == (2, 4)
    assert list(generate(model, prompt(), 0)) == []
    other = prompt()
    other[:, -1] = (other[:, -1] + 1) % 31
    assert (run(model, prompt(), 6, temperature=0) != run(model, other, 6, temperature=0)).any()
    firsts = [run(model, np.array([[i]]), 1, temperature=0)[0, 0] for i in range(31)]
    assert firsts != list(range(31))
    np.testing.assert_array_equal(firsts, [greedy_without_a_cache(model, np.array([[i]]), 1)[0, 0] for i in range(31)])


def test_generation_continues_past_the_context(device, make_model):
    found = run(make_model(device), prompt(), 5 * CONTEXT)
    assert found.shape == (2, 5 * CONTEXT)
    assert ((found >= 0) & (found < 31)).all()


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 5 * CONTEXT])
def test_a_prompt_longer_than_the_context_is_read_from_its_end(device, make_model, length):
    model, ids = make_model(device), prompt(2, length)
    np.testing.assert_array_equal(run(model, ids, 9, key=Key(3)), run(model, ids[:, -CONTEXT:], 9, key=Key(3)))


def test_the_same_key_gives_the_same_text_and_another_key_another(device, make_model):
    model = make_model(device)
    first, again, other = (run(model, prompt(), 20, temperature=2.0, key=Key(i)) for i in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_successive_tokens_are_drawn_with_different_numbers(make_model):
    """A model that ignores its input generates tokens that are independent of each other."""
    model = make_model()
    model.output.w.data[...] = 0
    model.output.b.data[...] = 0
    found = run(model, prompt(1, 1), 200)[0]
    assert len(set(found.tolist())) > 20
    assert np.mean(found[1:] == found[:-1]) < 0.15


def test_a_row_of_a_batch_depends_on_its_own_prompt_only(device, make_model):
    model, ids = make_model(device), prompt(3)
    changed = ids.copy()
    changed[1] = (changed[1] + 1) % 31
    first, second = (run(model, x, 15, key=Key(0)) for x in (ids, changed))
    np.testing.assert_array_equal(first[[0, 2]], second[[0, 2]])
    assert (first[1] != second[1]).any()


def test_equal_prompts_in_a_batch_are_continued_differently(device, make_model):
    found = run(make_model(device), np.repeat(prompt(1), 2, axis=0), 20, temperature=2.0)
    assert (found[0] != found[1]).any()


def test_top_k_of_one_is_greedy(device, make_model):
    model = make_model(device)
    np.testing.assert_array_equal(run(model, prompt(), 6, top_k=1), run(model, prompt(), 6, temperature=0))


@pytest.mark.parametrize(
    "bad", [np.zeros((1, 0), int), np.zeros((0, 3), int), np.zeros(3, int), np.zeros((1, 1, 1), int)]
)
def test_an_empty_prompt_or_one_of_the_wrong_rank_is_refused(make_model, bad):
    with pytest.raises(ValueError, match=r"prompt: expected \(B, T\) with T >= 1"):
        next(generate(make_model(), bad, 3))


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [([[31]], IndexError, "ids"), ([[-1]], IndexError, "ids"), ([[0.5]], TypeError, "ids")],
)
def test_a_prompt_of_other_tokens_is_refused(device, make_model, ids, error, message):
    with pytest.raises(error, match=message):
        next(generate(make_model(device), np.array(ids), 3))


@pytest.mark.parametrize("tokens", [-3, 2.5, "3", None, True])
def test_an_invalid_number_of_tokens_is_refused(make_model, tokens):
    message = f"^tokens: expected (a number >= 0|an integer), got {tokens!r}$"
    with pytest.raises((ValueError, TypeError), match=message):
        list(generate(make_model(), prompt(), tokens))
    with pytest.raises((ValueError, TypeError), match=message):
        list(stream_text(make_model(vocab_size=256), "a", tokens))


def scripted(make_model, text, device):
    """A model that writes `text` (bytes) over and over, whatever its input, based on positions only."""
    model = make_model(device, vocab_size=256, context=2 * len(text), positions="sinusoidal")
    step = iter(text * 10)
    extend = model.extend

    def scripted_extend(ids, *rest):
        logits = extend(ids, *rest)
        logits[:, -1] = 0
        logits[:, -1, next(step)] = 1000
        return logits

    model.extend = scripted_extend
    return model


def test_characters_of_several_bytes_come_out_whole(device, make_model):
    text = "aé€𝄞b"
    model = scripted(make_model, text.encode(), device)
    assert list(stream_text(model, "x", len(text.encode()))) == ["a", "é", "€", "𝄞", "b"]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (b"a\xffb", ["a", "\ufffd", "b"]),
        (b"\xc3(", ["\ufffd("]),
        (b"\xe2\x82", ["\ufffd"]),  # the model stops inside a character
        (b"a\xe2\x82b", ["a", "\ufffdb"]),
        (b"\x80\x80", ["\ufffd", "\ufffd"]),
    ],
)
def test_invalid_utf8_becomes_the_replacement_character(make_model, device, written, expected):
    assert list(stream_text(scripted(make_model, written, device), "x", len(written))) == expected


def test_text_is_yielded_as_soon_as_it_is_complete(make_model, device):
    model = scripted(make_model, b"abc", device)
    stream = stream_text(model, "x", 10**9)
    assert [next(stream) for _ in range(5)] == list("abcab")


def test_text_is_reproducible_and_has_the_options_of_generate(make_model, device):
    model = make_model(device, vocab_size=256)
    first, again = ("".join(stream_text(model, "é", 20, temperature=1.5, key=Key(1))) for _ in "ab")
    assert first == again
    with pytest.raises(ValueError, match="top_k"):
        next(stream_text(model, "a", 3, top_k=0))


def test_an_empty_text_to_continue_is_refused(make_model):
    with pytest.raises(ValueError, match="prompt: expected"):
        next(stream_text(make_model(vocab_size=256), "", 3))


def test_a_prompt_may_be_any_bytes(make_model):
    model = make_model(vocab_size=256)
    texts = [list(stream_text(model, prompt, 9, temperature=0)) for prompt in ("aé", "aé".encode())]
    assert texts[0] == texts[1]
    assert list(stream_text(model, b"\xff\xfe", 3))
    with pytest.raises(ValueError, match="prompt: expected"):
        next(stream_text(model, b"", 3))


def test_control_characters_do_not_reach_a_terminal():
    assert printable("a\tb\nc é \u2028") == "a\tb\nc é \u2028"
    kept = {i for i in range(0x110000) if printable(chr(i)) == chr(i)}
    assert {*range(0x110000)} - kept == ({*range(32)} | {*range(127, 160)}) - {9, 10}
    assert printable("\x1b[2J\r\x9b1m") == "\ufffd[2J\ufffd\ufffd1m"


def test_a_large_batch_is_divided_among_threads(monkeypatch):
    """Each sequence is the same as without threads."""
    module = importlib.import_module("scratchformer.generation.generate")
    model = LanguageModel(31, 12, 3, 2, 16, key=Key(0)).to(dtype=np.float64)
    prompt = Key(1).generator().integers(0, 31, (7, 5))
    together = np.stack(list(generate(model, prompt, 30, key=Key(2))), axis=1)
    monkeypatch.setattr(module, "ROWS", 2)
    monkeypatch.setattr(module, "cores", lambda: 3)
    shared = np.stack(list(generate(model, prompt, 30, key=Key(2))), axis=1)
    assert np.array_equal(together, shared)


@pytest.fixture(scope="module")
def subwords():
    pytest.importorskip("tokenizers")
    return Subwords.byte_bpe(["the lowest prices: low lower é€𝄞 é€𝄞 the low"] * 3, 290)


def writing(model, ids):
    """The model, changed to write `ids` one after another, whatever its input."""
    step, extend = iter(ids), model.extend

    def scripted_extend(*args):
        logits = extend(*args)
        logits[:, -1] = 0
        logits[:, -1, next(step)] = 1000
        return logits

    model.extend = scripted_extend
    return model


def test_subwords_come_out_as_text(make_model, device, subwords):
    """Also if a character consists of several tokens, or a token of several characters."""
    text = "the é€𝄞 lowest\u3000𝄢"
    ids = subwords.encode(text)
    assert len(ids) < len(text.encode()) and any(
        len(subwords.pieces[i]) == 1 and subwords.pieces[i] > b"\x7f" for i in ids
    )
    model = writing(make_model(device, vocab_size=len(subwords)), ids)
    found = list(stream_text(model, "low", len(ids), subwords))
    assert "".join(found) == text and "\ufffd" not in found


def test_the_prompt_is_read_in_subwords(make_model, subwords):
    model = make_model(vocab_size=len(subwords))
    found = "".join(stream_text(model, "the low", 6, subwords, temperature=0))
    ids = np.concatenate(list(generate(model, subwords.encode("the low")[None], 6, temperature=0)))
    assert found == b"".join(subwords.pieces[i] for i in ids).decode("utf-8", "replace")
    assert found == "".join(stream_text(model, b"the low", 6, subwords, temperature=0))
    assert list(stream_text(model, b"\xff", 3, subwords))


def test_the_end_of_a_text_ends_it(make_model, subwords):
    ids = [*subwords.encode("low"), subwords["<|endoftext|>"], *subwords.encode("the")]
    model = writing(make_model(vocab_size=len(subwords)), ids)
    assert "".join(stream_text(model, "low", len(ids), subwords)) == "low"


def test_a_vocabulary_that_is_not_of_bytes_is_refused(make_model):
    pytest.importorskip("tokenizers")
    words = Subwords.bpe(["the low"] * 3, 31)
    with pytest.raises(ValueError, match="vocabulary: expected tokens made of bytes"):
        next(stream_text(make_model(), "the", 3, words))


@pytest.mark.parametrize("size", [255, 300])
def test_a_model_of_other_tokens_than_bytes_needs_its_vocabulary(make_model, size):
    message = f"^vocabulary: expected {size} tokens, as in the model, got 256 bytes, the default$"
    with pytest.raises(ValueError, match=message):
        next(stream_text(make_model(vocab_size=size), "hello", 300))


@pytest.mark.parametrize("more", [-1, 1])
def test_a_vocabulary_of_another_size_than_the_model(make_model, subwords, more):
    size = len(subwords)
    message = f"^vocabulary: expected {size + more} tokens, as in the model, got {size}$"
    with pytest.raises(ValueError, match=message):
        next(stream_text(make_model(vocab_size=size + more), "the low", 3, subwords))


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 2.0, "top_k": 20, "top_p": 0.9}], ids=str)
def test_tokens_that_are_not_allowed_never_come(device, make_model, options):
    model, allowed = make_model(device), np.arange(31) % 3 == 1
    found = run(model, prompt(), 60, allowed=allowed, **options)
    assert allowed[found].all() and not allowed[run(model, prompt(), 60, **options)].all()


def test_only_the_last_position_of_a_prompt_has_logits(make_model):
    """For a long prompt, the other logits would be most of the work."""
    model, seen = make_model(), []
    forward = model.output.forward
    model.output.forward = lambda x: seen.append(x.shape) or forward(x)
    with dispatch.reference_only():  # twins do not call forward
        list(generate(model, prompt(2, 9), 3))
    assert seen == [(2, 1, 12)] * 3


def test_an_unfinished_generator_leaves_fast_code(make_model):
    tokens = generate(make_model(), np.array([[1, 2]]), 5)
    next(tokens)
    assert dispatch._fast_depth == 0


MODELS = {
    "pre": lambda: LanguageModel(31, 12, 3, 2, 12, norm="pre", bias=True, activation="gelu_tanh", key=Key(0)),
    "post": lambda: LanguageModel(31, 12, 3, 2, 12, key=Key(0)),
    "gpt2": lambda: GPT2(31, 12, 3, 2, 12, key=Key(0)),
    "llama": lambda: Llama(31, 12, 2, 2, 12, kv_heads=1, key=Key(0)),
    "transformer-xl": lambda: TransformerXL(31, 12, 3, 2, 12, memory=4, key=Key(0)),
    "sparse": lambda: SparseTransformer(31, 12, 2, 2, 12, stride=3, key=Key(0)),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_generates_in_bfloat16(name, batch):
    """Its logits are those of the rounded weights in float32, within the rounding of the layers' outputs."""
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    half = MODELS[name]().to(dtype=bfloat16)
    plain = copy.deepcopy(half).to(dtype=np.float32)
    ids = prompt(batch)
    texts = np.stack(list(generate(half, ids, 20, key=Key(2))), axis=1)
    assert texts.shape == (batch, 20)
    caches = [cache_for(model, batch) for model in (half, plain)]
    with fast():
        for new in np.split(np.concatenate([ids, texts[:, :6]], axis=1), [5, 6, 7, 8, 9], axis=1):
            z, expected = (cache.logits(new).astype(np.float32) for cache in caches)
            assert np.abs(z - expected).max() < 0.05 * np.abs(expected).max()


def ids_of(length, vocab_size=31):
    return Key(length).generator().integers(0, vocab_size, length)


WITH_WINDOWS = {
    "llama with a window": lambda: Llama(31, 12, 2, 2, 12, kv_heads=1, window=4, key=Key(0)),
    "sinusoidal": lambda: LanguageModel(31, 12, 3, 2, 12, positions="sinusoidal", key=Key(0)),
    "relative": lambda: LanguageModel(31, 12, 3, 2, 12, positions="relative", key=Key(0)),
}


@pytest.mark.parametrize("name", [*MODELS, *WITH_WINDOWS])
def test_prompts_of_different_lengths_are_continued_as_each_alone(name):
    """Some are longer than the model can see, and some are so far apart that batches of their own are made."""
    model = (MODELS | WITH_WINDOWS)[name]().to(dtype=np.float64)
    model.parameters()[0].data[...] *= 3  # so that texts differ
    for lengths, tokens in ([3, 9, 3, 1, 40, 12], 25), ([1, 11, 5, 1], 3), ([7, 2], 1):
        prompts = [ids_of(length) for length in lengths]
        together = np.stack(list(generate(model, prompts, tokens, temperature=0)), axis=1)
        alone = [run(model, ids[None], tokens, temperature=0)[0] for ids in prompts]
        np.testing.assert_array_equal(together, alone)
    texts = np.stack(list(generate(model, [ids_of(3), ids_of(3)], 9, key=Key(4))), axis=1)
    np.testing.assert_array_equal(texts, run(model, np.stack([ids_of(3)] * 2), 9, key=Key(4)))


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ([[1, 2], []], ValueError, r"prompt\[1\]: expected \(T,\) with T >= 1, got \(0,\)"),
        ([[1, 2], [[3]]], ValueError, r"prompt\[1\]: expected \(T,\)"),
        ([[1, 2], [0.5]], TypeError, "ids: expected integers"),
        ([[1, 2], [31, 2, 3]], IndexError, "ids: expected values from 0 to 30, got 31"),
        ([], ValueError, r"prompt: expected \(B, T\)"),
    ],
)
def test_a_list_of_prompts_that_are_no_tokens_is_refused(make_model, prompts, error, message):
    with pytest.raises(error, match=message):
        next(generate(make_model(), prompts, 3))


def test_each_sequence_ends_at_its_own_stop_token(device, make_model):
    """Up to there it is what it would be without, and then -1; when all have ended, so has the whole."""
    model = make_model(device)
    whole = run(model, prompt(4), 40, key=Key(5), temperature=2.0)
    stop = [4, 17, 22]
    found = run(model, prompt(4), 40, key=Key(5), temperature=2.0, stop=stop)
    ends = [next(i for i, token in enumerate(row) if token in stop) for row in whole]
    assert len({*ends}) > 1 and found.shape == (4, max(ends) + 1)
    for row, full, end in zip(found, whole, ends, strict=True):
        np.testing.assert_array_equal(row[: end + 1], full[: end + 1])
        assert (row[end + 1 :] == -1).all()
    wrong = {"values from 0 to 30, got 31": [31], r"\(N\), got \(\)": 5, r"\(N\), got \(1, 1\)": [[1]]}
    for message, wrong_stop in wrong.items():
        with pytest.raises((IndexError, ValueError), match=f"^stop: expected {message}"):
            next(generate(model, prompt(), 3, stop=wrong_stop))


@given(strategies.text("ab€", max_size=12), strategies.lists(strategies.text("ab€", min_size=1, max_size=4)),
       strategies.lists(strategies.integers(1, 3)))  # fmt: skip
def test_a_text_ends_before_the_first_stop_text_however_it_is_cut(text, stop, sizes):
    """It ends as soon as one is complete, and nothing is held back that cannot begin one."""
    whole = next((text[:i].removesuffix(max((s for s in stop if text[:i].endswith(s)), key=len))
                  for i in range(len(text) + 1) if text[:i].endswith(tuple(stop))), None)  # fmt: skip
    writing, data, shown = Writing(stop), text.encode(), ""
    for size in [*sizes, *[1] * len(data)]:
        shown += writing.add(data[:size])
        data = data[size:]
        read = text.encode()[: len(text.encode()) - len(data)].decode("utf-8", "ignore")
        if not writing.ended:
            held = read.removeprefix(shown)
            assert read.startswith(shown) and (not held or any(s.startswith(held) for s in stop))
    shown += writing.add(b"", final=True)
    assert shown == (text if whole is None else whole) and writing.ended


def test_texts_of_a_batch_end_by_themselves(make_model, device):
    """A stop text may be a part of one token, or of several; each text is what it is alone."""
    model, prompts = make_model(device, vocab_size=256), ["a", b"\xffbc", "long prompt é"]
    options = {"temperature": 2.0, "top_k": 40, "repetition_penalty": 1.2}
    rows = list(zip(*stream_texts(model, prompts, 30, **options), strict=True))
    full = ["".join(row) for row in rows]
    stop = [full[0][9:12], full[1][4]]
    for text, row in zip(full, zip(*stream_texts(model, prompts, 30, stop=stop, **options), strict=True), strict=True):
        ends = [text.find(s) for s in stop if s in text]
        assert "".join(row) == (text[: min(ends)] if ends else text)


@pytest.mark.parametrize(("stop", "error"), [([""], ValueError), ("ab", TypeError), ([b"a"], TypeError)])
def test_an_invalid_stop_text_is_refused(make_model, stop, error):
    with pytest.raises(error, match="stop"):
        next(stream_text(make_model(vocab_size=256), "a", 3, stop=stop))


def test_a_penalty_counts_the_prompt_and_what_was_written(device, make_model):
    """With one that nothing outweighs, no token comes twice, and none of the prompt, of what was cut from it too."""
    model = make_model(device)
    model.output.b.data[...] += 1000  # so that all logits are positive
    ids = np.arange(14)[None]  # more than the context
    found = run(model, ids, 17, temperature=0, repetition_penalty=1e6)[0]
    assert sorted(found.tolist()) == [*range(14, 31)]
    with pytest.raises(ValueError, match="repetition_penalty: expected"):
        next(generate(model, ids, 3, repetition_penalty=0))
