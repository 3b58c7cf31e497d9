"""The same language model in PyTorch, in the tutorial's way and tuned, with weights copied from scratchformer's.

Both are post-norm or pre-norm, with learned positions and ReLU, as `scratchformer.models.LanguageModel` by default.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class SelfAttention(nn.Module):
    """fused: PyTorch's fused attention kernel, instead of two products and a masked softmax."""

    def __init__(self, d_model: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.key = nn.Linear(d_model, d_model, bias=False)
        self.value = nn.Linear(d_model, d_model, bias=False)
        self.unify = nn.Linear(d_model, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = (
            f(x).view(B, T, self.heads, C // self.heads).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(2, 3) / (C // self.heads) ** 0.5
            future = torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1)
            y = F.softmax(scores.masked_fill(future, float("-inf")), dim=-1) @ v
        return self.unify(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, d_model: int, heads: int, norm: str, fused: bool) -> None:
        super().__init__()
        self.norm = norm
        self.attention = SelfAttention(d_model, heads, fused)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.up, self.down = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm == "post":
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.down(F.relu(self.up(x))))
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class TorchLanguageModel(nn.Module):
    def __init__(self, model, fused: bool = False) -> None:
        """The twin of a scratchformer LanguageModel, with its weights."""
        super().__init__()
        c = model.config
        norm = c.get("norm", "post")
        self.tokens = nn.Embedding(c["vocab_size"], c["d_model"])
        self.positions = nn.Embedding(c["context"], c["d_model"])
        self.blocks = nn.ModuleList(Block(c["d_model"], c["heads"], norm, fused) for _ in range(c["depth"]))
        self.final_norm = nn.LayerNorm(c["d_model"]) if norm == "pre" else nn.Identity()
        self.output = nn.Linear(c["d_model"], c["vocab_size"])
        state = {torch_name(name): torch.from_numpy(a) for name, a in model.state_dict().items()}
        self.to(next(iter(state.values())).dtype)
        self.load_state_dict({n: a.T if a.ndim == 2 and _is_linear(n) else a for n, a in state.items()})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.output(self.final_norm(x))

    def loss(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(ids).transpose(1, 2), targets)


def torch_name(name: str) -> str:
    """PyTorch's name for a parameter of ours."""
    words = [w for w in name.split(".") if w not in ("body", "feedforward")]
    leaf = {"w": "weight", "b": "bias", "gamma": "weight", "beta": "bias", "table": "weight"}[words[-1]]
    return ".".join([*words[:-1], leaf])


def _is_linear(name: str) -> bool:
    return not name.startswith(("tokens", "positions"))
