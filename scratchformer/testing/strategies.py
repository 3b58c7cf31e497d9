"""Hypothesis strategies that draw matching shapes, arrays, token ids and lengths.

A shape is a string of letters, one for each axis, as in the docstrings of `scratchformer.ops`. A letter has the same
size in all shapes of one call, and a number stands for itself. The contents come from a drawn seed, so an example
shrinks in its sizes, scale and seed, which are printed for a failing example.

    from hypothesis import given
    from scratchformer.testing import check_gradients
    from scratchformer.testing.strategies import arrays, ids, sizes, tensors

    @given(tensors("B T C", "C F", "F"))
    def test_my_linear(xs):
        check_gradients(my_linear, my_linear_backward, *xs)

    @given(st.data())
    def test_my_embedding(data):
        size = data.draw(sizes("B T V C"))
        table = data.draw(arrays("V C", fixed=size))
        tokens = data.draw(ids("B T", high=size["V"], fixed=size))
        check_gradients(my_embedding, my_embedding_backward, tokens, table)

This is the only module of the package that imports Hypothesis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import note
from hypothesis import strategies as st

from ..rng import Key
from .draw import some_exact

SCALES = (1e-3, 1e-1, 1.0, 1e2)

_SEEDS = st.integers(0, 2**32 - 1)


def sizes(letters: str, min_size: int = 2, max_size: int = 5) -> st.SearchStrategy[dict[str, int]]:
    """A size between `min_size` and `max_size` for every letter of `letters`, such as "B T C"; numbers are skipped."""
    names = dict.fromkeys(word for word in letters.split() if not word.isdecimal())
    return st.fixed_dictionaries({name: st.integers(min_size, max_size) for name in names})


@st.composite
def tensors(
    draw: st.DrawFn,
    *shapes: str,
    scales: Sequence[float] = SCALES,
    min_size: int = 2,
    max_size: int = 5,
    dtype: Any = np.float64,
    fixed: Mapping[str, int] | None = None,
) -> tuple[np.ndarray, ...]:
    """One array for each of `shapes`: standard normal, times a scale drawn from `scales` for each array.

    In half of the examples some elements, but never the first of an array, are whole multiples of the scale (0 among
    them), and others repeat an element: there kinks, thresholds and ties are met exactly.

    `tensors("B H T D", "B H S D", "B H S D")` draws query, key and value. Letters in `fixed` have the given sizes, the
    others are drawn between `min_size` and `max_size`.
    """
    size = _with_fixed(draw, " ".join(shapes), fixed, min_size, max_size)
    factors = [draw(st.sampled_from(tuple(scales))) for _ in shapes]
    seed, exact = draw(_SEEDS), draw(st.booleans())
    chosen = f"sizes {size}, scales {factors}, seed {seed}" + ", with whole numbers and repeats" * exact
    note(f"tensors({', '.join(map(repr, shapes))}): {chosen}")
    rng = Key(seed).generator()
    drawn = [rng.standard_normal(_shape(shape, size)) for shape in shapes]
    drawn = [some_exact(x, rng) for x in drawn] if exact else drawn
    return tuple(np.asarray(x * factor, dtype) for x, factor in zip(drawn, factors, strict=True))


def arrays(shape: str, **options: Any) -> st.SearchStrategy[np.ndarray]:
    """One array: `tensors` with a single shape and the same options."""
    return tensors(shape, **options).map(lambda drawn: drawn[0])


@st.composite
def ids(draw: st.DrawFn, shape: str, high: int, fixed: Mapping[str, int] | None = None) -> np.ndarray:
    """An array of integers, uniform in 0 ... high − 1: token ids, or targets. With a small `high` they repeat."""
    size = _with_fixed(draw, shape, fixed)
    seed = draw(_SEEDS)
    note(f"ids({shape!r}): sizes {size}, below {high}, seed {seed}")
    return Key(seed).generator().integers(high, size=_shape(shape, size))


@st.composite
def lengths(
    draw: st.DrawFn,
    batch: str = "B",
    longest: str = "T",
    min_length: int = 1,
    fixed: Mapping[str, int] | None = None,
) -> np.ndarray:
    """The true length of each sequence: integers (B,), each from `min_length` to the size of `longest`.

    Pass the sizes of the sequences in `fixed`. `batch` and `longest` may be numbers: `lengths("4", "10")`.
    """
    size = _with_fixed(draw, f"{batch} {longest}", fixed)
    count, maximum = _shape(f"{batch} {longest}", size)
    return np.array(draw(st.lists(st.integers(min_length, maximum), min_size=count, max_size=count)), np.int64)


def _with_fixed(
    draw: st.DrawFn, letters: str, fixed: Mapping[str, int] | None, min_size: int = 2, max_size: int = 5
) -> dict[str, int]:
    """Sizes for `letters`: those in `fixed`, and random ones for the rest."""
    fixed = fixed or {}
    free = " ".join(word for word in letters.split() if word not in fixed)
    return {**fixed, **draw(sizes(free, min_size, max_size))}


def _shape(shape: str, size: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(int(word) if word.isdecimal() else size[word] for word in shape.split())
