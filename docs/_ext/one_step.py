"""The page "One training step in numbers": a model small enough to print whole, run when the page is made.

Every number on the page is read from a trace of that run, from the optimizer, or from the model afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from tracing import TracedCall, trace

from scratchformer.dispatch import reference_only
from scratchformer.models import LanguageModel
from scratchformer.optim import Adam, clip_by_global_norm
from scratchformer.rng import Key

WORDS = ("the", "cat", "sat", "on", "mat")
IDS, TARGETS = (0, 1, 0), (1, 0, 4)  # the cat the -> cat the mat
SIZES: dict[str, Any] = dict(vocab_size=5, d_model=4, heads=2, depth=1, context=3, d_ff=6)
LR, MAX_NORM, BETAS = 0.01, 1.0, (0.9, 0.999)
DIGITS = 4
SEED = 9  # with which no gradient is too small for four decimals

POSITIONS = [f"t={t}\u00a0{WORDS[i]}" for t, i in enumerate(IDS)]
KEYS = [f"s={s}\u00a0{WORDS[i]}" for s, i in enumerate(IDS)]
VOCABULARY = [f"v={v}\u00a0{word}" for v, word in enumerate(WORDS)]
CHANNELS, HIDDEN = [f"c={c}" for c in range(4)], [f"f={f}" for f in range(6)]
BLOCK = "body.blocks.0."
PROJECTIONS = ("attention.query", "attention.key", "attention.value")
HEADS = [f"h={h} d={d}" for h in range(2) for d in range(2)]


class Step(NamedTuple):
    """A training step, from the weights before to the loss after; arrays by the names of the parameters."""

    before: dict[str, np.ndarray]
    loss: TracedCall
    gradients: dict[str, np.ndarray]
    norm: float
    clipped: dict[str, np.ndarray]
    m: dict[str, np.ndarray]
    v: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    loss_after: float


def make_model() -> LanguageModel:
    """The model. Its matrices are twice as large as usual, and γ and β differ from 1 and 0, as after some training; all
    weights have two decimals, so that they can be printed exactly.
    """
    model = LanguageModel(**SIZES, key=Key(SEED))
    draw = np.random.default_rng(SEED)
    for name, p in model.named_parameters().items():
        noise = draw.normal(scale=0.25, size=p.data.shape) if "norm" in name else 0
        p.data = np.round((2 * p.data if name.endswith(".w") else p.data) + noise, 2).astype(np.float32)
    return model


def take_step() -> Step:
    """One step of training with the references, in float32."""
    model = make_model()
    ids, targets = np.array([IDS]), np.array([TARGETS])
    adam = Adam(model.parameters(), LR, BETAS)

    def copies(flat: np.ndarray) -> dict[str, np.ndarray]:
        return dict(zip(model.named_parameters(), model.flat.views(flat.copy()), strict=True))

    with reference_only():
        before = copies(model.flat.data)
        loss = trace(model, ids, targets, loss=True)
        gradients = copies(model.flat.grad)
        norm = clip_by_global_norm(model.flat.grad, MAX_NORM)
        clipped = copies(model.flat.grad)
        adam.step()
        loss_after, _ = model.loss(ids, targets)
    after = copies(model.flat.data)
    return Step(before, loss, gradients, norm, clipped, copies(adam.m), copies(adam.v), after, float(loss_after))


def number(x: float, digits: int = DIGITS) -> str:
    """x with a fixed number of digits and a real minus sign."""
    text = f"{x:.{digits}f}"
    return (text[1:] if text.startswith("-") and not float(text) else text).replace("-", "−")


def table(x: np.ndarray, rows: Sequence[str], columns: Sequence[str], digits: int = DIGITS) -> str:
    """A two-dimensional array as a Markdown table."""
    x = np.asarray(x).reshape(len(rows), len(columns))
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    lines += [
        f"| {row} | {' | '.join(number(n, digits) for n in values)} |" for row, values in zip(rows, x, strict=True)
    ]
    return "\n".join(lines)


def shown(*tables: tuple[str, np.ndarray, Sequence[str], Sequence[str]], digits: int = DIGITS) -> str:
    """Tables, each below its name; without rows the array is a vector."""
    parts = []
    for name, x, rows, columns in tables:
        parts += [f"**{name}**", table(x, rows or [" "], columns, digits)]
    return "\n\n".join(parts)


def equation(text: str) -> str:
    return f"```{{math}}\n{text}\n```"


def by_hand(*lines: tuple[str, str, float]) -> str:
    """Arithmetic with the digits of the tables above, and what the program got: (entry, calculation, value)."""
    rows = [f"{entry} = {calculation} = {number(value)}" for entry, calculation, value in lines]
    return "\n".join(["By hand:", "", "```text", *rows, "```"])


def n(x: float) -> str:
    """A number inside a calculation: with two decimals if it has no more, in parentheses if it is negative."""
    text = number(x).removesuffix("00")
    return f"({text})" if text.startswith("−") else text


def sum_of(products: Iterable[tuple[float, float]]) -> str:
    return " + ".join(f"{n(a)}·{n(b)}" for a, b in products)


def default_link(name: str) -> str:
    return f"[`{name}`](operations/{name}.rst)"


def one_step_page(link: Callable[[str], str] = default_link) -> str:
    """The page, in Markdown. link: turns the name of an operation into a link to its page."""
    step = take_step()
    run = _Run(step)
    parts = [*_beginning(step), *_forward(run, link), *_backward(run, link), *_update(step)]
    return "\n\n".join(parts) + "\n"


class _Run:
    """The calls of the step by their short names, and the arrays in them without the batch axis."""

    def __init__(self, step: Step) -> None:
        self.step = step
        layers = {call.name: call for call in step.loss.walk() if call.layer is not None}
        self.positions = layers["body.positions"]
        self.attention, self.feedforward = layers[f"{BLOCK}attention"], layers[f"{BLOCK}feedforward"]
        self.query, self.key, self.value, self.attend, self.unify = self.attention.calls
        self.up, self.down = self.feedforward.calls
        self.norm1, self.norm2 = layers[f"{BLOCK}norm1"], layers[f"{BLOCK}norm2"]
        self.output, self.cross_entropy = layers["output"], step.loss.calls[-1]

    @staticmethod
    def into(call: TracedCall) -> np.ndarray:
        """The input of a layer, for the only sequence."""
        return next(iter(call.inputs().values()))[0]

    @staticmethod
    def out_of(call: TracedCall) -> np.ndarray:
        return call.output[0]

    @staticmethod
    def dy(call: TracedCall) -> np.ndarray:
        """The gradient that a layer's backward was given."""
        return next(iter(call.backward.arguments.values()))[0]

    @staticmethod
    def dx(call: TracedCall) -> np.ndarray:
        """The gradient that a layer's backward returned."""
        return call.backward.returned[0]

    def grad(self, name: str) -> np.ndarray:
        """The gradient of a parameter, whose name may be counted from the block."""
        return self.step.gradients.get(name, self.step.gradients.get(BLOCK + name))

    def weight(self, name: str) -> np.ndarray:
        """A parameter before the step."""
        return self.step.before.get(name, self.step.before.get(BLOCK + name))

    def probabilities(self) -> np.ndarray:
        """The softmax of the logits."""
        e = np.exp(self.out_of(self.output))
        return e / e.sum(axis=-1, keepdims=True)


