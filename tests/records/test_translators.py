"""Translation by several models, which write in one direction or in both."""

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import CPU, to_cpu, to_device
from scratchformer.data import Pairs, Subwords, encode_pairs
from scratchformer.generation import DecoderCache, beam, beam_search
from scratchformer.models import EncoderDecoder
from scratchformer.records import BackwardEncoderDecoder, as_written, search_together, translators
from scratchformer.records.translators import choose_translations, log_probabilities, mixed
from scratchformer.rng import Key
from scratchformer.testing.strict import STRICT
from scratchformer.training import Replicas, evaluate_translation

V, BEGIN, END = 5, 0, 1
SOURCE, LENGTHS = np.array([[2, 3, 4], [4, 2, 2]]), np.array([3, 1])


def make(device, seed=0, backwards=False, norm="post"):
    kind = BackwardEncoderDecoder if backwards else EncoderDecoder
    model = kind(V, 8, 2, 2, 12, norm, key=Key(seed)).to(device, np.float64)
    model.flat.data[...] = to_device(2 * to_cpu(model.flat.data), device)  # stronger predictions
    return model


def log_p(models, b, ids):
    """log p(ids, END) of source b: one full forward of each model for this translation alone."""
    total = 0.0
    arrays = (SOURCE[b : b + 1, : LENGTHS[b]], LENGTHS[b : b + 1], np.array([[BEGIN, *ids]]))
    p = [to_cpu(ops.softmax(model(*(to_device(x, model.device) for x in arrays)))[0])[0] for model in models]
    for t, token in enumerate([*ids, END]):
        total += np.log(np.mean([one[t, token] for one in p]))
    return total


@pytest.mark.parametrize("tokens", [translators.TOKENS, 10])
def test_log_probabilities_of_translations(device, monkeypatch, tokens):
    """Translations of several lengths, and an empty one, alone and by an ensemble; 10 tokens are those of 2 at once."""
    monkeypatch.setattr(translators, "TOKENS", tokens)
    translations = [np.array(ids, int) for ids in ([2, 3, 4, 2], [], [4], [3, 3])]
    for models in [make(device)], [make(device, 1), make(device, 2, norm="pre")]:
        for b in range(2):
            found = log_probabilities(models, SOURCE[b, : LENGTHS[b]], translations, BEGIN, END)
            assert found.shape == (4,) and found.dtype == np.float64
            np.testing.assert_allclose(found, [log_p(models, b, ids) for ids in translations], rtol=1e-9)


def test_models_that_write_backwards_are_read_forwards(device):
    """The same weights write the same tokens; they are turned round."""
    turned = 0
    for seed in range(8 if device is CPU else 2):
        ahead = choose_translations([make(device, seed)], SOURCE, LENGTHS, BEGIN, END, 3)
        back = choose_translations([make(device, seed, True)], SOURCE, LENGTHS, BEGIN, END, 3)
        assert [y.tolist() for y in ahead] == [y[::-1].tolist() for y in back]
        turned += sum(y.tolist() != y[::-1].tolist() for y in ahead)
    assert turned > 0 or device is not CPU


def test_both_directions_judge_what_both_propose(device):
    """Two models forwards and one backwards, or one and two: the highest score, among the translations of both."""
    alpha, chosen_from = 0.6, set()
    for seed in range(10 if device is CPU else 2):
        forwards = [make(device, seed), make(device, seed + 20, norm="pre")]
        backwards = [make(device, seed + 40, True), make(device, seed + 60, True)]
        (forwards if seed % 2 else backwards).pop()
        found = choose_translations([forwards[0], *backwards, *forwards[1:]], SOURCE, LENGTHS, BEGIN, END, 2, alpha)
        ahead, back = (
            search_together(models, SOURCE, LENGTHS, BEGIN, END, 2, alpha, wanted=2) for models in (forwards, backwards)
        )
        for b in range(2):
            proposed = [tuple(h.ids) for h in ahead[b][:2]], [tuple(h.ids[::-1]) for h in back[b][:2]]

            def score(ids, b=b, forwards=forwards, backwards=backwards):
                total = 2 * log_p(forwards, b, ids) + log_p(backwards, b, ids[::-1])  # whatever their numbers
                return total / 3 / ((6 + len(ids)) / 6) ** alpha

            assert tuple(found[b]) == max(proposed[0] + proposed[1], key=score)
            chosen_from.add(tuple(tuple(found[b]) in own for own in proposed))
    assert device is not CPU or {(True, False), (False, True)} <= chosen_from  # some by one alone


def test_models_of_both_directions_do_not_write_together():
    models = [make(CPU), make(CPU, 1, True)]
    for call in (
        lambda: search_together(models, SOURCE, LENGTHS, BEGIN, END),
        lambda: log_probabilities(models, SOURCE[0], [np.array([2])], BEGIN, END),
    ):
        with pytest.raises(ValueError, match="models: expected some that all write in one direction, got"):
            call()


