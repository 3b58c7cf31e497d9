"""The same models in PyTorch, as the tutorial writes them and tuned, with weights copied from scratchformer's.

They are post-norm or pre-norm, with learned positions and ReLU, the defaults of `scratchformer.models`.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn


class TorchSelfAttention(nn.Module):
    """fused: PyTorch's fused attention kernel, instead of two products and a masked softmax."""

    def __init__(self, d_model: int, heads: int, causal: bool, fused: bool, bias: bool = False) -> None:
        super().__init__()
        self.heads, self.causal, self.fused = heads, causal, fused
        self.query, self.key, self.value = (nn.Linear(d_model, d_model, bias=bias) for _ in range(3))
        self.unify = nn.Linear(d_model, d_model)

    def forward(self, x: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
        """allowed: (B, 1, 1, S), false at padding; None if there is none."""
        B, T, C = x.shape
        q, k, v = (
            f(x).view(B, T, self.heads, C // self.heads).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
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
        return F.cross_entropy(self(ids).transpose(1, 2), targets)


class TorchGPT2(TorchModel):
    """The twin of a scratchformer GPT2 without dropout, with its weights."""

    def __init__(self, model, fused: bool = False) -> None:
        super().__init__(model, model.config["context"], model.config["vocab_size"], True, fused, gpt2=True)

    forward, loss = TorchLanguageModel.forward, TorchLanguageModel.loss


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


def torch_name(name: str) -> str:
    """PyTorch's name for a parameter of ours."""
    words = [w for w in name.split(".") if w not in ("body", "feedforward")]
    leaf = {"w": "weight", "b": "bias", "gamma": "weight", "beta": "bias", "table": "weight"}[words[-1]]
    return ".".join([*words[:-1], leaf])


def _is_linear(name: str) -> bool:
    return not name.startswith(("tokens", "positions"))
