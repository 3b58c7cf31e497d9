"""The same models in PyTorch, as the tutorial writes them and tuned, with weights copied from scratchformer's.

They are post-norm or pre-norm, with learned positions and ReLU, the defaults of `scratchformer.models`. There are also
GPT-2, with a cache for generation, and Llama.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from scratchformer.models.llama import EPS


def joined(x: torch.Tensor, layers: Sequence[nn.Linear]) -> Sequence[torch.Tensor]:
    """The outputs of linear layers of x, by one product."""
    bias = None if layers[0].bias is None else torch.cat([f.bias for f in layers])
    return F.linear(x, torch.cat([f.weight for f in layers]), bias).chunk(len(layers), dim=-1)


class TorchSelfAttention(nn.Module):
    """fused: PyTorch's fused attention kernel, instead of two products and a masked softmax, and one product for three
    linear layers.
    """

    def __init__(self, d_model: int, heads: int, causal: bool, fused: bool, bias: bool = False) -> None:
        super().__init__()
        self.heads, self.causal, self.fused = heads, causal, fused
        self.query, self.key, self.value = (nn.Linear(d_model, d_model, bias=bias) for _ in range(3))
        self.unify = nn.Linear(d_model, d_model)

    def forward(self, x: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
        """allowed: (B, 1, 1, S), false at padding; None if there is none."""
        B, T, C = x.shape
        layers = self.query, self.key, self.value
        parts = joined(x, layers) if self.fused else [f(x) for f in layers]
        q, k, v = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2) for part in parts)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=self.causal)
        else:
            scores = q @ k.transpose(2, 3) / (C // self.heads) ** 0.5
            if self.causal:
                allowed = torch.tril(torch.ones(T, T, dtype=torch.bool, device=x.device))
            if allowed is not None:
                scores = scores.masked_fill(~allowed, float("-inf"))
            y = F.softmax(scores, dim=-1) @ v
        return self.unify(y.transpose(1, 2).reshape(B, T, C))


class TorchBlock(nn.Module):
    """gpt2: with biases everywhere, and GELU in its tanh approximation."""

    def __init__(self, d_model: int, heads: int, norm: str, causal: bool, fused: bool, gpt2: bool = False) -> None:
        super().__init__()
        self.norm, self.activation = norm, partial(F.gelu, approximate="tanh") if gpt2 else F.relu
        self.attention = TorchSelfAttention(d_model, heads, causal, fused, bias=gpt2)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.up, self.down = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def forward(self, x: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
        if self.norm == "post":
            x = self.norm1(x + self.attention(x, allowed))
            return self.norm2(x + self.down(self.activation(self.up(x))))
        x = x + self.attention(self.norm1(x), allowed)
        return x + self.down(self.activation(self.up(self.norm2(x))))


class TorchModel(nn.Module):
    """What both models share: embeddings, blocks, and an output layer."""

    def __init__(self, model, length: int, outputs: int, causal: bool, fused: bool, gpt2: bool = False) -> None:
        super().__init__()
        c = model.config
        norm = "pre" if gpt2 else c.get("norm", "post")
        self.tokens = nn.Embedding(c["vocab_size"], c["d_model"])
        self.positions = nn.Embedding(length, c["d_model"])
        self.blocks = nn.ModuleList(
            TorchBlock(c["d_model"], c["heads"], norm, causal, fused, gpt2) for _ in range(c["depth"])
        )
        self.final_norm = nn.LayerNorm(c["d_model"]) if norm == "pre" else nn.Identity()
        self.output = nn.Linear(c["d_model"], outputs, bias=not gpt2)
        state = {torch_name(name): torch.from_numpy(a) for name, a in model.state_dict().items()}
        if gpt2:  # the output has the weights of the embedding
            self.output.weight = self.tokens.weight
            state["output.weight"] = state["tokens.weight"].T
        self.to(next(iter(state.values())).dtype)
        self.load_state_dict({n: a.T if a.ndim == 2 and _is_linear(n) else a for n, a in state.items()})

    def body(self, ids: torch.Tensor, allowed: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x, allowed)
        return self.final_norm(x)


class TorchLanguageModel(TorchModel):
    """The twin of a scratchformer LanguageModel, with its weights."""

    def __init__(self, model, fused: bool = False) -> None:
        super().__init__(model, model.config["context"], model.config["vocab_size"], causal=True, fused=fused)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.output(self.body(ids))

    def loss(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())


class TorchGPT2(TorchModel):
    """The twin of a scratchformer GPT2 without dropout, with its weights."""

    def __init__(self, model, fused: bool = False) -> None:
        super().__init__(model, model.config["context"], model.config["vocab_size"], True, fused, gpt2=True)

    forward, loss = TorchLanguageModel.forward, TorchLanguageModel.loss


class TorchDecoder(nn.Module):
    """A TorchGPT2 that writes one sequence. Keys and values have a fixed shape, so that a step can be compiled."""

    def __init__(self, peer: TorchGPT2, length: int) -> None:
        """length: of the longest sequence."""
        super().__init__()
        self.peer, (C, heads) = peer, (peer.output.in_features, peer.blocks[0].attention.heads)
        shape = len(peer.blocks), 1, heads, length, C // heads
        for name in "keys", "values":
            self.register_buffer(name, torch.zeros(shape, dtype=peer.output.weight.dtype))

    def logits(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Of the token after ids (1, T), which are at positions (T,); (1, V)."""
        x = self.peer.tokens(ids) + self.peer.positions(positions)
        allowed = torch.arange(self.keys.shape[3], device=ids.device) <= positions[:, None]  # (T, length)
        for keys, values, block in zip(self.keys, self.values, self.peer.blocks, strict=True):
            a, n = block.attention, block.norm1(x)
            q, k, v = (f(n).unflatten(2, (a.heads, -1)).transpose(1, 2) for f in (a.query, a.key, a.value))
            keys.index_copy_(2, positions, k)
            values.index_copy_(2, positions, v)
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=allowed)
            x = x + a.unify(y.transpose(1, 2).flatten(2))
            x = x + block.down(block.activation(block.up(block.norm2(x))))
        return self.peer.output(self.peer.final_norm(x[:, -1]))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A drawn token (1, 1), and its position (1,)."""
        chances = F.softmax(self.logits(ids, positions).float(), dim=-1)
        drawn = (chances / torch.empty_like(chances).exponential_()).argmax(dim=-1, keepdim=True)
        return drawn, positions[-1:] + 1


class TorchLlamaBlock(nn.Module):
    """A pre-norm block of rotary attention and SwiGLU, with RMS norms, and dropout at the end of both branches."""

    def __init__(self, d_model: int, heads: int, d_ff: int, dropout: float) -> None:
        super().__init__()
        linear, names = partial(nn.Linear, bias=False), ("query", "key", "value", "unify")
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.RMSNorm(d_model, EPS), nn.RMSNorm(d_model, EPS)
        self.attention = nn.ModuleDict({name: linear(d_model, d_model) for name in names})
        self.gate, self.up, self.down = linear(d_model, d_ff), linear(d_model, d_ff), linear(d_ff, d_model)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """cos, sin: (T, D/2), of the angles by which the halves of a head are turned."""

        def turned(x: torch.Tensor) -> torch.Tensor:
            first, second = x.chunk(2, dim=-1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

        a = self.attention
        parts = joined(self.norm1(x), [a["query"], a["key"], a["value"]])
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x = x + self.dropout(a["unify"](y.transpose(1, 2).flatten(2)))
        gate, up = joined(self.norm2(x), [self.gate, self.up])
        return x + self.dropout(self.down(F.silu(gate) * up))


class TorchLlama(nn.Module):
    """The twin of a scratchformer Llama with the default options, with its weights."""

    def __init__(self, model, fused: bool = True) -> None:
        super().__init__()
        sizes = ("vocab_size", "d_model", "heads", "depth", "context", "dropout")
        vocab_size, d_model, heads, depth, context, dropout = (model.config[name] for name in sizes)
        d_ff = model.body.blocks[0].feedforward.up.w.data.shape[1]
        self.tokens, self.dropout = nn.Embedding(vocab_size, d_model), nn.Dropout(dropout)
        self.blocks = nn.ModuleList(TorchLlamaBlock(d_model, heads, d_ff, dropout) for _ in range(depth))
        self.final_norm, self.output = nn.RMSNorm(d_model, EPS), nn.Linear(d_model, vocab_size, bias=False)
        D = d_model // heads
        angles = torch.arange(context)[:, None] * 10_000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        state = {torch_name(name): torch.from_numpy(a) for name, a in model.state_dict().items()}
        self.to(next(iter(state.values())).dtype)
        self.load_state_dict({n: a.T if a.ndim == 2 and "tokens" not in n else a for n, a in state.items()})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, T = self.dropout(self.tokens(ids)), ids.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:T], self.sin[:T])
        return self.output(self.final_norm(x))

    loss = TorchLanguageModel.loss


class TorchClassifier(TorchModel):
    """The twin of a scratchformer Classifier with mean pooling, with its weights.

    padded: whether texts are shorter than their row; None to look in each batch, for which a GPU's host would wait.
    """

    padded: bool | None = None

    def __init__(self, model, fused: bool = False) -> None:
        super().__init__(model, model.config["max_length"], model.config["num_classes"], causal=False, fused=fused)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        real = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]  # (B, T)
        padded = not real.all() if self.padded is None else self.padded
        allowed = real[:, None, None, :] if padded else None
        x = self.body(ids, allowed)
        x = (x * real[..., None]).sum(dim=1) / lengths[:, None]
        return F.log_softmax(self.output(x), dim=-1)

    def loss(self, ids: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(self(ids, lengths), labels)


def training_step(
    peer: nn.Module, optimizers: Sequence[tuple[Any, Callable]], where: str, mode: str | None, bfloat16: bool
) -> Callable[[Any], torch.Tensor]:
    """A function of a batch that takes a step: forward, backward, clipping, and updates. It returns the loss.

    optimizers: each with the function that updates the parameters. where: "cpu" or "cuda". mode: of `torch.compile`, or
    None. bfloat16: under autocast.
    """
    compute = torch.compile(peer.loss, mode=mode) if mode else peer.loss

    def step(batch: Any) -> torch.Tensor:
        tensors = [torch.from_numpy(a).to(where, non_blocking=True).long() for a in batch]
        for optimizer, _ in optimizers:
            optimizer.zero_grad()
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(where, torch.bfloat16, enabled=bfloat16):
            loss = compute(*tensors)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        for _, update in optimizers:
            update()
        return loss.detach()

    return step


def gradients_of(peer: nn.Module, model: Any, batch: Any) -> tuple[float, dict[str, np.ndarray]]:
    """The loss, and the gradients with the names and shapes of scratchformer's model."""
    loss = peer.loss(*(torch.from_numpy(a).long() for a in batch))
    loss.backward()
    theirs, ours = dict(peer.named_parameters()), {}
    for name, p in model.named_parameters().items():
        grad = theirs[torch_name(name)].grad.numpy()
        ours[name] = grad.T if p.data.ndim == 2 and name.endswith(".w") else grad
    return loss.item(), ours


def torch_name(name: str) -> str:
    """PyTorch's name for a parameter of ours."""
    words = [w for w in name.split(".") if w not in ("body", "feedforward")]
    leaf = {"w": "weight", "b": "bias", "gamma": "weight", "beta": "bias", "table": "weight"}[words[-1]]
    return ".".join([*words[:-1], leaf])


def _is_linear(name: str) -> bool:
    return not name.startswith(("tokens", "positions"))
