"""A training program with a tiny model, for tests that kill it: OUT STEPS [POISON_STEP].

It continues the run in OUT if there is one. At POISON_STEP a weight becomes NaN.
"""

import math
import sys

import numpy as np

from scratchformer import Key
from scratchformer.data import TextBatches
from scratchformer.models import LanguageModel
from scratchformer.optim import Adam, Cosine
from scratchformer.training import Replicas, evaluate_language_model, train
from scratchformer.training.program import run_program


class PoisonedBatches(TextBatches):
    def batch(self, step):
        if step == self.poison_step:
            self.model.output.w.data[0, 0] = math.nan
        return super().batch(step)


def main():
    out, steps, poison_step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else -1
    text = (np.arange(5000) ** 2 // 7 % 61).astype(np.uint8)
    key = Key(0)
    model = LanguageModel(64, 32, 4, 2, 16, key=key.fold("weights"), norm="pre", dropout=0.1)
    batches = PoisonedBatches(text[:4500], 8, 16, key.fold("batches"))
    batches.model, batches.poison_step = model, poison_step
    with Replicas(model, 2, micro_batch=3) as replicas:
        train(
            replicas,
            Adam(model.parameters(), 1e-2),
            Cosine(1e-2, 10, 200),
            batches,
            steps,
            out,
            evaluate=lambda: evaluate_language_model(replicas, text[4500:4600]),
            evaluate_every=10,
            select=("bits_per_byte", "min"),
            snapshot_every=3,
            log_every=1,
            identity={"corpus": "squares"},
            resume=True,
        )
    print("finished")


if __name__ == "__main__":
    run_program(main)
