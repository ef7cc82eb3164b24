"""Steps of an online softmax whose query rows are rows of matrices."""

from __future__ import annotations

import triton
import triton.language as tl

from kvspec_kernels.jit.rounding import rounded


@triton.jit
def attend(
    q, k, v, visible, scale_log2, acc, top, total, DTYPE: tl.constexpr, INTERPRET: tl.constexpr
):
    """Take one step. q [M, D], k [D, N], v [N, D], visible [M, N]."""
    scores = tl.dot(q, k, input_precision="ieee") * scale_log2
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    return attend_by_scores(scores, v, 1.0, acc, top, new_top, total, DTYPE, INTERPRET)


@triton.jit
def attend_by_scores(
    scores, v, scale, acc, top, new_top, total, DTYPE: tl.constexpr, INTERPRET: tl.constexpr
):
    """Take one step with scores [M, N] before scaling, and the maxima of scaled scores [M]."""
    # For rows that have seen no token yet, -inf minus -inf would be NaN.
    finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * scale - finite_top[:, None])
    shrink = tl.exp2(top - finite_top)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = acc * shrink[:, None]
    acc += tl.dot(rounded(weights, DTYPE, INTERPRET), v, input_precision="ieee")
    return acc, new_top, total


@triton.jit
def concluded(top, total):
    """Return (divisor of sums, lse); 1 and -inf where no token was seen."""
    nothing = total == 0.0
    divisor = tl.where(nothing, 1.0, total)
    return divisor, tl.where(nothing, float("-inf"), top + tl.log2(divisor))
