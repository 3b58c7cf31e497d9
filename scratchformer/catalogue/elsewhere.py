"""Mistakes outside gradients: in data, training, generation and the files of published weights."""

from __future__ import annotations

from .mistake import Mistake

MISTAKES = [
    Mistake(
        "beam search: a finished hypothesis is extended",
        file="generation/beam.py",
        replace={
            "goes_on = np.flatnonzero(tokens[b] != end)[:K]": "goes_on = np.arange(min(K, count))",
            "scores[np.take_along_axis(tokens, chosen, 1) == end] = -np.inf": "pass",
        },
        tests="tests/generation/test_beam.py -k plain_search",
    ),
    Mistake(
        "beam search: the cache is not reordered",
        file="generation/beam.py",
        replace={"cache.reorder((np.arange(len(places))[:, None] * K + rows).reshape(-1))": "pass"},
        tests="tests/generation/test_beam.py -k plain_search",
    ),
    Mistake(
        "the sampler returns its prompt",
        file="generation/generate.py",
        replace={"yield ids": "yield prompt[:, -1]"},
    ),
    Mistake(
        "the sampler's number depends on nothing but its key",
        file="generation/sampling.py",
        replace={
            "u = key.generator().random((p.shape[0], 1))": "return key.generator().integers(0, p.shape[1], p.shape[0])"
        },
        tests="tests/generation/test_generate.py",
    ),
    Mistake(
        "no padding mask: a review's class depends on its batch",
        file="models/classifier.py",
        replace={"padding = ops.Padding(lengths)": "padding = ops.Full()"},
    ),
    Mistake(
        "units of unknown class count as the last class",
        file="models/classifier.py",
        replace={
            "return IGNORED if": "return None if",
            "ops.cross_entropy(z, labels,": "ops.cross_entropy(z, labels % z.shape[-1],",
        },
    ),
    Mistake(
        "published weights: queries and keys exchanged",
        file="models/pretrained.py",
        replace={"for name, tensor in names.items():": "for name, tensor in reversed(names.items()):"},
        tests="tests/models/test_pretrained.py",
    ),
    Mistake(
        "published weights: a Llama's gate and values exchanged",
        file="models/published.py",
        replace={
            '"feedforward.gate": "mlp.gate_proj"': '"feedforward.gate": "mlp.up_proj"',
            '"feedforward.up": "mlp.up_proj"': '"feedforward.up": "mlp.gate_proj"',
        },
        tests="tests/models/test_llama.py -k arrives",
    ),
    Mistake(
        "BERT: no padding mask",
        file="models/bert.py",
        replace={"pattern = None if lengths is None else ops.Padding(lengths)": "pattern = None"},
    ),
    Mistake(
        "BERT: a token that is to be predicted shows through",
        file="data/masked.py",
        replace={"np.where(kind < MASKED + REPLACED, replacement, targets)": "targets"},
    ),
    Mistake(
        "a memory: a resumed run begins without it",
        file="data/batching.py",
        replace={"self.step, self.memory = int(step), memory": "self.step, self.memory = int(step), 0 * memory"},
        tests="tests/training/test_segments.py -k resumed",
    ),
    Mistake(
        "resume restarts the learning-rate schedule",
        file="training/run.py",
        replace={"yield self.step - 1": "yield self.step - 1 - self._bar.initial"},
        tests="tests/training/test_train.py -k bit_for_bit",
    ),
    Mistake(
        "the logged validation loss is the last training loss",
        file="training/run.py",
        replace={
            "self._unread.append((step, numbers))": (
                'self.last = float(numbers["loss"])\n        self._unread.append((step, numbers))'
            ),
            "for name, value in scores.items()}, self.step": (
                'for name, value in scores.items()} | {"loss": self.last}, self.step'
            ),
        },
        tests="tests/training/test_train.py -k best",
    ),
    Mistake(
        "gradient accumulation: micro-batches weigh alike, whatever their size",
        file="parallel/replicas.py",
        replace={"weight = micro.weight / total": "weight = 1 / len(micro_batches)"},
    ),
    Mistake(
        "predictions: left in the order of the texts' lengths",
        file="training/evaluate.py",
        replace={"np.concatenate(scored)[np.argsort(by_length(dataset, max_length))]": "np.concatenate(scored)"},
        tests="tests/training/test_evaluate.py -k one_by_one",
    ),
    Mistake(
        "bits per byte: divided by the number of tokens",
        file="training/evaluate.py",
        replace={"if sizes is None:": "if True:"},
    ),
]
