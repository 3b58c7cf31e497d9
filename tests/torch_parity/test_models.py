"""Both models compared with the tutorial's in PyTorch: one step, and twenty steps of training."""

import numpy as np
import pytest

from scratchformer.models import Classifier, LanguageModel
from scratchformer.optim import SGD, Adam, AdamW, Group, Muon, clip_by_global_norm
from scratchformer.rng import Key

torch = pytest.importorskip("torch")
F = torch.nn.functional

B, T, V, K, C, H, DEPTH = 4, 8, 17, 3, 12, 3, 2
MAX_NORM = 0.5


def adamw(parameters, lr, weight_decay, head=None):
    """PyTorch's AdamW, with decay for arrays with two axes; `head`: settings for the last layer's weight and bias."""
    parameters = list(parameters)
    body, last = (parameters[:-2], parameters[-2:]) if head else (parameters, [])
    groups = [
        {"params": [p for p in body if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in body if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([*groups, {"params": last, **(head or {})}], lr)


class TorchMuon:
    """PyTorch's Muon for the matrices of the blocks, which are neither the first two nor the last two parameters, and
    its AdamW for the others. It computes in bfloat16; here the conversion is left out.
    """

    def __init__(self, parameters, lr, adam_lr, weight_decay):
        parameters = list(parameters)
        hidden = [p for p in parameters[2:-2] if p.ndim == 2]
        own = {id(p) for p in hidden}
        others = [p for p in parameters if id(p) not in own]
        self.dtype = hidden[0].dtype
        muon = torch.optim.Muon(hidden, lr, weight_decay=weight_decay, adjust_lr_fn="original")
        self.optimizers = [muon, adamw(others, adam_lr, weight_decay)]

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
            patch.setattr(torch, "bfloat16", self.dtype)  # for which newer versions than 2.13 look
            for optimizer in self.optimizers:
                optimizer.step()


BOTH_NORMS = pytest.mark.parametrize("norm", ["post", "pre"])
OPTIMIZERS = {
    "Adam": (lambda p: Adam(p, 1e-2), lambda p: torch.optim.Adam(p, 1e-2)),
    "Adam, weight decay, betas": (
        lambda p: Adam(p, 1e-2, betas=(0.8, 0.9), weight_decay=0.1),
        lambda p: torch.optim.Adam(p, 1e-2, betas=(0.8, 0.9), weight_decay=0.1),
    ),
    "AdamW": (lambda p: AdamW(p, 1e-2, weight_decay=0.1), lambda p: adamw(p, 1e-2, weight_decay=0.1)),
    "AdamW, a head with settings of its own": (
        lambda p: AdamW(p, 1e-2, weight_decay=0.1, groups=[Group("output.*", lr=5e-2, weight_decay=0.3)]),
        lambda p: adamw(p, 1e-2, weight_decay=0.1, head=dict(lr=5e-2, weight_decay=0.3)),
    ),
    "Muon": (
        lambda p: Muon(p, 0.02, 3e-3, betas=(0.9, 0.999), weight_decay=0.1),
        lambda p: TorchMuon(p, 0.02, 3e-3, weight_decay=0.1),
    ),
    "SGD": (lambda p: SGD(p, 0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "SGD, momentum, weight decay": (
        lambda p: SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    ),
}


class SelfAttention(torch.nn.Module):
    """As in the tutorial: queries and keys are both divided by the fourth root of the head width."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (torch.nn.Linear(C, C, bias=False) for _ in range(3))
        self.unify = torch.nn.Linear(C, C)

    def forward(self, x, allowed):
        b, t, _ = x.size()
        s = C // H
        queries, keys, values = (
            part(x).view(b, t, H, s).transpose(1, 2).reshape(b * H, t, s) for part in (self.query, self.key, self.value)
        )
        dot = torch.bmm(queries / s**0.25, (keys / s**0.25).transpose(1, 2))
        dot = dot.view(b, H, t, t).masked_fill(~allowed, float("-inf")).view(b * H, t, t)
        out = torch.bmm(F.softmax(dot, dim=2), values)
        return self.unify(out.view(b, H, t, s).transpose(1, 2).reshape(b, t, C))


class Block(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm_first = norm == "pre"
        self.attention = SelfAttention()
        self.norm1, self.norm2 = torch.nn.LayerNorm(C), torch.nn.LayerNorm(C)
        self.up, self.down = torch.nn.Linear(C, 4 * C), torch.nn.Linear(4 * C, C)

    def feedforward(self, x):
        return self.down(F.relu(self.up(x)))

    def forward(self, x, allowed):
        if self.norm_first:
            x = x + self.attention(self.norm1(x), allowed)
            return x + self.feedforward(self.norm2(x))
        x = self.norm1(x + self.attention(x, allowed))
        return self.norm2(x + self.feedforward(x))


class Model(torch.nn.Module):
    """The language model or, given lengths, the classifier, which averages over each text without its padding."""

    def __init__(self, outputs, norm):
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(V, C), torch.nn.Embedding(T, C)
        self.blocks = torch.nn.ModuleList(Block(norm) for _ in range(DEPTH))
        self.final_norm = torch.nn.LayerNorm(C) if norm == "pre" else torch.nn.Identity()
        self.output = torch.nn.Linear(C, outputs)

    def forward(self, ids, lengths=None):
        t = ids.size(1)
        place = torch.arange(t)
        within = None if lengths is None else place < lengths[:, None]  # (b, t)
        allowed = torch.ones(t, t, dtype=torch.bool).tril() if lengths is None else within[:, None, None, :]
        x = self.tokens(ids) + self.positions(place)
        for block in self.blocks:
            x = block(x, allowed)
        x = self.final_norm(x)
        if lengths is None:
            return self.output(x)
        return self.output((x * within[:, :, None]).sum(dim=1) / lengths[:, None])


def as_in_torch(name):
    """PyTorch's name for one of our parameters, and whether it is transposed there."""
    name = name.removeprefix("body.").replace("feedforward.", "")
    path, leaf = name.rsplit(".", 1)
    return f"{path}.{'bias' if leaf in ('b', 'beta') else 'weight'}", leaf == "w"


def pairs(ours, theirs):
    """Each of our parameters by name, with PyTorch's."""
    their_parameters = dict(theirs.named_parameters())
    assert len(their_parameters) == len(ours.parameters())
    for name, param in ours.named_parameters().items():
        their_name, transposed = as_in_torch(name)
        yield name, param, their_parameters[their_name], transposed


def make(model, norm, precision):
    """Our model and PyTorch's, with our initial weights."""
    if model is LanguageModel:
        ours, theirs = LanguageModel(V, C, H, DEPTH, T, norm=norm, key=Key(1)), Model(V, norm)
    else:
        ours, theirs = Classifier(V, K, C, H, DEPTH, T, norm=norm, key=Key(1)), Model(K, norm)
    ours.to(dtype=precision.dtype)
    theirs.to(getattr(torch, np.dtype(precision.dtype).name))
    for _, param, parameter, transposed in pairs(ours, theirs):
        parameter.data[...] = torch.from_numpy(param.data.T if transposed else param.data)
    return ours, theirs


def make_batch(model, step):
    """The arguments of our `loss`: ids, then targets, or lengths and labels. Tokens repeat."""
    rng = np.random.default_rng(step)
    if model is LanguageModel:
        text = rng.integers(0, V, (B, T + 1))
        return text[:, :-1], text[:, 1:]
    lengths = np.append(rng.integers(1, T, B - 1), T)
    return rng.integers(0, V, (B, T)), lengths, rng.integers(0, K, B)


def loss_of(theirs, batch):
    """PyTorch's loss of one of our batches."""
    ids, *lengths, targets = (torch.from_numpy(np.ascontiguousarray(a)) for a in batch)
    return F.cross_entropy(theirs(ids, *lengths).flatten(0, -2), targets.flatten())


def clip(theirs, max_norm):
    """PyTorch's clipping, but exactly to `max_norm`, without its 1e-6 in the denominator."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters()])
    return torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm * float((norm + 1e-6) / norm)).item()


@BOTH_NORMS
@pytest.mark.parametrize("model", [LanguageModel, Classifier])
def test_loss_and_gradients(model, norm, precision):
    ours, theirs = make(model, norm, precision)
    batch = make_batch(model, 0)
    loss, cache = ours.loss(*batch)
    ours.loss_backward(1.0, cache)
    expected = loss_of(theirs, batch)
    expected.backward()
    precision.agree(loss, expected, "loss")
    for name, param, parameter, transposed in pairs(ours, theirs):
        precision.agree(param.grad.T if transposed else param.grad, parameter.grad, name)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", [LanguageModel, Classifier])
def test_twenty_steps_of_training(model, optimizer, precision, combinations):
    """The same weights, batches and clipping: every loss agrees, and so do the weights at the end."""
    for drawn in combinations(1, norm=["post", "pre"]):
        expect_the_same_training(model, optimizer, drawn["norm"], precision)


def expect_the_same_training(model, optimizer, norm, precision):
    ours, theirs = make(model, norm, precision)
    make_ours, make_theirs = OPTIMIZERS[optimizer]
    our_optimizer, their_optimizer = make_ours(ours.parameters()), make_theirs(theirs.parameters())
    losses, expected, norms, expected_norms = [], [], [], []
    for step in range(20):
        batch = make_batch(model, step % 3)
        our_optimizer.zero_grad()
        loss, cache = ours.loss(*batch)
        ours.loss_backward(1.0, cache)
        norms.append(clip_by_global_norm(ours.flat.grad, MAX_NORM))
        our_optimizer.step()
        losses.append(float(loss))

        their_optimizer.zero_grad()
        loss = loss_of(theirs, batch)
        loss.backward()
        expected_norms.append(clip(theirs, MAX_NORM))
        their_optimizer.step()
        expected.append(loss.item())
    tolerance = 1e-4 if precision.dtype == np.float32 else 1e-9
    np.testing.assert_allclose(losses, expected, rtol=tolerance)
    np.testing.assert_allclose(norms, expected_norms, rtol=100 * tolerance)
    for name, param, parameter, transposed in pairs(ours, theirs):
        expected = parameter.detach().numpy()
        found = param.data.T if transposed else param.data
        np.testing.assert_allclose(found, expected, rtol=0, atol=100 * tolerance * np.abs(expected).max(), err_msg=name)
    assert losses[18] < losses[0]  # on the same batch
    assert max(norms) > MAX_NORM
