"""The changes from one model to the next: in words, and in what the traces count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
from letters import Letters, written
from traced import DEPTH, traced
from tracing import TracedCall

from scratchformer import ops
from scratchformer.models import GPT2, Llama, SparseTransformer, TransformerXL

BEFORE = {
    "Classifier": None,
    "LanguageModel": "Classifier",
    "SparseTransformer": "LanguageModel",
    "TransformerXL": "LanguageModel",
    "EncoderDecoder": "LanguageModel",
    "BertPretraining": "LanguageModel",
    "Bert": "Body",
    "BertClassifier": "Classifier",
    "GPT2": "LanguageModel",
    "Llama": "GPT2",
    **dict.fromkeys(("Qwen3", "SmolLM3", "Phi3", "Olmo2", "Pythia", "Gemma3"), "Llama"),
}


def model_changes(name: str) -> str:
    """A paragraph on what is new in a model, and what it costs compared with the model it was made from; Markdown."""
    before = BEFORE[name]
    return "\n\n".join([WORDS[name](), *([_table(before, name)] if before else [])])


def _classifier() -> str:
    return (
        "The first model. Word and position vectors go through transformer blocks, in which every position attends to "
        "every other, and the mean over all positions goes through a linear layer, which gives one logit for each "
        "class. Padding is hidden from attention and left out of the mean, so the class of a text does not depend on "
        "the other texts in its batch."
    )


def _language_model() -> str:
    return (
        "Two changes turn the classifier into a model that writes. Attention is causal: a position sees only itself "
        "and the positions before it. And nothing is pooled: every position predicts the next token, so one text of T "
        "tokens gives T losses in a single pass. The blocks and their parameters stay the same. What grows is the "
        "output, from one row of K logits for each text to T rows of V."
    )


def _sparse_transformer() -> str:
    T, stride = 1024, 32
    model = SparseTransformer(2, 4, 2, 1, T, stride)
    seen = (ops.Causal() & model.pattern).table(2, T, T, np).sum() / 2
    whole = ops.Causal().table(1, T, T, np).sum()
    return (
        "A language model for long texts. Causal attention in the language model looks at all T (T + 1)/2 pairs. Here "
        "half of the heads look at the last few positions and the other half at every stride-th position before, so "
        f"two steps connect any pair. With T = {T:,} and a stride of {stride}, {seen:,.0f} pairs remain for a head, on "
        f"average, of {whole:,}: {100 * seen / whole:.1f}%. The tiled kernel skips the tiles that are empty. (The "
        "figures below are of the reference, which computes all pairs and then ignores most of them.) The table of "
        "positions is replaced by one for rows and one for columns of a grid, the norm comes before each branch, and "
        "GELU replaces ReLU."
    )


def _transformer_xl() -> str:
    segment, memory, depth = 128, 128, 12
    model = TransformerXL(2, 4, 1, depth, segment, memory)
    reach = len(model.body.blocks) * model.memory
    return (
        "The language model forgets everything before its window. This one reads a text segment by segment. Each block "
        "keeps its inputs of the last M positions and lets attention see [memory, x], with M + T keys for T queries. "
        "The vectors in the memory have themselves seen a memory, so with every block the view reaches M positions "
        f"further back: {reach:,} positions for {depth} blocks and M = {memory}. The memory is a constant: no gradient "
        "enters it. Positions are relative, because the same position means something else in the next segment; each "
        "block gets a projection of distances and two biases for it, and the table of positions is dropped."
    )


def _encoder_decoder() -> str:
    return (
        "Two stacks in place of one. The encoder reads the source text as the classifier does, without a causal mask "
        "and without pooling. The decoder writes the target like the language model, and each of its blocks has a "
        "third branch, cross-attention: the queries come from the target, the keys and values from the encoder's "
        "output. In backward every decoder block sends a gradient to that output, and their sum enters the encoder. "
        "One table of word vectors serves source, target and output, and positions are sinusoids, which need no "
        "parameters. All projections have biases."
    )


def _bert_body() -> str:
    return (
        "An encoder, like the body of the classifier, that is trained before the task is known. Two texts can share a "
        "row, so every token also gets the vector of its text (segment), and the sum of the three embeddings is "
        "normalised before the first block. All maps of the attention have biases, and GELU replaces ReLU."
    )


def _bert_pretraining() -> str:
    return (
        "The language model predicts every token from those before it. BERT hides some tokens and predicts them from "
        "both sides, so attention needs no causal mask. Logits are computed only at the K hidden positions of a row: "
        "in the cost of the output, K takes the place of T. A second head, on the vector of the first token, says "
        "whether the second text follows the first. The table of word vectors is also the output's matrix."
    )


def _bert_classifier() -> str:
    return (
        "The classifier with a body that was trained before. The mean over positions is replaced by the vector of the "
        "first token, [CLS], which goes through one more linear layer and a tanh, the pooler."
    )


def _gpt2() -> str:
    return (
        "The language model with four changes. The norm comes before each branch instead of after the sum, with one "
        "more after the last block. So the path from the embedding to the output is a plain sum, and gradients reach "
        "the first block unchanged. The table of word vectors is also the matrix of the output, so it gets gradients "
        "from both uses. The projections to queries, keys and values have biases. GELU replaces ReLU; it keeps the "
        "value before the activation, where ReLU needs only its sign. (Dropout, which is on by default, keeps its "
        "masks.)"
    )


def _llama() -> str:
    d = traced("Llama").letters.sizes
    sizes = d["V"], d["C"], d["H"], 1, d["T"]
    stored = [sum(x.nbytes for x in model.allocate(1)[0]) for model in (GPT2(*sizes), Llama(*sizes, kv_heads=d["G"]))]
    return (
        "A model like GPT-2 with newer parts. Queries and keys are rotated by angles that grow with their positions, "
        "so a score depends on a distance, and needs no table of positions. Norms divide by the root mean square; they "
        "neither subtract a mean nor add a bias. The feed-forward layer has three matrices instead of two: one of them "
        "makes a gate for another. (In the trace F is the same for both models; Llama's own F is 8/3 C, which gives as "
        "many weights as the two matrices with 4 C.) There are no biases, and the output has its own matrix again. "
        f"Several query heads share one head of keys and values: with {d['H']} query heads and {d['G']} of keys and "
        f"values, as in the trace, the cache for generation is {stored[0] / stored[1]:.3g} times smaller."
    )


def _qwen3() -> str:
    return (
        "Llama with a norm of each head of the queries and keys, before they are rotated: a head is divided by its "
        "root mean square and scaled by γ, the same for all heads. Scores can then grow only through γ, not through "
        "the weights of the projections. For backward, the norms keep their inputs and a number for each head; they "
        "have 2 D weights in each block. (The biases that Qwen2 has are gone again.)"
    )


def _smollm3() -> str:
    return (
        "Llama without a rotation in every fourth block. There, queries and keys are compared by content alone, at any "
        "distance; the order is known from the other blocks, and from what a causal model can see. The output is tied "
        "to the table of tokens, as in GPT-2. (The trace is shallower than four blocks, so all of its blocks rotate.)"
    )


def _phi3() -> str:
    return (
        "The computation is that of Llama. The published files hold queries, keys and values side by side in one "
        "matrix, and the gate and the values of SwiGLU in another; they are separated when they are read. In the "
        "smallest model each position sees only the last 2,047."
    )


def _olmo2() -> str:
    return (
        "Llama with the norms in other places: after each branch, before the sum, and none before it. So what a branch "
        "adds has a size that is learned, and the branch reads the residual path as it is. The queries of all heads "
        "together are normalised too, and so are the keys, before they are rotated."
    )


def _pythia() -> str:
    return (
        "Llama with its two branches side by side: both read x, each through a norm of its own, and the block returns "
        "the sum of x and both. Only a quarter of each head is rotated. As in GPT-2, the norms subtract a mean and add "
        "a bias, the feed-forward layer has one map with GELU instead of a gate, and all maps of a block have biases."
    )


def _gemma3() -> str:
    return (
        "Llama with four norms in a block, one before and one after each branch, and one of each head of the queries "
        "and keys, as in Qwen3. The gate is GELU instead of SiLU. The vectors of tokens are multiplied by √C, and "
        "their table is also the output's. In the published models, five of six blocks see only a window, and their "
        "angles differ from those of the sixth."
    )


WORDS: dict[str, Callable[[], str]] = {
    "Classifier": _classifier,
    "LanguageModel": _language_model,
    "SparseTransformer": _sparse_transformer,
    "TransformerXL": _transformer_xl,
    "EncoderDecoder": _encoder_decoder,
    "Bert": _bert_body,
    "BertPretraining": _bert_pretraining,
    "BertClassifier": _bert_classifier,
    "GPT2": _gpt2,
    "Llama": _llama,
    "Qwen3": _qwen3,
    "SmolLM3": _smollm3,
    "Phi3": _phi3,
    "Olmo2": _olmo2,
    "Pythia": _pythia,
    "Gemma3": _gemma3,
}


def _table(before: str, name: str) -> str:
    """What is added and saved, from the traces of both models at the same sizes."""
    old, new = (dict(_counts(traced(model).letters, traced(model).reference)) for model in (before, name))
    rows = []
    for label, terms in new.items():
        change = terms.copy()
        change.subtract(old[label])
        rows.append(f"| {label} | {written(change) if any(change.values()) else 'the same'} |")
    head = f"| with depth {DEPTH}, compared with `{before}` | |\n|---|---|"
    return "\n".join([head, *rows])


def _counts(letters: Letters, call: TracedCall) -> Iterable[tuple[str, Counter]]:
    yield "parameters", letters.terms((1, p.data.shape) for p in call.parameters.values())
    yield "FLOP forward", letters.terms((2, (*shape, k)) for shape, k in call.products())
    yield "FLOP backward", letters.terms((2, (*shape, k)) for shape, k in call.backward.products())
    yield "bytes kept", letters.terms((x.itemsize, x.shape) for x in call.kept.values())
