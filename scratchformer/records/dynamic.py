"""Dynamic evaluation: a language model that goes on learning from the text while it is scored on it.

What has occurred in a text is likely to occur again: names, subjects, markup. A model's context holds only the last of
it; a gradient step on what was read stores some of the rest in the weights. It is still a fair score, since each token
is predicted before the model has learned from it. A compressor does the same, and its decoder can repeat every step.

Source: Krause, Kahembwe, Murray, Renals, "Dynamic evaluation of neural sequence models", 2018, and "Dynamic evaluation
of transformer language models", 2019.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .. import ops
from ..backend import Array
from ..checks import expect_instance, expect_one_of, expect_positive
from ..data import TextBatch, TextBatches, windows
from ..data.batching import count_of, expect_text, slices
from ..models import TransformerXL
from ..models.predictor import Predictor
from ..ops import IGNORED
from ..optim.optimizer import Optimizer
from ..parallel.diagnose import Diverged
from ..parallel.replicas import Replicas
from ..rng import Key
from ..shell.progress import progress_bar
from ..training import Run
from ..training.evaluate import predicted_bytes
from .dynamic_rms import DynamicRMS

# Settings of dynamic evaluation: those of `DynamicRMS` and `evaluate_dynamic`, and how many batches are observed. They
# were chosen on validation; stride None is an eighth of the context.
DYNAMIC: dict[str, Any] = dict(lr=2e-5, decay=0.0, eps=1e-5, stride=None, windows=4, learn="new", observed=40)


class ScoredBatch(NamedTuple):
    """Windows of a text: `ids` as in a `TextBatch`, and `learned` and `scored`, (B, T) int32. These two are the id that
    follows, or IGNORED if it is not in the loss of the gradient step, or not in the score.
    """

    ids: np.ndarray
    learned: np.ndarray
    scored: np.ndarray

    @property
    def weight(self) -> int:
        """The number of predictions in the loss of the gradient step."""
        return count_of(self.learned)

    def split(self, size: int) -> list[ScoredBatch]:
        """The same rows, in order, as micro-batches of at most `size` rows."""
        return [ScoredBatch(*(a[rows] for a in self)) for rows in slices(len(self.ids), size)]


def evaluate_dynamic(
    replicas: Replicas,
    data: np.ndarray,
    optimizer: Optimizer,
    stride: int | None = None,
    windows_per_step: int = 4,
    learn: str = "new",
    sizes: np.ndarray | None = None,
) -> dict[str, float]:
    """Loss (nats per token) and bits per byte of `data`, tokens (n,), of a model that learns from what it has read.

    The text is read in order, in the windows of `evaluate_language_model`: each is as long as the model's context, and
    the next starts `stride` tokens later (half the context by default). A step takes the next windows: it scores the
    tokens that no earlier window has predicted, then the optimizer steps once on the gradient of the same forward. So
    each token but the first is predicted once, by weights that have learned from none of the windows of its step, nor
    from anything later. There is no dropout. At the end, or after an error, the model has its weights from before; the
    optimizer keeps its state.

    optimizer: for parameters of the model, as a rule a `DynamicRMS` that has observed gradients of the training data
    (`observe_gradients`); its learning rate stays constant. windows_per_step: with more, the model learns later, but
    more replicas have work. learn: the tokens in the loss of a step, "new" for those that it scores, or "all" for all
    of its windows. sizes: see `evaluate_language_model`.

    Raises TypeError or ValueError for arguments that do not fit, DataError if n < 2, and `Diverged` if the score is no
    longer finite, since the steps were too large.
    """
    expect_instance("replicas", replicas, Replicas)
    expect_instance("optimizer", optimizer, Optimizer)
    expect_positive(windows_per_step=windows_per_step)
    expect_one_of("learn", learn, ("new", "all"))
    expect_text(data)
    expect_adaptable(replicas)
    flat, context = replicas.flat, replicas.model.context
    if any(p.flat is not flat for p in optimizer.stepped):
        raise ValueError("optimizer: expected one for the model of the replicas, got one for another model")
    stride = max(1, context // 2) if stride is None else stride
    scored: list[float] = []  # nats, of each micro-batch

    def loss(model: Any, batch: ScoredBatch, key: Key | None) -> tuple[Array, tuple]:
        logits, forward = model.forward(batch.ids, key)
        mean, cross_entropy = ops.cross_entropy(logits, batch.scored, ignore_index=IGNORED)
        scored.append(float(mean) * int((batch.scored != IGNORED).sum()))
        if learn == "all":
            mean, cross_entropy = ops.cross_entropy(logits, batch.learned, ignore_index=IGNORED)
        return mean, (forward, cross_entropy)

    def step(batch: TextBatch, counted: np.ndarray) -> None:
        new = np.where(counted, batch.targets, IGNORED)
        replicas.gradients(ScoredBatch(batch.ids, batch.targets if learn == "all" else new, new), None, loss=loss)
        if not all(map(math.isfinite, scored[-len(batch.ids) :])):
            raise Diverged(f"the score is no longer finite after {optimizer.steps - before} steps: use a lower lr")
        optimizer.step(replicas.map)
        bar.update(int(counted.sum()))

    tokens, predicted = len(data) - 1, predicted_bytes(data, sizes)
    before, weights = optimizer.steps, flat.data.copy()
    try:
        with progress_bar("scoring and learning", tokens, "tokens") as bar:
            for batch, counted in windows(data, context, stride, windows_per_step):
                step(batch, counted)
    finally:
        flat.data[...] = weights
        replicas.refresh()
    total = math.fsum(scored)  # exact, so the order in which replicas finish does not matter
    return {"loss": total / tokens, "bits_per_byte": total / (predicted * math.log(2))}


def observe_gradients(replicas: Replicas, optimizer: DynamicRMS, batches: Any, count: int) -> None:
    """Let the optimizer observe the gradients of the first `count` of `batches`, of training data, without dropout."""
    expect_instance("replicas", replicas, Replicas)
    expect_instance("optimizer", optimizer, DynamicRMS)
    expect_positive(count=count)
    with progress_bar("gradients of training batches", count, "batches") as bar:
        for i in range(count):
            replicas.gradients(batches.batch(i), None)
            optimizer.observe()
            bar.update(1)


def expect_adaptable(replicas: Replicas) -> None:
    """Raise TypeError or ValueError unless dynamic evaluation works with these replicas of a model."""
    model = replicas.model
    if not (isinstance(model, Predictor) and hasattr(model, "context")):
        raise TypeError(f"replicas: dynamic evaluation is for language models, got a {type(model).__name__}")
    if isinstance(model, TransformerXL):
        raise ValueError(
            "dynamic evaluation reads the text in windows, and a Transformer-XL reads it in segments: leave it out"
        )
    if replicas.precision == "float16":
        raise ValueError("precision: dynamic evaluation has no loss scale for float16; use float32 or bfloat16")
    if replicas.ranks.size > 1:
        raise ValueError("ranks: dynamic evaluation takes one process, got several")


def score_dynamically(run: Run, replicas: Replicas, corpus: Any, part: str, **settings: Any) -> dict[str, float]:
    """The scores of `replicas.model` on a part if it learns while it reads: see `evaluate_dynamic`.

    corpus: with `train` and the part, arrays of tokens. settings: in place of those in DYNAMIC. The steps are scaled by
    gradients of the first training batches.
    """
    if not hasattr(replicas.model, "context"):
        raise ValueError(f"--dynamic: {run.name} trains no language model, so leave it out")
    chosen = {**DYNAMIC, **settings}
    expect_adaptable(replicas)
    context = replicas.model.context
    stride = chosen["stride"] or max(1, context // 8)
    if stride > context:
        raise ValueError(f"--stride: expected at most the context, {context}, got {stride}")
    optimizer = DynamicRMS(replicas.model.parameters(), **{name: chosen[name] for name in ("lr", "decay", "eps")})
    batches = TextBatches(corpus.train, run.batch_size, context, run.key("batches"))
    observe_gradients(replicas, optimizer, batches, chosen["observed"])
    options = dict(stride=stride, windows_per_step=chosen["windows"], learn=chosen["learn"])
    tokens, vocabulary = run.scored(part, getattr(corpus, part)), getattr(corpus, "vocabulary", None)
    sizes = None if vocabulary is None else vocabulary.sizes
    return evaluate_dynamic(replicas, tokens, optimizer, sizes=sizes, **options)
