"""`check_torch` beside `torch.autograd.gradcheck` on PyTorch's own operations, all of which have right gradients.

    python benchmarks/opinfo.py                     # 3 samples of each, in Markdown
    python benchmarks/opinfo.py --every 3           # of every third operation
    python benchmarks/opinfo.py linalg.eigh sort    # of these

The operations and their samples are those of PyTorch's tests (OpInfo), and so is the wrapper that makes the argument of
some of them symmetric. Prints what each checker said of an operation, if it was not satisfied, and how much processor
time both took. An operation is skipped, by name, if it has no gradient, or if PyTorch does not support it in float64.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.autograd.gradcheck import GradcheckError
from torch.testing._internal.common_methods_invocations import op_db

from scratchformer.testing import GradientError, check_torch
from scratchformer.testing.diagnosis import without_diagnosis

LARGEST = 400  # elements of all arguments: gradcheck's time grows with their number times that of the results


def function_of(op: Any, sample: Any) -> Callable:
    """The operation of a sample, as a function of its arguments, whose results all have a gradient if one can."""

    def function(given: Any, args: Any, kwargs: Any) -> Any:
        y = op.gradcheck_wrapper(op.get_op(), given, *args, **kwargs)
        return sample.output_process_fn_grad(y)

    function.__name__ = op.formatted_name
    return function


def leaves(*parts: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(parts) if isinstance(t, torch.Tensor) and t.requires_grad]


def gradcheck(op: Any, function: Callable, parts: tuple) -> None:
    flat, structure = torch.utils._pytree.tree_flatten(parts)
    places = [i for i, t in enumerate(flat) if isinstance(t, torch.Tensor) and t.requires_grad]

    def of_leaves(*tensors: Any) -> Any:
        given = dict(zip(places, tensors, strict=True))
        returned = function(
            *torch.utils._pytree.tree_unflatten([given.get(i, x) for i, x in enumerate(flat)], structure)
        )
        if isinstance(returned, torch.Tensor):
            return returned
        results = torch.utils._pytree.tree_leaves(returned)
        return tuple(t for t in results if isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex()))

    torch.autograd.gradcheck(
        of_leaves, [flat[i] for i in places], nondet_tol=op.gradcheck_nondet_tol, check_batched_grad=False
    )


def samples_of(op: Any, count: int) -> list:
    """Samples from the whole list of them, whose first ones are often single numbers, if their arguments have elements,
    but not too many.
    """

    def fits(sample: Any) -> bool:
        tensors = leaves(sample.input, sample.args, sample.kwargs)
        sizes = [t.numel() for t in tensors]
        return bool(sizes) and min(sizes) > 0 and sum(sizes) <= LARGEST

    samples = [sample for sample in op.sample_inputs("cpu", torch.float64, requires_grad=True) if fits(sample)]
    return [samples[round(i)] for i in np.linspace(0, len(samples) - 1, min(count, len(samples)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--every", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = [op for op in op_db if not options.names or op.formatted_name in options.names][:: options.every]
    skipped, checked, samples = [], 0, 0
    times = {"check_torch": 0.0, "gradcheck": 0.0}
    said: dict[str, dict[str, str]] = {name: {} for name in times}
    wrong = (GradientError, GradcheckError)
    alarms: dict[str, list[str]] = {name: [] for name in times}
    for op in chosen:
        torch.manual_seed(0)
        try:
            supported = op.supports_autograd and op.supports_dtype(torch.float64, "cpu")
            drawn = samples_of(op, options.samples) if supported else []
        except Exception:  # it needs a package or a device that is not here
            drawn = []
        if not drawn:
            skipped.append(op.formatted_name)
            continue
        checked, samples = checked + 1, samples + len(drawn)
        for sample in drawn:
            function, parts = function_of(op, sample), (sample.input, list(sample.args), dict(sample.kwargs))
            checkers = {
                "gradcheck": lambda: gradcheck(op, function, parts),  # noqa: B023
                "check_torch": lambda: check_torch(function, *parts),  # noqa: B023
            }
            for name, check in checkers.items():
                start = time.process_time()
                try:
                    with without_diagnosis():
                        check()
                except Exception as error:
                    if isinstance(error, wrong) and op.formatted_name not in alarms[name]:
                        alarms[name].append(op.formatted_name)
                    said[name].setdefault(
                        op.formatted_name, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                    )
                times[name] += time.process_time() - start
        print(f"{op.formatted_name}", *(said[name].get(op.formatted_name, "") for name in said), sep=" | ", flush=True)
    print(f"\n{checked} operations, {samples} samples; skipped: {', '.join(skipped)}")
    for name, seconds in times.items():
        others = [operation for operation in said[name] if operation not in alarms[name]]
        print(f"{name}: {seconds:.1f} s; wrong gradients: {', '.join(alarms[name])}; other errors: {', '.join(others)}")


if __name__ == "__main__":
    main()
