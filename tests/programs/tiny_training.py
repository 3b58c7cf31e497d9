"""A training program with a tiny model, for tests that kill it: OUT STEPS [POISON_STEP].

It continues the run in OUT if there is one. At POISON_STEP a weight becomes NaN. TINY_EVENT, a variable, says what else
happens to this process, and at the beginning of which step, so that no test has to be in time for it: "10 stop" stops
it, until it is continued; "10 kill 0.5" kills it after half of the processor time of a step; "10 write 20000" kills it
as soon as it writes more than 20,000 bytes to a file.
"""

import math
import os
import resource
import signal
import sys
import time

import numpy as np

from scratchformer import Key
from scratchformer.data import TextBatches
from scratchformer.models import LanguageModel
from scratchformer.optim import Adam, Cosine
from scratchformer.shell.process import run_program
from scratchformer.training import Replicas, Run, evaluate_language_model


class EventfulBatches(TextBatches):
    event_step, event, amount, begun = -1, "", 0.0, 0.0

    def batch(self, step):
        if step == self.poison_step:
            self.model.output.w.data[0, 0] = math.nan
        if step == self.event_step:
            self.happen()
        self.begun = time.process_time()
        return super().batch(step)

    def happen(self):
        if self.event == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.event == "kill":
            signal.setitimer(signal.ITIMER_PROF, max(1e-6, self.amount * (time.process_time() - self.begun)))
        elif self.event == "write":
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the signal when a file becomes larger than allowed
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(self.amount), int(self.amount)))


def main():
    out, steps, poison_step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else -1
    text = (np.arange(5000) ** 2 // 7 % 61).astype(np.uint8)
    key = Key(0)
    model = LanguageModel(64, 32, 4, 2, 16, key=key.fold("weights"), norm="pre", dropout=0.1)
    batches = EventfulBatches(text[:4500], 8, 16, key.fold("batches"))
    batches.model, batches.poison_step = model, poison_step
    if event := os.environ.get("TINY_EVENT"):
        step, batches.event, *amount = event.split()
        batches.event_step, batches.amount = int(step), float(*amount)
    run, rate = Run(out, steps, resume=True, identity={"corpus": "squares"}), Cosine(1e-2, 10, 200)
    with Replicas(model, 2, micro_batch=3) as replicas:
        adam, select = Adam(model.parameters(), 1e-2), ("bits_per_byte", "min")
        for step in run.steps(replicas, adam, batches, select, snapshot_every=3, log_every=1):
            loss = replicas.gradients(batches.batch(step), run.key("train", step))
            norm = replicas.clip(adam, 1.0)
            adam.lr = rate(step)
            replicas.step(adam)
            run.log(loss=loss, norm=norm)
            if run.due(10):
                run.keep_best(evaluate_language_model(replicas, text[4500:4600]))
    print("finished")


if __name__ == "__main__":
    run_program(main)
