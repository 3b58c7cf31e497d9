"""Record the activations that `check_drawn` draws from: logits of a small model after a short training run.

    python benchmarks/record_activations.py

A language model of two blocks learns the bytes of README.md for 200 steps (about ten seconds). Its logits at 32
positions, for the 32 bytes from 96 on, which are mostly small letters, are written to
scratchformer/testing/activations.npy.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import scratchformer as sf

ROOT = Path(__file__).parents[1]


def record() -> np.ndarray:
    """(T, V): the logits, float16."""
    model = sf.models.LanguageModel(vocab_size=256, d_model=32, heads=4, depth=2, context=32)
    adam = sf.optim.Adam(model.parameters(), lr=1e-2)
    text = np.frombuffer((ROOT / "README.md").read_bytes(), np.uint8)
    rng = np.random.default_rng(0)
    for _ in range(200):
        batch = np.stack([text[start : start + 33] for start in rng.integers(0, len(text) - 33, 8)])
        _, cache = model.loss(batch[:, :-1], batch[:, 1:])
        model.zero_grad()
        model.loss_backward(1.0, cache)
        sf.optim.clip_by_global_norm(model.flat.grad, 1.0)
        adam.step()
    logits, _ = model.forward(text[None, :32])
    return np.asarray(logits[0, :, 96:128], np.float16)


if __name__ == "__main__":
    activations = record()
    np.save(ROOT / "scratchformer" / "testing" / "activations.npy", activations)
    print(f"largest {np.abs(activations).max():.3g}, standard deviation {activations.std():.3g}")