def _beginning(step: Step) -> list[str]:
    count = sum(x.size for x in step.before.values())
    words = [
        f"| t={t} | {WORDS[i]} (v={i}) | {WORDS[j]} (v={j}) |"
        for t, (i, j) in enumerate(zip(IDS, TARGETS, strict=True))
    ]
    return [
        "# One training step in numbers",
        "This page follows every number of one training step: forward, loss, backward, clipping, Adam. The model is a "
        "`LanguageModel` in miniature: a vocabulary of V = 5 words, vectors of width C = 4, H = 2 heads of width "
        f"D = 2, one post-norm block with a feed-forward width of F = 6, and {count} parameters. It reads T = 3 words "
        "and predicts the next word at each position:",
        "\n".join(["| position | reads | should predict |", "|---|---|---|", *words]),
        "The page is made by running the program, in float32 as in any training; no number on it is typed. The weights "
        "before the step have two decimals and are shown exactly. All other numbers are rounded to four decimals, so "
        "a calculation by hand from the tables may differ by one in the last digit. There is one sequence in the "
        "batch, so the batch axis is left out. Rows and columns are counted from 0.",
        "## The weights",
        shown(
            ("`body.tokens.table`, a vector for each word", step.before["body.tokens.table"], VOCABULARY, CHANNELS),
            (
                "`body.positions.table`, a vector for each position",
                step.before["body.positions.table"],
                ["t=0", "t=1", "t=2"],
                CHANNELS,
            ),
            digits=2,
        ),
        "The other weights are printed where they are first used.",
    ]


