"""Mistakes outside gradients: in optimizers, data, training, generation and the files of published weights."""

from __future__ import annotations

from .mistake import Mistake

MISTAKES = (
    Mistake(
        name="zero_grad also clears Adam's moments",
        file="optim/optimizer.py",
        replacements=(
            (
                "            grad[...] = 0\n",
                (
                    "            grad[...] = 0\n"
                    "        for name in self.buffers:\n"
                    "            getattr(self, name)[...] = 0\n"
                ),
            ),
        ),
    ),
    Mistake(
        name="Adam: v updated with 1 - beta1",
        file="optim/adam.py",
        replacements=(("    v += (1 - beta2) * g * g", "    v += (1 - beta1) * g * g"),),
    ),
    Mistake(
        name="Adam: no bias correction of v",
        file="optim/adam.py",
        replacements=(("    denominator *= 1 / math.sqrt(1 - beta2**steps)  # √v̂\n", ""),),
    ),
    Mistake(
        name="Adam: no bias correction of m",
        file="optim/adam.py",
        replacements=(("(lr / (1 - beta1**steps)) * m", "lr * m"),),
    ),
    Mistake(
        name="a tied table stepped twice",
        file="optim/optimizer.py",
        replacements=(("list({id(p): p for p in params}.values())", "list(params)"),),
    ),
    Mistake(
        name="beam search: a finished hypothesis is extended",
        file="generation/beam.py",
        replacements=(("goes_on = np.flatnonzero(tokens[b] != end)[:K]", "goes_on = np.arange(min(K, most))"),),
    ),
    Mistake(
        name="beam search: an ensemble predicts the mean of the logarithms",
        file="generation/beam.py",
        replacements=(
            ("return top + np.log(sum(np.exp(each - top) for each in log_p))", "return np.mean(log_p, axis=0)"),
        ),
    ),
    Mistake(
        name="beam search: the cache is not reordered",
        file="generation/beam.py",
        replacements=(("cache.reorder((np.arange(len(places))[:, None] * K + rows).reshape(-1))", "pass"),),
    ),
    Mistake(
        name="translation: what a model writes backwards is not turned round",
        file="generation/translation.py",
        replacements=(("return ids[::-1] if model.backwards else ids", "return ids"),),
    ),
    Mistake(
        name="neighbours: the nearest are those with the largest product",
        file="generation/neighbours.py",
        replacements=(("        scores -= self.halves[blocks][..., None, :]\n", ""),),
    ),
    Mistake(
        name="no padding mask: a review's class depends on its batch",
        file="models/classifier.py",
        replacements=(("            padding = ops.Padding(lengths)\n", "            padding = ops.Full()\n"),),
    ),
    Mistake(
        name="resume without Adam's step count",
        file="optim/optimizer.py",
        replacements=(("        self.steps = steps\n", "        self.steps = 0\n"),),
    ),
    Mistake(
        name="resume restarts the learning-rate schedule",
        file="training/loop.py",
        replacements=(
            (
                "        self.optimizer.lr = self.schedule(step)",
                "        self.optimizer.lr = self.schedule(self.bar.n - self.bar.initial)",
            ),
        ),
    ),
    Mistake(
        name="the logged validation loss is the last training loss",
        file="training/loop.py",
        replacements=(
            (
                "run.evaluate(self.evaluate, self.note)\n",
                'run.evaluate(lambda: {**self.evaluate(), "loss": measured.loss}, self.note)\n',
            ),
        ),
    ),
    Mistake(
        name="the sampler returns its prompt",
        file="generation/generate.py",
        replacements=(("        yield ids\n", "        yield prompt[:, -1]\n"),),
    ),
    Mistake(
        name="the sampler's number depends on nothing but its key",
        file="generation/sampling.py",
        replacements=(
            (
                "    u = key.generator().random((p.shape[0], 1))",
                "    return key.generator().integers(0, p.shape[1], p.shape[0])",
            ),
        ),
    ),
    Mistake(
        name="gradient accumulation: micro-batches weigh alike, whatever their size",
        file="parallel/replicas.py",
        replacements=(
            ("            weight = micro.weight / total\n", "            weight = 1 / len(micro_batches)\n"),
        ),
    ),
    Mistake(
        name="predictions: left in the order of the texts' lengths",
        file="training/evaluate.py",
        replacements=(("np.concatenate(found)[np.argsort(by_length(dataset, max_length))]", "np.concatenate(found)"),),
    ),
    Mistake(
        name="units of unknown class count as the last class",
        file="models/classifier.py",
        replacements=(
            ("return IGNORED if", "return None if"),
            ("self.cross_entropy(z, labels,", "self.cross_entropy(z, labels % z.shape[-1],"),
        ),
    ),
    Mistake(
        name="published weights: queries and keys exchanged",
        file="models/gpt2.py",
        replacements=(('COLUMNS = ("query", "key", "value")', 'COLUMNS = ("key", "query", "value")'),),
    ),
    Mistake(
        name="published weights: a Llama's gate and values exchanged",
        file="models/llama_weights.py",
        replacements=(
            ('"feedforward.gate": "mlp.gate_proj"', '"feedforward.gate": "mlp.up_proj"'),
            ('"feedforward.up": "mlp.up_proj"', '"feedforward.up": "mlp.gate_proj"'),
        ),
    ),
    Mistake(
        name="one new token: query heads read the wrong head of keys",
        file="kernels/numpy_extend.py",
        replacements=(("    q = q.reshape(B, G, -1, D)", "    q = q.reshape(B, -1, G, D).swapaxes(1, 2)"),),
    ),
    Mistake(
        name="one new token: the window is one too wide",
        file="kernels/numpy_extend.py",
        replacements=(("S - (layer.window or S)", "S - 1 - (layer.window or S)"),),
    ),
    Mistake(
        name="bits per byte: divided by the number of tokens",
        file="training/evaluate.py",
        replacements=(("    if sizes is None:\n", "    if True:\n"),),
    ),
    Mistake(
        name="a memory: a resumed run begins without it",
        file="data/batching.py",
        replacements=(
            (
                "        self.step, self.memory = int(step), memory",
                "        self.step, self.memory = int(step), 0 * memory",
            ),
        ),
    ),
    Mistake(
        name="a kernel: the new token overwrites the last key",
        file="kernels/numpy_extend.py",
        replacements=(("    keys[:, :, past] =", "    keys[:, :, past - 1] ="),),
    ),
    Mistake(
        name="BERT: no padding mask",
        file="models/bert.py",
        replacements=(
            ("        pattern = None if lengths is None else ops.Padding(lengths)", "        pattern = None"),
        ),
    ),
    Mistake(
        name="BERT: a token that is to be predicted shows through",
        file="data/masked.py",
        replacements=(("np.where(kind < MASKED + REPLACED, replacement, targets)", "targets"),),
    ),
    Mistake(
        name="rotary attention: new keys are rotated as if they came first",
        file="nn/rotary_attention.py",
        replacements=(("self.rotate(self.key(x), past)", "self.rotate(self.key(x))"),),
    ),
    Mistake(
        name="rotary attention: the window is one too wide",
        file="nn/rotary_attention.py",
        replacements=(("ops.Local(self.window - 1)", "ops.Local(self.window)"),),
    ),
)
