"""Misuse of the library: public functions are called with valid arguments, of which one or two are made wrong."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from area import Area, Case
from calls import PARAMS, Call, calls

import scratchformer as sf
from scratchformer.nn import Layer
from scratchformer.ops import Pattern
from scratchformer.rng import Key
from scratchformer.testing.contracts import is_array, is_floating

SEEDS = 3  # sets of array sizes


class Wrong(NamedTuple):
    """A value in place of a valid one. certain: whether it must be refused; otherwise it may also be accepted."""

    what: str
    value: Any
    certain: bool = True
    shape: bool = False  # whether only the shape is wrong, so that a change to another argument may make it valid
    same: bool = False  # whether the result must be that of the valid value, if it is accepted


class Library(Area):
    name = "library"

    def prepare(self, folder: Path) -> None:
        warnings.simplefilter("ignore")
        self.calls = [calls(seed) for seed in range(SEEDS)]
        self.names = list(self.calls[0])

    def case(self, draw: random.Random, folder: Path) -> Case:
        call = draw.choice(self.calls)[draw.choice(self.names)]()
        if draw.random() < 0.05:
            return Case(f"{call.name}, all arguments right", lambda: call.function(**call.arguments), expect="accepted")
        names = draw.sample(list(call.arguments), min(len(call.arguments), draw.choice((1, 1, 1, 2))))
        wrong = {name: draw.choice(list(wrong_values(call, name, draw))) for name in names}
        arguments = call.arguments | {name: w.value for name, w in wrong.items()}
        what = ", ".join(f"{name}={w.what}" for name, w in wrong.items())
        certain = any(w.certain and (len(wrong) == 1 or not w.shape) for w in wrong.values())
        same = all(w.same for w in wrong.values())
        right = call.function(**call.arguments) if same else None
        return Case(
            f"{call.name}: {what}",
            lambda: call.function(**arguments),
            "refused" if certain else "either",
            check=(lambda found: differs(found, right)) if same else None,
            names=accepted_names(call, wrong),
        )


# Other names of an argument: those of a parameter, of several arguments together, or of an element.
ALSO = {
    ("Key", "word"): ("seed",),
    ("Param", "data"): ("w",),
    ("Group", "match"): ("groups",),
    ("Vocabulary.build", "texts"): ("text",),
}


def accepted_names(call: Call, wrong: dict[str, Wrong]) -> tuple[str, ...]:
    """The names of which the message must contain one; empty if two arguments are wrong, or if the wrong one has no
    name. If an array has another shape, the message may name any argument that it must fit.
    """
    if len(wrong) > 1:
        return ()
    ((name, one),) = wrong.items()
    if name.isdecimal():
        return ()
    right = call.arguments[name]
    if is_array(one.value) and is_array(right) and one.value.shape != right.shape:
        return (*call.arguments, "lengths")  # lengths may be part of a pattern
    return (name, *ALSO.get((call.name, name), ()))


def differs(found: Any, right: Any) -> str | None:
    """What is wrong with a result that should equal that of the valid arguments, up to rounding; None if it does."""
    found, right = [*arrays(found)], [*arrays(right)]
    if [x.shape for x in found] != [x.shape for x in right]:
        return "results of other shapes"
    if any(type(x) is not np.ndarray and x.ndim for x in found):
        return f"a result of type {next(type(x).__name__ for x in found if type(x) is not np.ndarray)}"
    close = all(np.allclose(x, y, rtol=0.02, atol=0.02, equal_nan=True) for x, y in zip(found, right, strict=True))
    return None if close else "other results"


def arrays(x: Any) -> Iterator[np.ndarray]:
    """The arrays in a result: the output of an operation or layer without its cache, or the gradients."""
    if isinstance(x, tuple) and len(x) == 2 and not is_array(x[1]):
        x = x[0]
    for array in x if isinstance(x, tuple | list) else [x]:
        if is_array(array) and is_floating(array):
            yield array


def wrong_values(call: Call, name: str, draw: random.Random) -> Iterator[Wrong]:
    """Values to put in place of an argument; they depend on the type of the valid one."""
    right = call.arguments[name]
    if is_array(right):
        yield from wrong_arrays(call, name, right, draw)
    elif isinstance(right, bool):
        yield from (Wrong(repr(x), x) for x in (0, 1, "no", None, 0.5, [], np.array([True, False]), float("nan")))
    elif isinstance(right, int):
        yield from wrong_integers(name)
    elif isinstance(right, float):
        yield from wrong_numbers(name)
    elif isinstance(right, str):
        certain = name not in FREE_TEXT
        yield from (Wrong(repr(x), x, certain) for x in ("unknown", "", "a\0b", "é" * 1000))
        yield from (Wrong(repr(x), x) for x in ([], {}, float("nan"), ("a", "b"), 1.5, np.array(["pre"])))
        yield Wrong("3", 3, certain=name != "part")
        yield Wrong("bytes", b"pre", certain=name != "prompt")
    elif isinstance(right, Key):
        yield from (Wrong(repr(x), x) for x in (0, -1, 1.5, "key", (1, 2), [3], True, np.random.default_rng(0), Key))
        yield Wrong("None", None, certain=name not in MAY_BE_NONE or "..." in call.name)
    elif isinstance(right, Pattern):
        yield from (Wrong(repr(x), x) for x in ("causal", True, 3, [sf.ops.Causal()], sf.ops.Causal, np.eye(3) > 0))
    elif isinstance(right, Layer):
        yield from (Wrong(repr(x), x) for x in ("Linear", 3, [], sf.nn.Linear, np.ones(3), {}, Layer.__call__))
        yield Wrong("None", None, certain=name not in MAY_BE_NONE)
    elif isinstance(right, tuple) and name not in ("betas", "select", "dy", "dlogits", "whole", "shape"):
        yield from wrong_caches(right, none=call.name.startswith("nn.Dropout"))
    else:
        certain = right is not None and right is not PARAMS and name != "part"
        yield from (Wrong(repr(x), x, certain) for x in (3, 1.5, True, Layer))
        yield from (Wrong(repr(x), x, False) for x in ([], "text", b"bytes", {}, (), [None], [3, "a"], [[1]]))
        yield Wrong("None", None, False)


FREE_TEXT = {"prompt", "text", "name", "part", "match"}
MAY_BE_NONE = {
    "key", "norm", "positions", "final_norm", "dropout", "top_k", "top_p", "allowed", "count", "micro_batch",
    "micro_batches", "clip", "stride", "batch_size", "max_elements", "pattern", "memory", "lengths", "ignore_index",
    "kv_heads", "head_width", "window", "d_ff", "b", "device", "dtype", "d_head", "max_length", "lr", "weight_decay",
    "segments", "first", "second", "length", "seed", "directions", "alpha", "queries",
}  # fmt: skip
HUGE = {"d_model", "vocab_size", "depth", "d_ff", "d_in", "d_out", "num_classes", "beam", "batch_size", "heads"}
ANY_INTEGER = {"ignore_index"}


def wrong_integers(name: str) -> Iterator[Wrong]:
    yield from (
        Wrong(repr(x), x) for x in ("8", b"8", [8], (8,), {}, 2.5, float("nan"), float("inf"), 1j, Key, Decimal("8.5"))
    )
    yield from (Wrong(repr(x), x) for x in (np.array([8]), np.array("8"), True, 8.0, np.float32(8)))
    yield Wrong("None", None, certain=name not in MAY_BE_NONE)
    yield Wrong("-1", -1, certain=name not in ANY_INTEGER)
    yield Wrong("-10**30", -(10**30), certain=name not in ANY_INTEGER)
    yield Wrong("0", 0, certain=name in HUGE)
    for what in ("2**31", "2**40", "2**63", "10**30", "10**400", "10**5000"):
        yield Wrong(what, eval(what), certain=name in HUGE and what != "2**31")
    yield Wrong("np.int8(3)", np.int8(3), certain=False)


def wrong_numbers(name: str) -> Iterator[Wrong]:
    anything = name == "dloss"  # which may be any number, as a gradient may
    nan, infinity = float("nan"), float("inf")
    yield from (Wrong(repr(x), x) for x in ("0.1", b"0.1", [0.1], (0.1,), {}, 1j, Key, True))
    yield from (Wrong(repr(x), x) for x in (np.array([0.1]), np.array("0.1"), np.array([0.1, 0.2])))
    yield from (Wrong(repr(x), x, not anything) for x in (nan, np.float32(nan), -infinity, -1, -1e-9))
    yield Wrong("None", None, certain=name not in MAY_BE_NONE)
    yield Wrong("inf", infinity, certain=name not in {"clip", "max_norm", "dloss"})
    yield from (Wrong(what, x, False) for what, x in (("10**400", 10**400), ("1e300", 1e300), ("0.1", Decimal("0.1"))))


def wrong_caches(right: tuple, none: bool) -> Iterator[Wrong]:
    y, other = sf.ops.swiglu(np.ones(3), np.ones(3))
    yield Wrong("None", None, certain=not none)
    yield from (Wrong(repr(x), x) for x in ((), 3, "cache", [None], {}, object, y, Key(0)))
    if type(right) is not type(other):
        yield Wrong("the cache of swiglu", other)
    yield Wrong("the cache as a list", list(right))
    yield Wrong("the cache in a tuple", (right,))


def wrong_arrays(call: Call, name: str, x: np.ndarray, draw: random.Random) -> Iterator[Wrong]:
    none = name in MAY_BE_NONE or name in ("1", "2")  # BERT's lengths and segments
    yield Wrong("None", None, certain=not none)
    yield from (Wrong(repr(w), w) for w in ("text", b"bytes", 1j, {}, object, Key(0)))
    yield Wrong("a number", 3.5, certain=not (is_floating(x) and not x.ndim))
    yield Wrong("a generator", (i for i in range(3)))
    numbers = call.name != "to_device"  # which moves any array
    known = call.name.startswith(("ops.", "nn.")) or name in ("grad", "data")
    yield Wrong("a list", x.tolist(), certain=known and x.ndim > 0)
    yield Wrong("a ragged list", [[1.0, 2.0], [3.0]])
    yield Wrong("an array of objects", x.astype(object), certain=known)
    yield Wrong("an array of text", x.astype("U5"), numbers)
    yield Wrong("an array of None", np.full(x.shape, None), numbers)
    yield Wrong("an array of dates", np.zeros(x.shape, "M8[s]"), numbers)
    yield Wrong("a structured array", np.zeros(x.shape, [("a", "f4")]), numbers)
    yield Wrong("a NumPy matrix", np.asmatrix(np.ones((2, 2))), certain=False)
    cache = "backward" in call.name and not name.startswith("d")
    yield Wrong("a masked array", np.ma.masked_array(x, mask=np.ones(x.shape, bool)), known and not cache)
    yield Wrong("read-only", read_only(x), certain=name in ("grad",), same=name != "grad")
    yield Wrong("in Fortran's order", np.asfortranarray(x), certain=False, same=True)
    yield Wrong("in another byte order", x.astype(x.dtype.newbyteorder()), certain=False, same=name != "ids")
    yield Wrong("0-d", np.array(1, x.dtype), certain=x.ndim > 0 and not elementwise(call))
    yield Wrong("empty", x[:0] if x.ndim else x, certain=False)
    yield Wrong("with no columns", x[..., :0] if x.ndim else x, certain=False)
    yield Wrong("with one more axis", x[None], certain=False)
    if is_floating(x):
        yield Wrong("integers", x.astype(np.int64), certain=known)
        yield Wrong("booleans", x > 0, certain=known)
        if name != "b":  # NumPy itself refuses to add a complex bias to a real product
            yield Wrong("complex", x.astype(complex), certain=False)
        yield Wrong("float16", x.astype(np.float16), certain=False)
        yield Wrong("NaN", np.full_like(x, np.nan), certain=False)
        yield Wrong("infinity", np.full_like(x, np.inf), certain=False)
    else:
        yield Wrong("floats", x.astype(float), certain=name != "allowed" and known)
        yield Wrong("booleans", x > 0, certain=known and x.dtype != bool)
        if x.dtype != bool:
            yield Wrong("negative", x.astype(np.int64) - 1000, certain=known and name != "data")
            too_large = known and name not in ("lengths", "data")
            yield Wrong("large", x.astype(np.int64) + 2**40, too_large)
            yield Wrong("large, unsigned", np.full(x.shape, 2**64 - 1, np.uint64), too_large)
    for axis, letter in enumerate(call.letters.get(name, ())):
        others = [of for other, of in call.letters.items() if other != name]
        certain = letter == "fixed" or (letter != "" and any(letter in of for of in others))
        if "attention" in call.name and letter in "TSH":  # T = S only by chance, and heads may share keys
            certain = False
        yield Wrong(f"of size 1 along axis {axis}", x.take([0], axis), certain and x.shape[axis] > 1, True)
        yield Wrong(f"larger along axis {axis}", np.concatenate([x, x], axis), certain, True)


def read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


def elementwise(call: Call) -> bool:
    return not call.letters or len(call.letters) == 1
