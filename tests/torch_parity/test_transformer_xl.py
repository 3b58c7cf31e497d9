"""Transformer-XL compared with the same model in PyTorch, with its authors' shift: pad, reshape, cut."""

import numpy as np
import pytest

from scratchformer.models import TransformerXL
from scratchformer.optim import Adam
from scratchformer.rng import Key

torch = pytest.importorskip("torch")
F = torch.nn.functional

B, T, M, V, C, H, DEPTH = 3, 5, 7, 17, 12, 3, 2
D = C // H


class Attention(torch.nn.Module):
    """Of a segment to the memory and itself. Scores of distances below 0 are wrong, but masked."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.position = (torch.nn.Linear(C, C, bias=False) for _ in range(4))
        self.unify = torch.nn.Linear(C, C)
        self.content_bias, self.position_bias = (torch.nn.Parameter(torch.randn(H, D)) for _ in range(2))

    def forward(self, h, t):
        b, s, _ = h.shape
        distance = torch.arange(s - 1, -1, -1, dtype=h.dtype)
        angle = distance[:, None] / 10_000 ** (torch.arange(0, C, 2, dtype=h.dtype) / C)
        r = self.position(torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)).view(s, H, D)
        q = self.query(h[:, -t:]).view(b, t, H, D)
        k, v = self.key(h).view(b, s, H, D), self.value(h).view(b, s, H, D)
        content = torch.einsum("bthd,bshd->bhts", q + self.content_bias, k)
        position = torch.einsum("bthd,shd->bhts", q + self.position_bias, r)
        padded = torch.cat([position.new_zeros(b, H, t, 1), position], dim=-1)
        position = padded.view(b, H, s + 1, t)[:, :, 1:].reshape(b, H, t, s)
        seen = torch.ones(t, s, dtype=torch.bool).tril(s - t)
        z = ((content + position) / D**0.5).masked_fill(~seen, -torch.inf)
        return self.unify(torch.einsum("bhts,bshd->bthd", z.softmax(-1), v).reshape(b, t, C))


class Block(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm_first = norm == "pre"
        self.attention = Attention()
        self.norm1, self.norm2 = torch.nn.LayerNorm(C), torch.nn.LayerNorm(C)
        self.up, self.down = torch.nn.Linear(C, 4 * C), torch.nn.Linear(4 * C, C)

    def forward(self, x, memory):
        h = torch.cat([memory.detach(), x], dim=1)
        if self.norm_first:
            x = x + self.attention(self.norm1(h), x.shape[1])
            return x + self.down(F.relu(self.up(self.norm2(x))))
        x = self.norm1(x + self.attention(h, x.shape[1]))
        return self.norm2(x + self.down(F.relu(self.up(x))))


class Model(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.tokens = torch.nn.Embedding(V, C)
        self.blocks = torch.nn.ModuleList(Block(norm) for _ in range(DEPTH))
        self.final_norm = torch.nn.LayerNorm(C) if norm == "pre" else torch.nn.Identity()
        self.output = torch.nn.Linear(C, V)

    def forward(self, ids, memory):
        """Logits, and the memory for the next segment."""
        x, kept = self.tokens(ids), []
        for block, old in zip(self.blocks, memory, strict=True):
            kept.append(torch.cat([old, x], dim=1)[:, -M:])
            x = block(x, old)
        return self.output(self.final_norm(x)), kept


def pairs(ours, theirs):
    """Each of our parameters by name, with PyTorch's, and whether it is transposed there."""
    parameters = dict(theirs.named_parameters())
    names = ours.named_parameters()
    assert len(names) == len(parameters)
    for name, param in names.items():
        path, leaf = name.removeprefix("body.").replace("feedforward.", "").rsplit(".", 1)
        leaf = {"b": "bias", "beta": "bias", "w": "weight", "gamma": "weight", "table": "weight"}.get(leaf, leaf)
        yield name, param, parameters[f"{path}.{leaf}"], name.endswith(".w")


def make(norm, precision):
    """Our model and PyTorch's, with our initial weights and with biases that are not zero."""
    ours, theirs = TransformerXL(V, C, H, DEPTH, T, M, norm=norm, key=Key(1)), Model(norm)
    ours.to(dtype=precision.dtype)
    theirs.to(getattr(torch, np.dtype(precision.dtype).name))
    for i, (name, param, parameter, transposed) in enumerate(pairs(ours, theirs)):
        if name.endswith("_bias"):
            param.data[...] = precision.normal(*param.data.shape, seed=i)
        parameter.data[...] = torch.from_numpy(param.data.T if transposed else param.data)
    return ours, theirs


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_text_in_order(norm, precision):
    """Four segments, so that the memory is empty, partly full and full: losses, gradients, and steps of Adam."""
    ours, theirs = make(norm, precision)
    adam, their_adam = Adam(ours.parameters(), 1e-2), torch.optim.Adam(theirs.parameters(), 1e-2)
    text = np.random.default_rng(0).integers(0, V, (B, 4 * T + 1))
    memory, their_memory = None, [torch.zeros(B, 0, C, dtype=next(theirs.parameters()).dtype)] * DEPTH
    for start in range(0, 4 * T, T):
        ids, targets = text[:, start : start + T], text[:, start + 1 : start + T + 1]
        ours.zero_grad()
        loss, cache = ours.loss(ids, targets, memory)
        ours.loss_backward(1.0, cache)
        memory = ours.remember(cache[0])

        their_adam.zero_grad()
        logits, their_memory = theirs(torch.from_numpy(ids.copy()), their_memory)
        their_loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets.copy()).flatten())
        their_loss.backward()

        precision.agree(loss, their_loss, "loss")
        precision.agree(memory, torch.stack(their_memory, dim=1), "memory")
        for name, param, parameter, transposed in pairs(ours, theirs):
            precision.agree(param.grad.T if transposed else param.grad, parameter.grad, name)
        if precision.dtype == np.float64:  # in float32, Adam would amplify rounding, and the next losses would differ
            adam.step()
            their_adam.step()
