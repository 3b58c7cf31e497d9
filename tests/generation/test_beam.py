import itertools
import threading

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import CPU, Device, to_cpu, to_device
from scratchformer.data import Subwords
from scratchformer.generation import DecoderCache, beam_search, bleu, translate
from scratchformer.generation import beam as search
from scratchformer.models import EncoderDecoder
from scratchformer.rng import Key
from scratchformer.testing.strict import STRICT

V, BEGIN, END = 5, 0, 1


SOURCE, LENGTHS = np.array([[2, 3, 4], [4, 2, 2]]), np.array([3, 1])


def make(device, seed=0, norm="post"):
    model = EncoderDecoder(V, 8, 2, 2, 12, norm, key=Key(seed)).to(device, np.float64)
    model.flat.data[...] = to_device(2 * to_cpu(model.flat.data), device)  # stronger predictions
    return model


def log_probabilities(model, b, target):
    """(T, V), for the token after each of `target`, from the full forward for source b alone."""
    arrays = (SOURCE[b : b + 1, : LENGTHS[b]], LENGTHS[b : b + 1], np.array([target]))
    log_p, _ = ops.log_softmax(model(*(to_device(x, model.device) for x in arrays)))
    return to_cpu(log_p)[0]


def every_translation(model, b, longest):
    """Every possible translation, with its log-probability and its length, the end included."""
    for n in range(longest + 1):
        for ys in itertools.product([0, 2, 3, 4], repeat=n):
            log_p = log_probabilities(model, b, [BEGIN, *ys])
            total = sum(log_p[i, y] for i, y in enumerate(ys))
            if n < longest:
                yield total + log_p[n, END], n + 1, ys
            else:  # cut off
                yield total, n, ys


def test_a_wide_beam_finds_the_best_of_all(combinations):
    for drawn in combinations(2, model=range(4)):
        model = make(CPU, drawn["model"])
        there_are = [list(every_translation(model, b, LENGTHS[b] + 1)) for b in range(2)]
        for alpha in (0, 0.6, 2):
            found = beam_search(model, SOURCE, LENGTHS, BEGIN, END, beam=300, length_penalty=alpha, longer=1)
            for b in range(2):
                score, ids = max((total / ((5 + n) / 6) ** alpha, ys) for total, n, ys in there_are[b])
                assert tuple(found[b].ids) == ids
                assert found[b].score == pytest.approx(score, rel=1e-9)


def plain_beam_search(model, b, beam, alpha, longest):
    """Beam search with one full forward per source and hypothesis, which always goes on to the longest translations."""
    hypotheses, finished = [(0.0, [])], []
    for n in range(1, longest + 1):
        grown = [
            (log_p + row[token], [*ids, token])
            for log_p, ids in hypotheses
            for row in [log_probabilities(model, b, [BEGIN, *ids])[-1]]
            for token in range(V)
        ]
        grown.sort(key=lambda h: -h[0])
        ended = [(p / ((5 + n) / 6) ** alpha, ids) for p, ids in grown[:beam] if ids[-1] == END or n == longest]
        finished += ended
        hypotheses = [h for h in grown if h[1][-1] != END][:beam]
    return sorted(finished, key=lambda h: -h[0])


@pytest.mark.parametrize(("beam", "alpha"), [(2, 0.6), (5, 2)])
def test_it_is_the_plain_search(beam, alpha, device):
    """What the plain search finds after the early stop is no better."""
    for seed in range(8 if device is CPU else 2):
        model = make(device, seed)
        for b, found in enumerate(beam_search(model, SOURCE, LENGTHS, BEGIN, END, beam, alpha, 6)):
            score, ids = plain_beam_search(model, b, beam, alpha, LENGTHS[b] + 6)[0]
            assert found.score == pytest.approx(score, rel=1e-9)
            assert found.ids.tolist() == [i for i in ids if i != END]


