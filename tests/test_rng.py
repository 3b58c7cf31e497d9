import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchformer.backend import to_cpu
from scratchformer.rng import Key, Zeros, expect_key, fold, random_uint16

GAMMA = 0x9E3779B97F4A7C15  # the golden ratio, as odd 64-bit integer


class Start:
    """Used in place of a Key: the counter starts at `value`."""

    def __init__(self, value):
        self.value = value

    def start(self):
        return np.uint64(self.value % 2**64)


def test_splitmix64_test_vector(device):
    """The published outputs for seed 1234567. They add γ before each output; here the first word is start + 0 γ."""
    bits = to_cpu(random_uint16(Start(1234567 + GAMMA), 12, device.xp))
    assert bits.view(np.uint64).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(st.integers(0, 2**64 - 1))
def test_splitmix64_against_python_integers(start):
    """Figure 16 of Steele et al., with integers of unlimited size."""
    words = []
    for i in range(3):
        z = (start + i * GAMMA) % 2**64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        words.append(z ^ (z >> 31))
    assert random_uint16(Start(start), 12).view(np.uint64).tolist() == words


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 1000])
def test_bits_are_the_same_on_every_backend(size, device):
    bits = random_uint16(Key(3, 4), size, device.xp)
    assert bits.shape == (size,) and bits.dtype == np.uint16
    assert np.array_equal(to_cpu(bits), random_uint16(Key(3, 4), 1000)[:size])


def test_uint16_are_uniform():
    """χ² over 256 bins of the high and of the low byte: mean 255, standard deviation √510."""
    bits = random_uint16(Key(0), 1_000_000)
    for byte in (bits >> 8, bits & 255):
        count = np.bincount(byte, minlength=256)
        chi2 = ((count - bits.size / 256) ** 2).sum() / (bits.size / 256)
        assert abs(chi2 - 255) < 5 * np.sqrt(510)
    assert bits.min() == 0 and bits.max() == 2**16 - 1


def test_keys_of_a_family_all_differ():
    """With words in another order, folded or given at once, strings, and trailing zeros."""
    keys = [Key(), Key(0), Key(0, 0), Key(0, 0, 0), Key(1), Key(1, 0), Key(0, 1), Key(1, 2), Key(2, 1)]
    keys += [Key(0).fold("a"), Key(0).fold("b"), Key(0).fold("a", 0), Key(2**32), Key(2**40 + 1)]
    for make in (lambda k: random_uint16(k, 64).tolist(), lambda k: k.generator().integers(0, 2**16, 64).tolist()):
        streams = [make(key) for key in keys]
        for (i, a), (j, b) in itertools.combinations(enumerate(streams), 2):
            assert a != b, f"{keys[i]} and {keys[j]}"


def test_fold_appends_words():
    assert Key(1).fold(2, 3) == Key(1, 2, 3) == Key(1).fold(2).fold(3)
    assert Key(1).fold("dropout") == Key(1).fold("dropout")
    assert Key(1) != Key(1, 0)
    assert len({Key(1), Key(1), Key(2)}) == 2


def test_fold_does_not_depend_on_the_process():
    """Python's hash of a string does, but the words of a key must not."""
    assert Key(0).fold("dropout").words == (0, 0x9289EFC9)  # CRC-32


def test_the_same_key_gives_the_same_generator():
    a, b = Key(7).generator(), Key(7).generator()
    assert np.array_equal(a.standard_normal(10), b.standard_normal(10))
    assert isinstance(a.bit_generator, np.random.Philox)


def test_words_must_not_be_negative():
    with pytest.raises(ValueError, match=r"seed: expected non-negative integers, got \(1, -2\)"):
        Key(1, -2)


def test_zeros_gives_zeros():
    generator = Zeros().fold("layer", 3).generator()
    for found in generator.standard_normal((2, 3), np.float32), generator.uniform(-1, 1, (2, 3)):
        assert found.shape == (2, 3) and found.dtype == np.float32 and not found.any()


def test_zeros_has_every_draw():
    """A layer of a user's own may draw its weights in another way; a snapshot of it can be loaded too."""
    generator = Zeros().generator()
    assert generator.normal(0, 0.02, (2, 3)).shape == (2, 3)
    assert 0 <= generator.integers(5) < 5 and sorted(generator.permutation(3)) == [0, 1, 2]
    assert not generator.standard_normal(4).any() and not generator.uniform(-1, 1, size=4).any()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (None, "expected non-negative integers, got None"),
        ("1", "expected non-negative integers, got str"),
        (1.0, "expected non-negative integers, got float"),
        (True, "expected non-negative integers, got bool"),
        (-1, r"expected non-negative integers, got \(0, -1\)"),
        (10**5000, r"expected integers below 2\*\*128, got a larger one"),
    ],
    ids=lambda x: str(type(x)),
)
def test_what_is_not_a_seed_is_refused(word, message):
    with pytest.raises((TypeError, ValueError), match=f"^seed: {message}$"):
        Key(0, word)
    assert Key(np.int64(3)) == Key(3)


def test_a_wrong_part_is_named():
    with pytest.raises(TypeError, match=r"^parts: expected non-negative integers, got float$"):
        Key(0).fold(float("nan"))
    with pytest.raises(ValueError, match=r"^parts: expected non-negative integers, got \(1, -2\)$"):
        Key(0).fold(1, -2)


def test_a_key_that_may_be_none():
    expect_key(Key(0))
    expect_key(None, none=True)
    assert fold(None, 1) is None and fold(Key(1), 2, "a") == Key(1).fold(2, "a")
    for wrong, got in (3, "the int 3"), (0.5, "float"):
        for check in lambda x: fold(x, 1), lambda x: expect_key(x, none=True):
            with pytest.raises(TypeError, match=rf"^key: expected a Key, such as Key\(0\) or None, got {got}$"):
                check(wrong)
    for wrong, got in (None, "None"), (True, "bool"):
        with pytest.raises(TypeError, match=rf"^key: expected a Key, such as Key\(0\), got {got}$"):
            expect_key(wrong)
