"""Translation by models that write in both directions. `beam_search`, `translate` and BLEU: see test_beam.py."""

import numpy as np
import pytest

from scratchformer import ops
from scratchformer.backend import CPU, to_cpu, to_device
from scratchformer.data import Pairs, Subwords, encode_pairs
from scratchformer.generation import beam_search, translation
from scratchformer.generation.beam import n_best
from scratchformer.generation.translation import choose_translations, log_probabilities
from scratchformer.models import EncoderDecoder
from scratchformer.rng import Key
from scratchformer.training import Replicas, evaluate_translation

V, BEGIN, END = 5, 0, 1
SOURCE, LENGTHS = np.array([[2, 3, 4], [4, 2, 2]]), np.array([3, 1])


def make(device, seed=0, backwards=False, norm="post"):
    model = EncoderDecoder(V, 8, 2, 2, 12, norm, backwards=backwards, key=Key(seed)).to(device, np.float64)
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


def test_n_best_begins_with_what_beam_search_finds(device):
    for seed in range(4):
        found = n_best(make(device, seed), SOURCE, LENGTHS, BEGIN, END, 4, longer=3)
        best = beam_search(make(device, seed), SOURCE, LENGTHS, BEGIN, END, 4, longer=3)
        assert sum(map(len, found)) > 4
        for b in range(2):
            assert found[b][0].ids.tolist() == best[b].ids.tolist() and found[b][0].score == best[b].score
            scores = [hypothesis.score for hypothesis in found[b]]
            assert scores == sorted(scores, reverse=True)
            assert len({tuple(hypothesis.ids) for hypothesis in found[b]}) == len(found[b])
            for score, ids in found[b]:
                if len(ids) < LENGTHS[b] + 3:  # else it may have been cut off
                    expected = log_p([make(device, seed)], b, ids) / ((6 + len(ids)) / 6) ** 0.6
                    assert score == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("tokens", [translation.TOKENS, 10])
def test_log_probabilities_of_translations(device, monkeypatch, tokens):
    """Translations of several lengths, and an empty one, alone and by an ensemble; 10 tokens are those of 2 at once."""
    monkeypatch.setattr(translation, "TOKENS", tokens)
    translations = [np.array(ids, int) for ids in ([2, 3, 4, 2], [], [4], [3, 3])]
    for models in [make(device)], [make(device, 1), make(device, 2, norm="pre")]:
        for b in range(2):
            found = log_probabilities(models, SOURCE[b, : LENGTHS[b]], translations, BEGIN, END)
            assert found.shape == (4,) and found.dtype == np.float64
            np.testing.assert_allclose(found, [log_p(models, b, ids) for ids in translations], rtol=1e-9)
    one = log_probabilities(models[0], SOURCE[0], translations, BEGIN, END)
    np.testing.assert_array_equal(one, log_probabilities(models[:1], SOURCE[0], translations, BEGIN, END))


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
        ahead, back = (n_best(models, SOURCE, LENGTHS, BEGIN, END, 2, alpha) for models in (forwards, backwards))
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
        lambda: beam_search(models, SOURCE, LENGTHS, BEGIN, END),
        lambda: log_probabilities(models, SOURCE[0], [np.array([2])], BEGIN, END),
    ):
        with pytest.raises(ValueError, match="expected models that all write in one direction, got both directions"):
            call()


def test_a_backward_model_is_evaluated_on_reversed_targets():
    subwords = Subwords.bpe(["a b c d", "e f g"] * 3, 40)
    pairs = encode_pairs(subwords, Pairs(["a b", "c d e"], ["f g a", "b c"]), 64)
    turned = pairs._replace(target=[ids[::-1] for ids in pairs.target])
    losses = []
    for backwards, given in (False, turned), (True, pairs), (False, pairs):
        model = EncoderDecoder(len(subwords), 8, 2, 1, backwards=backwards, key=Key(2))
        with Replicas(model, 1) as replicas:
            losses.append(evaluate_translation(replicas, given, 64, subwords)["loss"])
    assert losses[0] == losses[1] != losses[2]


def test_backwards_is_true_or_false():
    with pytest.raises(TypeError, match="backwards: expected a bool, got 'yes'"):
        EncoderDecoder(V, 8, 2, 2, backwards="yes")
    assert EncoderDecoder(V, 8, 2, 2, backwards=True).config["backwards"] is True
    assert make(CPU).backwards is False
