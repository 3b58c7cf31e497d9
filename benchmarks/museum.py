"""The exhibits of the museum before four checkers: what each finds, and in what time. Prints Markdown.

    OMP_NUM_THREADS=1 python benchmarks/museum.py [--seeds N]

`check_drawn` draws its arrays itself. The others, `torch.autograd.gradcheck`, its fast mode and
`jax.test_util.check_grads` in reverse mode, get normal numbers with sizes that all differ, as one would give them; so
does `check_gradients`, to show what the draws add. All have their default settings. The right gradients of all exhibits
are checked too, with N seeds (default: 10), and timed: the mean. Needs PyTorch and JAX.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable

import jax
import numpy as np
import torch
from checkers import checked_pair, jax_checker, line, torch_checker

from scratchformer.museum.exhibits import GROUPS, NAMES, Exhibit, exhibit
from scratchformer.testing import GradientError, check_drawn, check_gradients
from scratchformer.testing.diagnosis import without_diagnosis
from scratchformer.testing.draw import Sizes
from scratchformer.testing.drawn import arguments

Check = Callable[[Exhibit, Callable, int], object]


def on_normal_numbers(check: Callable) -> Check:
    def checked(shown: Exhibit, backward: Callable, seed: int) -> None:
        check(checked_pair(shown.forward, backward, arguments(shown.arguments, Sizes(seed))))

    return checked


CHECKERS: dict[str, Check] = {
    "check_drawn": lambda shown, backward, seed: check_drawn(shown.forward, backward, *shown.arguments, seed=seed),
    "check_gradients": on_normal_numbers(lambda pair: check_gradients(pair.op, pair.op_backward, *pair.args)),
    "gradcheck": on_normal_numbers(torch_checker()),
    "gradcheck, fast": on_normal_numbers(torch_checker(fast_mode=True)),
    "check_grads": on_normal_numbers(jax_checker()),
}


def refuses(checker: str, shown: Exhibit, backward: Callable, seed: int, seconds: list[float]) -> bool:
    start = time.process_time()
    try:
        with np.errstate(all="ignore"):
            CHECKERS[checker](shown, backward, seed)
    except Exception as error:
        if checker.startswith("check_drawn") and not isinstance(error, GradientError):
            raise
        return True
    finally:
        seconds.append(time.process_time() - start)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="of the right gradients (default: 10)")
    seeds = parser.parse_args().seeds
    jax.config.update("jax_enable_x64", True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("jax").setLevel(logging.CRITICAL)  # a callback that fails is an answer
    seconds: dict[str, list[float]] = defaultdict(list)
    found, refused = dict.fromkeys(CHECKERS, 0), dict.fromkeys(CHECKERS, 0)
    for checker in CHECKERS:  # the first check of each takes longer
        refuses(checker, exhibit(NAMES[0]), exhibit(NAMES[0]).right, 0, [])
    print(line(["exhibit", *CHECKERS]), line(["---"] * (1 + len(CHECKERS))), sep="\n")
    with without_diagnosis():
        for group, names in GROUPS.items():
            print(line([f"**{group}**", *[""] * len(CHECKERS)]))
            for name in names:
                shown = exhibit(name)
                results = {c: refuses(c, shown, shown.wrong, 0, []) for c in CHECKERS}
                for checker, result in results.items():
                    found[checker] += result
                print(line([shown.title, *("✓" if result else "–" for result in results.values())]), flush=True)
        print(line([f"**found, of {len(NAMES)}**", *(f"**{found[c]}**" for c in CHECKERS)]))
        for shown in map(exhibit, NAMES):
            for checker in CHECKERS:
                refused[checker] += sum(
                    refuses(checker, shown, shown.right, seed, seconds[checker]) for seed in range(seeds)
                )
    print(line(["ms of CPU for a right gradient", *(f"{1000 * statistics.mean(seconds[c]):.1f}" for c in CHECKERS)]))
    print(line([f"right gradients refused, of {seeds * len(NAMES)}", *(refused[c] for c in CHECKERS)]))


if __name__ == "__main__":
    main()