@pytest.mark.parametrize("alpha", [0, 0.6, 2])
def test_stopping_early_changes_no_result(alpha, monkeypatch):
    """The search stops only when nothing that is open can be better."""
    source, lengths, steps = 2 + np.arange(20).reshape(4, 5) ** 2 % 3, np.array([1, 5, 2, 3]), []
    logits, rules = DecoderCache.logits, [search.done, lambda best, scores, *_: scores.max() == -np.inf]
    monkeypatch.setattr(DecoderCache, "logits", lambda self, ids: (steps.append(1), logits(self, ids))[1])
    needed = [0, 0]
    for seed, K in enumerate([1, 2, 3, 5, 2, 5]):
        model = make(CPU, seed, "pre" if seed % 2 else "post")
        found, options = [], (source, lengths, BEGIN, END, K, alpha)
        for i, done in enumerate(rules):
            monkeypatch.setattr(search, "done", done)
            steps.clear()
            found.append(beam_search(model, *options, 9))
            needed[i] += len(steps)
        early, late = found
        assert [h.ids.tolist() for h in early] == [h.ids.tolist() for h in late]
        assert [h.score for h in early] == pytest.approx([h.score for h in late], rel=1e-9)
    assert needed[0] < needed[1]


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_beam_of_one_is_greedy(norm, device):
    for seed in range(3):
        model = make(device, seed, norm)
        found = beam_search(model, SOURCE, LENGTHS, BEGIN, END, beam=1, longer=4)
        for b in range(2):
            written = [BEGIN]
            while len(written) <= LENGTHS[b] + 4:
                token = int(log_probabilities(model, b, written)[-1].argmax())
                if token == END:
                    break
                written.append(token)
            assert found[b].ids.tolist() == written[1:]


def test_other_sources_in_the_batch_make_no_difference(device):
    model = make(device, 1)
    together = beam_search(model, SOURCE, LENGTHS, BEGIN, END, beam=3, longer=5)
    for b in range(2):
        (alone,) = beam_search(model, SOURCE[b : b + 1, : LENGTHS[b]], LENGTHS[b : b + 1], BEGIN, END, beam=3, longer=5)
        assert alone.ids.tolist() == together[b].ids.tolist()
        assert alone.score == pytest.approx(together[b].score, rel=1e-9)


@pytest.mark.parametrize("beam_width", [1, 3])
def test_sources_whose_search_is_over_are_taken_out(device, monkeypatch, beam_width):
    """After each step, or never: the translations are the same."""
    source, lengths = np.concatenate([SOURCE, SOURCE[:, ::-1]] * 3), np.tile(LENGTHS, 6)
    source = 2 + (source + np.arange(12)[:, None]) % 3
    model, left, keep = make(device, 1), [], DecoderCache.keep

    def spy(cache, sources):
        keep(cache, sources)
        left.append(cache.rows)

    monkeypatch.setattr(DecoderCache, "keep", spy)
    found = []
    for share in (1, 0):
        monkeypatch.setattr(search, "FEWER", share)
        found.append(beam_search(model, source, lengths, BEGIN, END, beam_width, longer=6))
        if share:
            assert left and min(left) < 6 * beam_width
            left.clear()
    assert not left
    one, other = found
    assert [h.ids.tolist() for h in one] == [h.ids.tolist() for h in other]
    assert [h.score for h in one] == pytest.approx([h.score for h in other], rel=1e-9)


@pytest.mark.parametrize("share", [0, 1])
@pytest.mark.parametrize("beam_width", [2, 5, 20])
def test_each_source_has_its_own_limit(monkeypatch, beam_width, share):
    """Of sources of many lengths, each has the translation that it has alone."""
    monkeypatch.setattr(search, "FEWER", share)
    lengths, source = np.array([1, 8, 5, 2, 7, 3, 6, 4]), 2 + np.arange(64).reshape(8, 8) ** 2 % 3
    for seed in range(4):
        model = make(CPU, seed)
        together = beam_search(model, source, lengths, BEGIN, END, beam_width, 2.0, longer=2)
        for b, length in enumerate(lengths):
            one = source[b : b + 1, :length], lengths[b : b + 1]
            (alone,) = beam_search(model, *one, BEGIN, END, beam_width, 2.0, longer=2)
            assert alone.ids.tolist() == together[b].ids.tolist()
            assert alone.score == pytest.approx(together[b].score, rel=1e-9)


