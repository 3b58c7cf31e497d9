"""Mistakes in layers and models."""

from __future__ import annotations

from .mistake import Mistake

MISTAKES = (
    Mistake(
        name="a tied table: only one of its two gradients",
        title="A weight's gradient is assigned, not added",
        effect="If a layer is used twice, or a weight is shared, only the last gradient is left.",
        file="nn/linear.py",
        replacements=(("        self.w.grad += dw", "        self.w.grad[...] = dw"),),
    ),
    Mistake(
        name="cross-attention: queries from the memory, keys and values from x",
        title="Queries come from the memory, keys and values from x",
        effect="The gradients fit this forward, so a check of values passes; but future tokens leak.",
        file="nn/attention.py",
        replacements=(
            (
                (
                    "        q, query = self.query.forward(x)\n"
                    "        k, key = self.key.forward(memory)\n"
                    "        v, value = self.value.forward(memory)"
                ),
                (
                    "        q, query = self.query.forward(memory)\n"
                    "        k, key = self.key.forward(x)\n"
                    "        v, value = self.value.forward(x)"
                ),
            ),
            (
                ("        dx = self.query.backward(self.join_heads(dq), cache.query)\n        dmemory = self.key"),
                ("        dmemory = self.query.backward(self.join_heads(dq), cache.query)\n        dx = self.key"),
            ),
            (
                (
                    "        dmemory, _ = ops.add(dmemory, self.value.backward(self.join_heads(dv), cache.value))\n"
                    "        return"
                ),
                ("        dx = dx + self.value.backward(self.join_heads(dv), cache.value)\n        return"),
            ),
        ),
    ),
    Mistake(
        name="encoder-decoder: the memory's gradient from one block only",
        title="The memory gets its gradient from only one block",
        effect="Every block reads the memory, so its gradient is the sum over the blocks.",
        file="nn/stack.py",
        replacements=(("[total + d for total, d in zip(totals, dshared, strict=True)]", "totals"),),
    ),
    Mistake(
        name="a residual: the gradient passes through the branch only",
        title="The gradient passes only through the branch",
        effect="In y = x + f(x), the first x passes dy on unchanged; this part is left out.",
        file="nn/residual.py",
        replacements=(("            dx, _ = ops.add(ds, dn[:, -T:])", "            dx = dn[:, -T:]"),),
    ),
    Mistake(
        name="encoder-decoder: the table is scaled at the input, its gradient is not",
        title="The embedding is scaled, its gradient is not",
        effect="The gradients of the embeddings lack the factor of the forward, such as √C.",
        file="nn/embedding_sum.py",
        replacements=(("            de = (self.scale * dx).astype(dx.dtype, copy=False)\n", "            de = dx\n"),),
    ),
    Mistake(
        name="an output tied to the embedding: no gradient from the output",
        title="The table gets no gradient from the output",
        effect="A tied table is used twice, and its gradient is the sum of both uses.",
        file="nn/embedding.py",
        replacements=(("        self.table.grad += dw.T\n        if", "        if"),),
    ),
    Mistake(
        name="a causal model that sees the future",
        title="The causal mask is not used",
        effect="The gradients fit this forward; a model that sees the future learns nothing.",
        file="nn/attention.py",
        replacements=(("        if self.causal:\n", "        if False:\n"),),
    ),
    Mistake(
        name="multi-head attention that mixes time and heads, right only for T = 1",
        title="Heads are split without a transpose",
        effect="Time and heads are mixed. It is right only for T = 1; the gradients fit this forward.",
        file="nn/attention.py",
        replacements=(
            (
                "        return x.reshape(B, T, width // self.head_width, self.head_width).transpose(0, 2, 1, 3)",
                "        return x.reshape(B, width // self.head_width, T, self.head_width)",
            ),
            ("        return x.transpose(0, 2, 1, 3).reshape(B, T, H * D)", "        return x.reshape(B, T, H * D)"),
        ),
    ),
    Mistake(
        name="recompute: another dropout mask the second time",
        title="The second forward draws a different mask",
        effect="The gradient belongs to a different forward than the one that gave y.",
        file="nn/recompute.py",
        replacements=(
            (
                "self.layer.forward(*cache.inputs, **cache.options)",
                'self.layer.forward(*cache.inputs, **{**cache.options, "key": None})',
            ),
        ),
    ),
    Mistake(
        name="a pattern lets the tokens of a prompt see later ones",
        title="A pattern lets the tokens of a prompt see later ones",
        effect="The gradient is right, but generation differs from training.",
        file="nn/attention.py",
        replacements=(("            pattern = causal(pattern)\n        y, _ =", "            pass\n        y, _ ="),),
    ),
    Mistake(
        name="positions on a grid: the columns get the gradient of the rows",
        title="The columns get the gradient of the rows",
        effect="Each table must be indexed with its own positions, in backward as in forward.",
        file="nn/embedding.py",
        replacements=(
            (
                "cache.columns, out=self.columns.grad)\n        return",
                "cache.rows, out=self.columns.grad)\n        return",
            ),
        ),
    ),
    Mistake(
        name="a tied output: its gradient overwrites the one from the table's other use",
        title="The gradient overwrites the one from the table's other use",
        effect="A tied table is used twice, and its gradient is the sum of both uses.",
        file="nn/embedding.py",
        replacements=(
            ("        self.table.grad += dw.T\n        if", "        self.table.grad[...] = dw.T\n        if"),
        ),
    ),
    Mistake(
        name="a memory: gamma gets no gradient from it",
        title="γ gets no gradient from the memory",
        effect="The norm is also applied to the memory, so the memory's rows are part of the sums for γ and β.",
        file="nn/residual.py",
        replacements=(
            (
                "            dx, _ = ops.add(dy, self.norm.backward(dn, cache.norm)[:, -T:])",
                (
                    "            dn[:, : dn.shape[1] - T] = 0\n"
                    "            dx, _ = ops.add(dy, self.norm.backward(dn, cache.norm)[:, -T:])"
                ),
            ),
        ),
    ),
    Mistake(
        name="BERT: the gradient of the first vector goes to all of them",
        title="The gradient of the first vector goes to all of them",
        effect="Only the first vector is read, so the others get no gradient.",
        file="models/bert_heads.py",
        replacements=(
            (
                "cache.dense)\n        return dx\n\n\nclass Masked",
                "cache.dense)\n        dx[...] = dx[:, :1]\n        return dx\n\n\nclass Masked",
            ),
        ),
    ),
)