def _forward(run: _Run, link: Callable[[str], str]) -> list[str]:
    x, attend = run.out_of(run.positions), run.attend
    z, p, y = (attend.values[name][0] for name in ("z", "probabilities", "y"))
    q, k, v = (attend.arguments[name][0] for name in "qkv")
    logits, probabilities = run.out_of(run.output), run.probabilities()
    tables = run.weight("body.tokens.table"), run.weight("body.positions.table")
    return [
        "## Forward",
        f"### 1. Embedding ({link('embedding')})",
        "Each word is replaced by its row of the table, and the vector of its position is added.",
        equation("x_tc = Σ_v [v = ids_t] table_vc + position_tc"),
        shown(("x", x, POSITIONS, CHANNELS)),
        by_hand(("x[1, 0]", f"{n(tables[0][IDS[1], 0])} + {n(tables[1][1, 0])}", x[1, 0])),
        f"### 2. Queries, keys and values ({link('linear')})",
        "Three matrices without biases. The first two columns belong to head 0, the others to head 1.",
        equation("q_ti = Σ_c x_tc wq_ci"),
        shown(*((f"`{part}.w`", run.weight(f"{part}.w"), CHANNELS, HEADS) for part in PROJECTIONS), digits=2),
        shown(
            ("queries", run.out_of(run.query), POSITIONS, HEADS),
            ("keys", run.out_of(run.key), KEYS, HEADS),
            ("values", run.out_of(run.value), KEYS, HEADS),
        ),
        by_hand(("q[1, 0]", sum_of(zip(x[1], run.weight("attention.query.w")[:, 0], strict=True)), q[0, 1, 0])),
        f"### 3. Attention ({link('attention')})",
        "The score z of a query and a key is their dot product in one head, divided by √D. A position sees itself and "
        "the positions before it; the softmax p of a row runs over these. Scores of later keys, s > t, are not used.",
        equation("z_ts = 1/√D Σ_d q_td k_sd"),
        equation("p_ts = [s ≤ t] exp(z_ts) / Σ_s' [s' ≤ t] exp(z_ts')"),
        equation("y_td = Σ_s p_ts v_sd"),
        *(shown((f"z, head {h}", z[h], POSITIONS, KEYS), (f"p, head {h}", p[h], POSITIONS, KEYS)) for h in range(2)),
        shown(("y, both heads side by side", y.transpose(1, 0, 2), POSITIONS, HEADS)),
        by_hand(
            ("z[1, 0]", f"({sum_of(zip(q[0, 1], k[0, 0], strict=True))})/√2", z[0, 1, 0]),
            (
                "p[1, 0]",
                f"exp({number(z[0, 1, 0])})/(exp({number(z[0, 1, 0])}) + exp({number(z[0, 1, 1])}))",
                p[0, 1, 0],
            ),
            ("y[1, 0]", sum_of(zip(p[0, 1, :2], v[0, :2, 0], strict=True)), y[0, 1, 0]),
        ),
        f"### 4. The heads are united ({link('linear')})",
        equation("a_tc = Σ_i y_ti w_ic + b_c"),
        shown(
            ("`attention.unify.w`", run.weight("attention.unify.w"), HEADS, CHANNELS),
            ("`attention.unify.b`", run.weight("attention.unify.b"), [], CHANNELS),
            digits=2,
        ),
        shown(("a", run.out_of(run.unify), POSITIONS, CHANNELS)),
        f"### 5. Sum and norm ({link('layernorm')})",
        "The input of the attention is added to its output, r = x + a. Every row is normalised to mean 0 and variance "
        "1, then scaled and shifted.",
        equation("μ_t = mean_c(r_tc)"),
        equation("σ_t = √(mean_c((r_tc − μ_t)²) + eps)"),
        equation("x̂_tc = (r_tc − μ_t)/σ_t"),
        equation("n_tc = γ_c x̂_tc + β_c"),
        *_norm(run, run.norm1, "norm1"),
        f"### 6. Feed-forward layer ({link('dense')}, {link('linear')})",
        "Each position by itself: from C = 4 numbers to F = 6, a ReLU, and back.",
        equation("h_tf = Σ_c n_tc w_cf + b_f"),
        equation("a_tf = max(0, h_tf)"),
        equation("u_tc = Σ_f a_tf w_fc + b_c"),
        shown(
            ("`feedforward.up.w`", run.weight("feedforward.up.w"), CHANNELS, HIDDEN),
            ("`feedforward.up.b`", run.weight("feedforward.up.b"), [], HIDDEN),
            ("`feedforward.down.w`", run.weight("feedforward.down.w"), HIDDEN, CHANNELS),
            ("`feedforward.down.b`", run.weight("feedforward.down.b"), [], CHANNELS),
            digits=2,
        ),
        shown(
            ("h, before the ReLU", run.up.calls[0].values["h"], POSITIONS, HIDDEN),
            ("a, after it", run.out_of(run.up), POSITIONS, HIDDEN),
            ("u", run.out_of(run.down), POSITIONS, CHANNELS),
        ),
        f"### 7. Sum and norm again ({link('layernorm')})",
        "As in step 5, now with r = n + u.",
        *_norm(run, run.norm2, "norm2"),
        f"### 8. Logits ({link('linear')})",
        "From here on, x is the output of the block.",
        equation("logits_tv = Σ_c x_tc w_cv + b_v"),
        shown(
            ("`output.w`", run.weight("output.w"), CHANNELS, VOCABULARY),
            ("`output.b`", run.weight("output.b"), [], VOCABULARY),
            digits=2,
        ),
        shown(("logits", logits, POSITIONS, VOCABULARY)),
        f"### 9. The loss ({link('cross_entropy')})",
        "The softmax of a row gives the probability of each word. The loss is the mean of −log of the probability of "
        "the right word.",
        equation("p_tv = exp(logits_tv) / Σ_u exp(logits_tu)"),
        equation("L = −1/T Σ_t Σ_v [v = target_t] log(p_tv)"),
        shown(("p", probabilities, POSITIONS, VOCABULARY)),
        f"**The loss is {number(run.step.loss.output)}.** A model that gives all words the same probability has "
        f"log 5 = {number(math.log(5))}.",
        by_hand(
            (
                "p[2, 4]",
                f"exp({number(logits[2, 4])})/({' + '.join(f'exp({number(value)})' for value in logits[2])})",
                probabilities[2, 4],
            ),
            (
                "L",
                f"−(log({') + log('.join(number(probabilities[t, v]) for t, v in enumerate(TARGETS))}))/3",
                float(run.step.loss.output),
            ),
        ),
    ]


