"""Levels of the best scalar quantiser (Lloyd and Max) for one coordinate of a random unit vector.

A coordinate x of a vector that is uniform on the unit sphere of `dim` dimensions has a density
proportional to (1 - x^2)^((dim - 3) / 2), which nears a normal distribution of variance 1 / dim
(TurboQuant, lemma 1). With x = sin t it is cos(t)^(dim - 2), and both integrals that Lloyd's
iteration needs have a closed form.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

# The iteration stops when no level moves by more than this share of the standard deviation.
CONVERGED = 1e-9


@cache
def levels(dim: int, bits: int) -> tuple[float, ...]:
    """Return the 2^bits levels in increasing order, symmetric around 0. dim: even."""
    half = 1 << bits - 1
    deviation = dim**-0.5
    # Any start that increases converges: the density is log-concave.
    upper = [(2 * i + 1) / half * deviation for i in range(half)]
    moved = math.inf
    while moved > CONVERGED * deviation:
        edges = [0.0, *((low + high) / 2 for low, high in pairwise(upper)), 1.0]
        means = [_mean(low, high, dim) for low, high in pairwise(edges)]
        moved = max(abs(new - old) for new, old in zip(means, upper, strict=True))
        upper = means
    return (*(-level for level in reversed(upper)), *upper)


def _mean(low: float, high: float, dim: int) -> float:
    """Return the mean of a coordinate between `low` and `high`."""
    power = dim - 2
    first, last = math.asin(low), math.asin(high)
    moment = (math.cos(first) ** (power + 1) - math.cos(last) ** (power + 1)) / (power + 1)
    return moment / (_cosine_integral(last, power) - _cosine_integral(first, power))


def _cosine_integral(angle: float, power: int) -> float:
    """Return the integral of cos(t)^power from 0 to `angle`. power: even."""
    cosine, sine = math.cos(angle), math.sin(angle)
    total = angle
    for n in range(2, power + 1, 2):
        total = (cosine ** (n - 1) * sine + (n - 1) * total) / n
    return total
