"""Entropy coding of small integers: asymmetric numeral systems with a model for every channel.

The models are discretised normal distributions around 0, with NUM_CLASSES widths. The class of a
channel is the number of its model. Coder and decoder must have identical models on any machine. So
models are tables of integers: probabilities in units of 2^-20, each at least one unit. Computed
values are at least a thousandth of a unit from where their rounding would change. So no
implementation of erfc can make another table.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import constriction
import numpy as np
import numpy.typing as npt

from sglang_kvspec.core.errors import CodecError

MAX_SYMBOL = 127
NUM_CLASSES = 16
# Widths, as standard deviations: 1/4, and by sqrt(2) up to 45.
FIRST_WIDTH = 0.25
PROBABILITY_UNITS = 1 << 20

Symbols = npt.NDArray[np.int8]
Classes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]


def class_width(number: int) -> float:
    return FIRST_WIDTH * math.sqrt(2) ** number


def nearest_classes(rms: npt.NDArray[np.float32]) -> Classes:
    """Return the class of the nearest width, as a ratio, for each channel. rms: root mean square of
    each channel's symbols before they were rounded to integers."""
    steps = 2 * np.log2(np.maximum(rms, FIRST_WIDTH) / FIRST_WIDTH)
    classes: Classes = np.minimum(np.rint(steps), NUM_CLASSES - 1).astype(np.uint8)
    return classes


def encode(symbols: Symbols, classes: Classes) -> Words:
    """Return the words that hold symbols [num_channels, n] from -MAX_SYMBOL to MAX_SYMBOL. classes:
    class of each channel, [num_channels]."""
    coder = constriction.stream.stack.AnsCoder()
    # The coder is a stack: the class that is encoded last is decoded first.
    for number in reversed(range(NUM_CLASSES)):
        members = symbols[classes == number].astype(np.int32).ravel() + MAX_SYMBOL
        coder.encode_reverse(members, _model(number))
    words: Words = coder.get_compressed()
    return words


def decode(words: Words, classes: Classes, per_channel: int) -> Symbols:
    """Return the symbols [num_channels, per_channel] in `words`. The time depends on their number,
    not on the words. Raises CodecError where the words cannot hold as many symbols of these
    classes."""
    if words.size and words[-1] == 0:
        raise CodecError("coded symbols must not end in a word of zero")
    coder = constriction.stream.stack.AnsCoder(words)
    symbols = np.empty((classes.size, per_channel), np.int8)
    for number in range(NUM_CLASSES):
        members = classes == number
        num_channels = int(members.sum())
        decoded = coder.decode(_model(number), num_channels * per_channel) - MAX_SYMBOL
        symbols[members] = decoded.reshape(num_channels, per_channel)
    # Decoding undoes encoding step by step, so it must end where encoding began: empty. The check
    # misses only symbols of -MAX_SYMBOL that are absent at the end, where they cost nothing.
    if not coder.is_empty():
        raise CodecError(f"{words.size} words do not hold {symbols.size} coded symbols")
    return symbols


def probability_units(number: int) -> list[float]:
    """Unrounded probabilities, in units, of the symbols from -MAX_SYMBOL to MAX_SYMBOL."""
    width = class_width(number) * math.sqrt(2)
    # beyond[m]: the tail above m + 1/2. Small tails keep their digits, which 1 - tail would lose.
    beyond = [math.erfc((m + 0.5) / width) / 2 for m in range(MAX_SYMBOL + 1)]
    side = [above - further for above, further in pairwise(beyond)]
    centre = 1 - 2 * beyond[0]
    return [PROBABILITY_UNITS * p for p in (*reversed(side), centre, *side)]


@cache
def _model(number: int) -> constriction.stream.model.Categorical:
    units = [max(1, round(p)) for p in probability_units(number)]
    return constriction.stream.model.Categorical(np.array(units, np.float64), perfect=False)
