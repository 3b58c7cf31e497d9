"""Time a training step at a context of 4,096 bytes: factorised attention against full attention.

    python benchmarks/sparse.py [--context 4096 --rounds 5]

The models have the sizes of `examples/sparse.py` and take turns. A step is forward, backward, clipping and Adam on all
cores, in float32. Full attention is the same model without its pattern, so nothing else differs. The full model of
context 256 reads as many bytes a step. Prints medians, and their ratios to the strided model's.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

from setups import our_step

from scratchformer import Key
from scratchformer.data import TextBatches
from scratchformer.models import LanguageModel, SparseTransformer
from scratchformer.training import Replicas

SIZES = dict(d_model=128, heads=4, depth=4)
ROWS, SHORT = 2, 256  # rows of a batch; the context of the short model


class FullTransformer(SparseTransformer):
    """The sparse transformer without its pattern."""

    pattern = property(lambda self: None, lambda self, _: None)


def competitors(context: int) -> dict[str, tuple[LanguageModel, int, int]]:
    """Each competitor's model, rows of a batch, and context."""
    stride = math.isqrt(context)
    sizes = dict(SIZES, context=context, stride=stride, key=Key(0))
    return {
        "strided": (SparseTransformer(256, **sizes), ROWS, context),
        "fixed, width 4": (SparseTransformer(256, kind="fixed", width=4, **sizes), ROWS, context),
        "strided, merged": (SparseTransformer(256, merged=True, **sizes), ROWS, context),
        "full (causal)": (FullTransformer(256, **sizes), ROWS, context),
        f"full, context {SHORT}": (
            LanguageModel(256, norm="pre", activation="gelu", context=SHORT, key=Key(0), **SIZES),
            ROWS * context // SHORT,
            SHORT,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each")
    args = parser.parse_args()
    data = Key(1).generator().integers(0, 256, 1_000_000, dtype="uint8")
    steps: dict[str, tuple[Replicas, Callable, TextBatches]] = {}
    for name, (model, rows, context) in competitors(args.context).items():
        replicas = Replicas(model)
        steps[name] = (replicas, our_step(model, replicas), TextBatches(data, rows, context, Key(2)))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(args.rounds + 1):
        for name, (replicas, step, batches) in steps.items():
            batch = batches.batch(number)
            with replicas:
                start = time.perf_counter()
                step(batch)
                if number:  # the first one warms up
                    times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(t) for name, t in times.items()}
    print(
        f"{ROWS} rows of {args.context:,} bytes a step, or as many bytes in rows of {SHORT}; median of {args.rounds}:"
    )
    for name, seconds in medians.items():
        ratio = seconds / medians["strided"]
        print(f"{name:<20}{seconds:>8.3f} s{ROWS * args.context / seconds:>10,.0f} bytes/s{ratio:>8.2f} x strided")


if __name__ == "__main__":
    main()
