"""The exhibits by group, and what the check says of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module, reload
from inspect import getdoc
from typing import Any, NamedTuple

from ..testing import GradientError, check_drawn
from ..testing.drawn import KINDS

GROUPS: dict[str, tuple[str, ...]] = {
    "Attention": (
        "keys_transposed_twice",
        "attention_dq",
        "outliers_of_activations",
        "always_causal",
        "mask_forgotten",
        "window_never_true",
        "value_columns",
        "width_of_values",
        "stale_tail_of_dq",
        "head_index",
        "group_not_summed",
        "local_chunk",
        "detached_probabilities",
        "dy_not_passed",
    ),
    "Norms": (
        "rmsnorm_without_backward",
        "rmsnorm_weight",
        "rmsnorm_gamma_forgotten",
        "variance_for_its_root",
        "residual_inside_the_norm",
        "residual_gradient_dropped",
        "layernorm_of_two_axes",
        "layernorm_gamma_never",
        "norm_cuts_the_graph",
    ),
    "Losses": (
        "cross_entropy_unreduced",
        "fused_loss_weight",
        "common_offset",
        "micro_batches_of_tokens",
        "steps_not_divided",
    ),
    "Softmax and maximum": (
        "logsumexp_of_some",
        "softmax_of_some",
        "log_softmax_by_exponentials",
        "every_tie_takes_all",
        "larger_of_two",
    ),
    "Shapes and places": (
        "bias_of_the_wrong_shape",
        "bias_dropped",
        "one_gradient_too_few",
        "gradient_in_memory_order",
        "packed_without_offset",
        "short_chunk",
    ),
    "What is remembered": (
        "half_written_dy",
        "workspace_reused",
        "gradients_of_the_first_step",
        "accumulators_not_zeroed",
        "second_backward",
        "another_dropout_mask",
        "checkpoint_without_seed",
        "mask_of_groups",
    ),
    "Second derivatives and checkers": (
        "saved_intermediate",
        "part_of_the_dependence",
        "checker_without_restoring",
    ),
}
NAMES = tuple(name for names in GROUPS.values() for name in names)


class Exhibit(NamedTuple):
    """A gradient that was wrong, from `NAME.py`.

    source: the project and the number of the public report. operation: the operation of `ops` whose page derives the
    gradient, or "". arguments: those of `check_drawn`. named: a pattern for what the check must say of the mistake.
    planted: an equation of the operation's derivation, and what the mistake makes of it; empty where it is not a line.
    """

    name: str
    story: str
    source: str
    operation: str
    arguments: tuple
    named: str
    planted: tuple[str, ...]
    forward: Callable
    wrong: Callable
    right: Callable

    @property
    def title(self) -> str:
        return self.story.partition("\n")[0]


class Verdict(NamedTuple):
    """What the check said: the message, "" if nothing was found; in a few words; and the seconds of CPU it took."""

    message: str
    words: str
    seconds: float


def exhibit(name: str) -> Exhibit:
    """The exhibit of this name, made anew, since some remember what they computed before. Raises ValueError for an
    unknown one.
    """
    if name not in NAMES:
        near = get_close_matches(name, NAMES)
        known = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(NAMES)}"
        raise ValueError(f"unknown exhibit {name!r}; {known}")
    module: Any = reload(import_module(f".{name}", __package__))
    return Exhibit(
        name,
        getdoc(module) or "",
        module.SOURCE,
        getattr(module, "OPERATION", ""),
        module.ARGUMENTS,
        module.NAMED,
        getattr(module, "PLANTED", ()),
        module.forward,
        module.wrong,
        module.right,
    )


def check(shown: Exhibit, seed: int = 0) -> Verdict:
    """What `check_drawn` says of the wrong backward."""
    start = time.process_time()
    try:
        check_drawn(shown.forward, shown.wrong, *shown.arguments, seed=seed)
        message, words = "", ""
    except GradientError as error:
        message, words = str(error), in_words(error)
    return Verdict(message, words, time.process_time() - start)


def in_words(error: GradientError) -> str:
    """The diagnosis of an error, if it says more than the first line of its message; otherwise this line."""
    if error.diagnoses and error.diagnoses[0].name != "numbers matter":
        return error.diagnoses[0].what
    first = str(error).partition("\n")[0].removesuffix(":")
    return first.removeprefix(f"for {next(iter(KINDS))}: ").replace("forward: ", "", 1)