def _norm(run: _Run, norm: TracedCall, name: str) -> list[str]:
    """The tables of a layer norm."""
    r, values = run.into(norm), norm.calls[0].values
    mean, sigma = r.mean(axis=-1, keepdims=True), 1 / values["rstd"][0]
    return [
        shown(
            *((f"`{name}.{part}`", run.weight(f"{name}.{part}"), [], CHANNELS) for part in ("gamma", "beta")), digits=2
        ),
        shown(
            ("r, with μ and σ", np.concatenate([r, mean, sigma], axis=-1), POSITIONS, [*CHANNELS, "μ", "σ"]),
            ("x̂", values["centred"] * values["rstd"], POSITIONS, CHANNELS),
            ("n", run.out_of(norm), POSITIONS, CHANNELS),
        ),
    ]


def _backward(run: _Run, link: Callable[[str], str]) -> list[str]:
    dlogits, probabilities = run.cross_entropy.backward.returned[0], run.probabilities()
    values = run.norm2.calls[0].backward.values
    g, xhat, sigma = values["g"][0], values["xhat"][0], 1 / values["rstd"][0]
    mean, mean_x = g.mean(axis=-1), (g * xhat).mean(axis=-1)
    attend = run.attend.backward
    dp, dz, p = (attend.values[name][0] for name in ("dp", "dz", "probabilities"))
    dy, dv = attend.arguments["dy"][0], attend.returned[2][0]
    dr, du = run.dx(run.norm2), run.dx(run.feedforward)
    dx = run.dx(run.positions)
    return [
        "## Backward",
        "The same steps from last to first. Each gets the gradient of its output and returns that of its input. The "
        "gradients of its parameters are added to their `.grad`.",
        f"### 9. The loss ({link('cross_entropy')})",
        "Softmax and logarithm cancel. The gradient of a logit is its probability, minus 1 for the right word, divided "
        "by the number of predictions.",
        equation("dlogits_tv = 1/T (p_tv − [v = target_t])"),
        shown(("dlogits", dlogits, POSITIONS, VOCABULARY)),
        by_hand(("dlogits[0, 1]", f"({n(probabilities[0, TARGETS[0]])} − 1)/3", dlogits[0, TARGETS[0]])),
        f"### 8. Logits ({link('linear')})",
        equation("dw_cv = Σ_t x_tc dlogits_tv"),
        equation("db_v = Σ_t dlogits_tv"),
        equation("dx_tc = Σ_v dlogits_tv w_cv"),
        shown(
            ("gradient of `output.w`", run.grad("output.w"), CHANNELS, VOCABULARY),
            ("gradient of `output.b`", run.grad("output.b"), [], VOCABULARY),
            ("dx", run.dx(run.output), POSITIONS, CHANNELS),
        ),
        by_hand(
            (
                "dw[2, 1]",
                sum_of(zip(run.into(run.output)[:, 2], dlogits[:, 1], strict=True)),
                run.grad("output.w")[2, 1],
            ),
            ("dx[0, 2]", sum_of(zip(dlogits[0], run.weight("output.w")[2], strict=True)), run.dx(run.output)[0, 2]),
        ),
        f"### 7. The second norm ({link('layernorm')})",
        "The gradient that step 8 returned is dn here. It is scaled by γ first. Then two means are subtracted, "
        "because normalisation undoes a change along them.",
        equation("dγ_c = Σ_t dn_tc x̂_tc"),
        equation("dβ_c = Σ_t dn_tc"),
        equation("g_tc = γ_c dn_tc"),
        equation("dr_tc = 1/σ_t (g_tc − mean_c'(g_tc') − x̂_tc mean_c'(g_tc' x̂_tc'))"),
        shown(
            ("gradient of `norm2.gamma`", run.grad("norm2.gamma"), [], CHANNELS),
            ("gradient of `norm2.beta`", run.grad("norm2.beta"), [], CHANNELS),
            ("g", g, POSITIONS, CHANNELS),
            ("dr", dr, POSITIONS, CHANNELS),
        ),
        "For the first row, the mean of g, the mean of g x̂, and the entry c=2 of dr:",
        by_hand(
            ("mean of g", f"({' + '.join(n(value) for value in g[0])})/4", mean[0]),
            ("mean of g x̂", f"({sum_of(zip(g[0], xhat[0], strict=True))})/4", mean_x[0]),
            (
                "dr[0, 2]",
                f"({n(g[0, 2])} − {n(mean[0])} − {n(xhat[0, 2])}·{n(mean_x[0])})/{number(sigma[0, 0])}",
                dr[0, 2],
            ),
        ),
        f"### 6. Feed-forward layer ({link('linear')}, {link('dense')})",
        "r = n + u, so dr goes both into the feed-forward layer and around it. Inside, it goes through the second "
        "matrix, then on only where the ReLU was open, then through the first matrix.",
        equation("dh_tf = [h_tf > 0] Σ_c dr_tc w_fc"),
        shown(
            ("gradient of `feedforward.down.w`", run.grad("feedforward.down.w"), HIDDEN, CHANNELS),
            ("gradient of `feedforward.down.b`", run.grad("feedforward.down.b"), [], CHANNELS),
            ("dh", run.up.calls[0].backward.values["dh"], POSITIONS, HIDDEN),
            ("gradient of `feedforward.up.w`", run.grad("feedforward.up.w"), CHANNELS, HIDDEN),
            ("gradient of `feedforward.up.b`", run.grad("feedforward.up.b"), [], HIDDEN),
            ("the gradient that comes out of the layer", du, POSITIONS, CHANNELS),
            ("dn, with dr, which went around it", run.dy(run.norm1), POSITIONS, CHANNELS),
        ),
        by_hand(("dn[0, 0]", f"{n(dr[0, 0])} + {n(du[0, 0])}", run.dy(run.norm1)[0, 0])),
        f"### 5. The first norm ({link('layernorm')})",
        "As in step 7.",
        shown(
            ("gradient of `norm1.gamma`", run.grad("norm1.gamma"), [], CHANNELS),
            ("gradient of `norm1.beta`", run.grad("norm1.beta"), [], CHANNELS),
            ("dr", run.dx(run.norm1), POSITIONS, CHANNELS),
        ),
        f"### 4. The heads are separated ({link('linear')})",
        "Again dr goes into the layer and around it. In the layer it is da.",
        equation("dy_ti = Σ_c da_tc w_ic"),
        shown(
            ("gradient of `attention.unify.w`", run.grad("attention.unify.w"), HEADS, CHANNELS),
            ("gradient of `attention.unify.b`", run.grad("attention.unify.b"), [], CHANNELS),
            ("dy", run.dx(run.unify), POSITIONS, HEADS),
        ),
        f"### 3. Attention ({link('attention')})",
        "First values and probabilities, then the softmax, then queries and keys.",
        equation("dv_sd = Σ_t p_ts dy_td"),
        equation("dp_ts = Σ_d dy_td v_sd"),
        equation("dz_ts = p_ts (dp_ts − Σ_s' p_ts' dp_ts')"),
        equation("dq_td = 1/√D Σ_s dz_ts k_sd"),
        equation("dk_sd = 1/√D Σ_t dz_ts q_td"),
        *(
            shown((f"dp, head {h}", dp[h], POSITIONS, KEYS), (f"dz, head {h}", dz[h], POSITIONS, KEYS))
            for h in range(2)
        ),
        "The first row of dz is 0: the first position sees only itself, and the probability is 1 whatever the score.",
        shown(
            *(
                (name, d[0].transpose(1, 0, 2), rows, HEADS)
                for name, d, rows in zip(("dq", "dk", "dv"), attend.returned, (POSITIONS, KEYS, KEYS), strict=True)
            )
        ),
        by_hand(
            (
                "dz[1, 0]",
                f"{n(p[0, 1, 0])}·({n(dp[0, 1, 0])} − ({sum_of(zip(p[0, 1, :2], dp[0, 1, :2], strict=True))}))",
                dz[0, 1, 0],
            ),
            ("dv[0, 0]", sum_of(zip(p[0, :, 0], dy[0, :, 0], strict=True)), dv[0, 0, 0]),
        ),
        f"### 2. Queries, keys and values ({link('linear')})",
        "x feeds all three matrices, so the gradient that comes out of the layer is a sum of three.",
        equation("dwq_ci = Σ_t x_tc dq_ti"),
        shown(
            *((f"gradient of `{part}.w`", run.grad(f"{part}.w"), CHANNELS, HEADS) for part in PROJECTIONS),
            ("the gradient that comes out of the attention layer", run.dx(run.attention), POSITIONS, CHANNELS),
        ),
        f"### 1. Embedding ({link('embedding')})",
        "With dr, which went around the attention layer, this is the gradient of x. It is also the gradient of the "
        "position vectors.",
        shown(("dx", dx, POSITIONS, CHANNELS)),
        'The row of a word gets the sum of dx over all positions where the word was read. "the" was read at t=0 and '
        "at t=2, so two rows are added; a word that was not read gets 0.",
        equation("dtable_vc = Σ_t [v = ids_t] dx_tc"),
        shown(("gradient of `body.tokens.table`", run.grad("body.tokens.table"), VOCABULARY, CHANNELS)),
        by_hand(("dtable[0, 0]", f"{n(dx[0, 0])} + {n(dx[2, 0])}", run.grad("body.tokens.table")[0, 0])),
    ]