def test_a_backward_model_learns_from_reversed_targets():
    """It has the weights of one that writes forwards, but for its class."""
    subwords = Subwords.bpe(["a b c d", "e f g"] * 3, 40)
    pairs = encode_pairs(subwords, Pairs(["a b", "c d e"], ["f g a", "b c"]), 64)
    turned = pairs._replace(target=[ids[::-1] for ids in pairs.target])
    losses = []
    for kind, given in (EncoderDecoder, turned), (BackwardEncoderDecoder, pairs), (EncoderDecoder, pairs):
        model = kind(len(subwords), 8, 2, 1, key=Key(2))
        with Replicas(model, 1) as replicas:
            losses.append(evaluate_translation(replicas, as_written(model, given), 64, subwords)["loss"])
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("alpha", [0, 0.6, 2])
def test_stopping_early_changes_no_result(alpha, monkeypatch):
    """The search stops only when nothing that is open can be better: for an ensemble, and in both directions."""
    source, lengths = 2 + np.arange(20).reshape(4, 5) ** 2 % 3, np.array([1, 5, 2, 3])
    options, found = (source, lengths, BEGIN, END, 3, alpha), []
    for done in beam.done, lambda finished, scores, *_: scores.max() == -np.inf:
        monkeypatch.setattr(beam, "done", done)
        lists = search_together([make(CPU), make(CPU, 9, norm="pre")], *options, 9, wanted=3)
        chosen = choose_translations([make(CPU, 2), make(CPU, 1, True)], *options)
        found.append(([[h.ids.tolist() for h in one] for one in lists], [y.tolist() for y in chosen]))
    assert found[0] == found[1]


def test_an_ensemble_predicts_the_mean_of_the_probabilities(device):
    """Models of other sizes, and one that is very certain, so that the mean is not that of the logarithms."""
    alone = 0
    for seed in range(4 if device is CPU else 1):
        models = [make(device, seed), make(device, seed + 9, norm="pre"), make(device, seed + 5)]
        models[1].flat.data[...] *= 2
        lists = search_together(models, SOURCE, LENGTHS, BEGIN, END, 3, 0.6, longer=3, wanted=3)
        other = beam_search(models[1], SOURCE, LENGTHS, BEGIN, END, 3, 0.6, longer=3)
        for b in range(2):
            for score, ids in lists[b]:
                if len(ids) < LENGTHS[b] + 3:  # else it may have been cut off
                    assert score == pytest.approx(log_p(models, b, ids) / ((6 + len(ids)) / 6) ** 0.6, rel=1e-9)
            alone += lists[b][0].ids.tolist() == other[b].ids.tolist()
        same = search_together([models[0]] * 2, SOURCE, LENGTHS, BEGIN, END, 3, 0.6, longer=3)
        one = beam_search(models[0], SOURCE, LENGTHS, BEGIN, END, 3, 0.6, longer=3)
        assert [h.ids.tolist() for (h,) in same] == [h.ids.tolist() for h in one]
    assert alone < 8


def test_models_that_are_no_ensemble():
    arguments = SOURCE, LENGTHS, BEGIN, END
    for models, error, message in (
        ([make(CPU), EncoderDecoder(V + 1, 8, 2, 2, 12)], ValueError, "models: .* the same vocabulary, got 2 of them"),
        ([], ValueError, "models: expected at least one, all with the same vocabulary, got 0 of them"),
        (["model"], TypeError, "models: expected an EncoderDecoder, got 'model'"),
        ([make(CPU), make(STRICT)], ValueError, "all with the same device"),
    ):
        for call in search_together, choose_translations:
            with pytest.raises(error, match=message):
                call(models, *arguments)


def test_sources_whose_search_is_over_are_taken_out_of_every_cache(device, monkeypatch):
    """After each step, or never: the translations are the same."""
    source, lengths = np.concatenate([SOURCE, SOURCE[:, ::-1]] * 3), np.tile(LENGTHS, 6)
    source = 2 + (source + np.arange(12)[:, None]) % 3
    models, left, keep, found = [make(device, seed) for seed in range(2)], [], DecoderCache.keep, []

    def spy(cache, sources):
        keep(cache, sources)
        left.append(cache.rows)

    monkeypatch.setattr(DecoderCache, "keep", spy)
    for share in (1, 0):
        monkeypatch.setattr(beam, "FEWER", share)
        found.append(search_together(models, source, lengths, BEGIN, END, 3, longer=6, wanted=3))
        if share:
            assert left and min(left) < 18
            left.clear()
    assert not left
    for one, other in zip(*found, strict=True):
        assert [h.ids.tolist() for h in one] == [h.ids.tolist() for h in other]


def test_the_mean_of_very_different_predictions():
    """In float32, where exp(-200) is 0."""
    z = mixed([np.array([row], np.float32) for row in ([0, -200, -200], [-200, 0, -200])])
    p, _ = ops.softmax(z.astype(np.float64))
    np.testing.assert_allclose(p, [[0.5, 0.5, np.exp(-200)]], rtol=1e-5)
    assert z.dtype == np.float32