def test_a_length_penalty_favours_long_ones():
    lengths = []
    for alpha in (0, 3):
        found = [beam_search(make(CPU, s), SOURCE, LENGTHS, BEGIN, END, 8, alpha, 3) for s in range(8)]
        lengths.append(sum(len(h.ids) for translations in found for h in translations))
    assert lengths[1] > lengths[0]


def test_the_cache_agrees_with_the_full_forward(device):
    """Also after rows are reordered."""
    model = make(device)
    cache = DecoderCache(model, SOURCE, LENGTHS, 4, copies=2)
    written = np.array([[BEGIN, 2], [BEGIN, 3], [BEGIN, 4], [BEGIN, 2]])
    cache.logits(written)
    rows = np.array([1, 1, 3, 2])
    cache.reorder(rows)
    written = np.append(written[rows], [[3], [4], [2], [2]], axis=1)
    z = cache.logits(written[:, -1:])
    found, _ = ops.log_softmax(z)
    for row in range(4):
        np.testing.assert_allclose(found[row], log_probabilities(model, row // 2, written[row])[-1], rtol=1e-9)


@pytest.fixture(scope="module")
def subwords():
    return Subwords.bpe(["the man eats a red apple", "der Mann isst einen roten Apfel"] * 3, 60)


def test_translate_keeps_the_order_of_the_sentences(subwords):
    """Whatever their lengths; each gets the translation that it gets alone."""
    model = EncoderDecoder(len(subwords), 8, 2, 1, key=Key(3)).to(dtype=np.float64)
    sentences = ["the man eats a red apple", "a man", "the red red red apple eats the man", "apple"]
    together = translate(model, subwords, sentences, beam=2)
    assert together == [translate(model, subwords, [s], beam=2)[0] for s in sentences]
    assert len(set(together)) > 1


def test_the_thread_that_translates_uses_the_device_of_the_model(subwords, monkeypatch):
    """A new thread computes on the first GPU until it is told otherwise."""
    model = EncoderDecoder(len(subwords), 8, 2, 1, key=Key(0)).to(STRICT)
    threads, used = [], Device.use
    monkeypatch.setattr(Device, "use", lambda self: (threads.append((threading.get_ident(), self.name)), used(self))[1])
    translate(model, subwords, ["a b"], beam=1)
    ((thread, name),) = threads
    assert name == "strict" and thread != threading.get_ident()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(beam=0), "beam: expected a number >= 1, got 0"),
        (dict(beam=100_000), "beam: expected a number <= 1,000, got 100000"),
        (dict(beam=2.0), "beam: expected an integer, got 2.0"),
        (dict(longer=0), "longer: expected a number >= 1, got 0"),
        (dict(length_penalty=-1), "length_penalty: expected a finite number >= 0, got -1"),
        (dict(length_penalty=float("nan")), "length_penalty: expected a finite number >= 0, got nan"),
        (dict(begin=1.5), "begin: expected an integer, got 1.5"),
        (dict(end=-1), "end: expected a number >= 0, got -1"),
        (dict(end=V), "end: expected a token from 0 to 4, got 5"),
    ],
    ids=str,
)
def test_arguments_out_of_range(options, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}$"):
        beam_search(make(CPU), SOURCE, LENGTHS, **{"begin": BEGIN, "end": END} | options)


def test_no_source():
    with pytest.raises(ValueError, match=r"^source: expected \(B, S\) with B >= 1, got no text$"):
        beam_search(make(CPU), SOURCE[:0], LENGTHS[:0], BEGIN, END)