def _update(step: Step) -> list[str]:
    gradient, g, w, m, v = (x["output.w"][2, 1] for x in (step.gradients, step.clipped, step.before, step.m, step.v))
    after, factor = step.after["output.w"][2, 1], MAX_NORM / step.norm
    squares = {name: float((grad.astype(np.float64) ** 2).sum()) for name, grad in step.gradients.items()}
    moved = sum(int((step.after[name] != x).sum()) for name, x in step.before.items())
    rows = "\n".join(f"| `{name}` | {number(square)} |" for name, square in squares.items())
    lost = step.loss_after - float(step.loss.output)
    predicted = sum(
        float(np.sum(grad * (step.after[name] - step.before[name]))) for name, grad in step.gradients.items()
    )
    beta1, beta2 = BETAS
    return [
        "## Clipping",
        f"All gradients together are one long vector. If it is longer than {MAX_NORM:g}, it is scaled to this length.",
        equation("norm = √(Σ_i g_i²)"),
        f"| parameter | sum of the squares of its gradient |\n|---|---:|\n{rows}",
        f"The sum of all is {number(sum(squares.values()))}, so the norm is {number(step.norm)}, and every gradient is "
        f"multiplied by {number(factor)}.",
        by_hand(
            ("norm", f"√({number(sum(squares.values()))})", step.norm), ("factor", f"1/{number(step.norm)}", factor)
        ),
        "## Adam",
        "Adam keeps two running means for each weight, of the gradient and of its square. Both start at 0. Here "
        f"lr = {LR}, β₁ = {beta1}, β₂ = {beta2}, and this is step t = 1.",
        equation("m_i := β1 m_i + (1 − β1) g_i"),
        equation("v_i := β2 v_i + (1 − β2) g_i²"),
        equation("m̂_i = m_i/(1 − β1^t)"),
        equation("v̂_i = v_i/(1 − β2^t)"),
        equation("w_i := w_i − lr m̂_i/(√v̂_i + eps)"),
        f"Take one weight, `output.w` at c=2, v=1. Its gradient is {number(gradient)}, and {number(g)} after clipping. "
        f"So m is {number(m)} and v is {number(v, 7)}. Divided by 1 − β₁ and 1 − β₂, they are g and g² again, and m̂/√v̂ "
        "is 1 or −1. **In the first step every weight moves by almost exactly lr, against the sign of its gradient**, "
        "however small the gradient is. Clipping does not change that; it acts on the means that later steps use.",
        by_hand(
            ("g", f"{n(gradient)}·{number(factor)}", g),
            ("m", f"0.1·{n(g)}", m),
            ("w", f"{n(w)} − 0.01·{n(g)}/√({n(g)}·{n(g)})", after),
        ),
        f"{moved} of the {sum(x.size for x in step.before.values())} weights move. The others have gradient 0: the "
        "vectors of words that were not read, and the weights of hidden units whose ReLU was closed at every position.",
        "The weights after the step:",
        shown(
            *(
                (
                    f"`{name}`",
                    x,
                    [str(i) for i in range(len(x))] if x.ndim > 1 else [],
                    [str(i) for i in range(x.shape[-1])],
                )
                for name, x in step.after.items()
            )
        ),
        "## The loss afterwards",
        f"Forward once more on the same words: the loss was {number(step.loss.output)} and is now "
        f"**{number(step.loss_after)}**, a change of {number(lost)}. The gradient predicted {number(predicted)}: the "
        "sum over all weights of gradient times change. The rest is curvature.",
    ]
