"""Entropy coding: models that every machine builds alike, coded lengths, and words from
strangers."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from sglang_kvspec.codecs.wire import symbols
from sglang_kvspec.core.errors import CodecError


def normal_symbols(num_channels, per_channel, seed=0):
    """Return (symbols, rms per channel) with widths from all of the ladder."""
    rng = np.random.default_rng(seed)
    widths = rng.uniform(0.2, 30, (num_channels, 1))
    values = rng.normal(size=(num_channels, per_channel)) * widths
    rms = np.sqrt(np.square(values).mean(1)).astype(np.float32)
    return np.clip(np.rint(values), -127, 127).astype(np.int8), rms


@given(
    values=arrays.arrays(
        np.int8, st.tuples(st.integers(0, 9), st.integers(1, 9)), elements=st.integers(-127, 127)
    ),
    seed=st.integers(0, 1000),
)
def test_any_symbols_come_back_under_any_classes(values, seed):
    classes = np.random.default_rng(seed).integers(0, 16, len(values), dtype=np.uint8)
    words = symbols.encode(values, classes)
    assert words.dtype == np.uint32
    np.testing.assert_array_equal(symbols.decode(words, classes, values.shape[1]), values)


def test_the_models_do_not_depend_on_how_erfc_is_computed():
    """Double precision errs by less than 2^-30 of a unit, and no value is that close to a rounding
    boundary."""
    for number in range(symbols.NUM_CLASSES):
        units = symbols.probability_units(number)
        assert len(units) == 2 * symbols.MAX_SYMBOL + 1
        assert min(abs(u % 1 - 0.5) for u in units) > 1e-4
        assert units == units[::-1]
        # The missing probability lies beyond the largest symbol.
        assert 0.99 * symbols.PROBABILITY_UNITS < sum(units) <= symbols.PROBABILITY_UNITS * 1.0001


def test_the_bytes_of_coded_symbols_are_pinned():
    """Records of one release are read by another. A change of these bytes must raise VERSION."""
    steps = np.arange(16 * 40, dtype=np.int64).reshape(16, 40)
    values = ((steps * steps * 31 + steps * 7) % 23 - 11).astype(np.int8)
    words = symbols.encode(values, np.arange(16, dtype=np.uint8))
    assert (words.size, xxhash.xxh3_64_hexdigest(words.astype("<u4").tobytes())) == PINNED


PINNED = (212, "9e890ba8e308a35d")


def test_nearest_classes_are_those_of_the_ladder():
    ladder = [symbols.class_width(n) for n in range(symbols.NUM_CLASSES)]
    assert ladder[:3] == pytest.approx([0.25, 0.25 * 2**0.5, 0.5])
    rms = np.array([0, 1e-30, *np.array(ladder) * 1.18, 1e9], np.float32)
    assert symbols.nearest_classes(rms).tolist() == [0, 0, *range(16), 15]


def test_coded_length_is_close_to_the_entropy():
    values, rms = normal_symbols(400, 58)
    classes = symbols.nearest_classes(rms)
    # Entropy of a normal distribution with these widths, in bits, where bins are narrow.
    wide = rms > 1.5
    ideal = (np.log2(rms[wide] * np.sqrt(2 * np.pi * np.e)) * 58).sum()
    words = symbols.encode(values[wide], classes[wide])
    assert 0.98 * ideal < words.size * 32 < 1.01 * ideal


def test_words_of_other_symbols_are_refused():
    values, rms = normal_symbols(20, 30)
    classes = symbols.nearest_classes(rms)
    words = symbols.encode(values, classes)
    np.testing.assert_array_equal(symbols.decode(words, classes, 30), values)
    for changed, per_channel in (
        (words[:-1], 30),
        (words[1:], 30),
        (np.append(words, np.uint32(7)), 30),
        (words, 29),
    ):
        with pytest.raises(CodecError, match="words do not hold"):
            symbols.decode(changed, classes, per_channel)
    with pytest.raises(CodecError, match="must not end in a word of zero"):
        symbols.decode(np.append(words, np.uint32(0)), classes, 30)