def test_a_length_penalty_that_overflows():
    """The division would overflow at 53 tokens, but not at 4."""
    model = make(CPU)
    with pytest.raises(ValueError, match=r"^length_penalty: 400 is too large for translations of 53 tokens$"):
        beam_search(model, SOURCE, LENGTHS, BEGIN, END, length_penalty=400)
    assert len(beam_search(model, SOURCE, LENGTHS, BEGIN, END, length_penalty=400, longer=1)) == 2


@pytest.mark.parametrize("more", [-1, 1])
def test_a_vocabulary_of_another_size_than_the_model(subwords, more):
    model = EncoderDecoder(len(subwords) + more, 8, 2, 1)
    sizes = f"expected {len(subwords) + more} tokens, as in the model, got {len(subwords)}"
    with pytest.raises(ValueError, match=f"^vocabulary: {sizes}$"):
        translate(model, subwords, ["a man"])


def test_sentences_that_are_not_translated(subwords):
    model = EncoderDecoder(len(subwords), 8, 2, 1)
    for empty in "", " \n":
        with pytest.raises(ValueError, match=r"^sentence 2: expected text, got an empty one$"):
            translate(model, subwords, ["a man", empty])
    length = len(subwords.encode("the man eats")) + 1
    assert len(translate(model, subwords, ["the man eats"], max_length=length)) == 1
    message = f"^sentence 2: expected at most {length - 1} tokens with END, got {length}$"
    with pytest.raises(ValueError, match=message):
        translate(model, subwords, ["man", "the man eats"], max_length=length - 1)
    with pytest.raises(ValueError, match=r"^max_length: expected a number >= 1, got -1$"):
        translate(model, subwords, [], max_length=-1)
    with pytest.raises(TypeError, match=r"^sentences: expected a list of texts, got str$"):
        translate(model, subwords, "a man")


def test_bleu_agrees_with_sacrebleu():
    pytest.importorskip("sacrebleu")
    references = ["Ein Mann isst einen roten Apfel.", "Zwei Hunde laufen durch das hohe Gras."]
    score, signature = bleu(references, references)
    assert score == pytest.approx(100)
    assert "tok:13a" in signature and "version:" in signature
    worse, _ = bleu(["Ein Mann isst einen Apfel.", "Zwei Hunde laufen im Gras."], references)
    assert 5 < worse < 95


def test_bleu_of_lower_case_words():
    """Upper case and the kind of quotes make no difference, as they do by default, but a different word does."""
    for module in "sacrebleu", "sacremoses":
        pytest.importorskip(module)
    references = ["Ein Mann, der „Hallo“ sagt, isst z.B. Äpfel.", "Zwei Hunde laufen durch das hohe Gras."]
    found = ['EIN mann, der "hallo" sagt, isst z.B. äpfel.', references[1]]
    score, signature = bleu(found, references, "de")
    assert score == pytest.approx(100) and bleu(found, references)[0] < 90
    assert signature.startswith("moses:de|nrefs:1|case:lc|eff:no|tok:none|")
    worse = [found[0].replace("isst", "kauft"), references[1]]
    # 20 of 21 words match, 17 of 19 pairs, 14 of 17 triples and 11 of 15 quadruples.
    expected = 100 * (20 / 21 * 17 / 19 * 14 / 17 * 11 / 15) ** (1 / 4)
    assert bleu(worse, references, "de")[0] == pytest.approx(expected)
    with pytest.raises(TypeError, match="moses: expected a str or None, got 3"):
        bleu(found, references, 3)


@pytest.mark.parametrize(("found", "references"), [(["a"], ["a", "b"]), (["a", "b"], ["a"]), ([], [])])
def test_bleu_of_lists_that_do_not_match(found, references):
    message = (
        f"^translations, references: expected the same number >= 1 of both, got {len(found)} and {len(references)}$"
    )
    with pytest.raises(ValueError, match=message):
        bleu(found, references)
