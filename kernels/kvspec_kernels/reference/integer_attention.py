"""Integer draft attention (HACK, section 4) in plain torch: the specification of
cuda/draft_int8.cuh, rounding included.

A value is offset + scale * (code - zero), its code a small integer. K's scales are folded into the
query and V's into the probabilities; log4, whose V has scales per channel, applies them to the
sums. Query and probabilities are then rounded to integers of 12 bits, in steps of a power of two
for each page. Their products with codes are exact. Zero times the sum of the rounded numbers is
exact too, and is subtracted from the products (summation elimination). K's offsets are multiplied
with the unrounded query. V's offsets are multiplied with the unrounded probabilities in uniform4,
and with the rounded ones in log4. Attention to the tail stays in full precision (requantisation
elimination).

HACK rounds to 8 bits. Here two 8-bit numbers represent one: the nearest integer, and 16 times the
remainder. In the tests' cases outputs err by 0.2 to 0.3 %, with 8 bits alone by 3 to 4 %.
"""

from __future__ import annotations

import math

import torch

from kvspec_kernels.codecs.spec import CodecSpec
from kvspec_kernels.formats import RecordLayout
from kvspec_kernels.reference.codec import IntegerPart, kernel_reference_of

LOG2_E = 1 / math.log(2)
# Rounded numbers are at most 127 steps; the remainder is rounded to sixteenths of a step.
LARGEST, FINER = 128, 16
# Finer steps of the query would change scores, which are in units of log2, too little to matter.
LEAST_QUERY_STEP = 2.0**-15


def parts_of(
    anchors: torch.Tensor, settings: CodecSpec, layout: RecordLayout
) -> tuple[IntegerPart, IntegerPart]:
    """Return the integer parts (k, v) of anchor records [N, H, nbytes]."""
    reference = kernel_reference_of(settings)
    return (
        reference.integer_part("k", anchors, settings, layout),
        reference.integer_part("v", anchors, settings, layout),
    )


def attend(
    q: torch.Tensor,
    anchors: torch.Tensor,
    num_tokens: int,
    settings: CodecSpec,
    layout: RecordLayout,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from one query token q [num_qo_heads, D] to the first num_tokens >= 1 tokens of a
    request's pages, anchors [N, H, nbytes].

    Returns out [num_qo_heads, D] and base-2 lse [num_qo_heads], both fp64.
    """
    k, v = parts_of(anchors, settings, layout)
    num_pages, heads, page_size, head_dim = k.codes.shape
    queries = q.view(heads, -1, head_dim)
    group = queries.shape[1]
    scores = _scores(queries, k, sm_scale * LOG2_E)
    beyond = torch.arange(num_pages * page_size, device=q.device) >= num_tokens
    scores.masked_fill_(beyond.view(num_pages, 1, 1, page_size), -math.inf)
    top = scores.amax((0, 3), keepdim=True)
    weights = torch.exp2(scores - top)
    out = _weighed(weights, v)
    total = weights.sum((0, 3))
    lse = top[0, :, :, 0] + torch.log2(total)
    return (out / total[..., None]).view(heads * group, head_dim), lse.view(-1)


def rounded(values: torch.Tensor, dims: tuple[int, ...], least_step: float = 0.0) -> torch.Tensor:
    """Round values to whole sixteenths of a step. The step is the power of two at which the largest
    magnitude over `dims` is 64 to 127 steps, and at least least_step."""
    most = values.abs().amax(dims, keepdim=True) * (1 + 2.0**-7)
    exponent = torch.frexp(torch.where(most > 0, most, 1.0)).exponent
    step = torch.ldexp(torch.ones_like(most), exponent) / LARGEST
    step = step.clamp_min(least_step)
    coarse = (values / step).round()
    fine = ((values / step - coarse) * FINER).round()
    return (coarse + fine / FINER) * step


def _scores(queries: torch.Tensor, k: IntegerPart, scale_log2: float) -> torch.Tensor:
    """Return scores in units of log2, [N, H, group, P] fp64."""
    # The kernel has query and scales in registers as fp16.
    scaled = (queries.float() * scale_log2).half()
    scales = k.scale.float().half()
    # [N, H, group, chunks, D]: the tokens of a chunk share scales.
    folded = (scaled[None, :, :, None] * scales[:, :, None]).double()
    integers = rounded(folded, (-1,), LEAST_QUERY_STEP)
    num_chunks = scales.shape[2]
    by_chunk = torch.unflatten(k.codes - k.zero, 2, (num_chunks, -1))
    scores = torch.einsum("nhgcd,nhctd->nhgct", integers, by_chunk)
    shift = torch.einsum("hgd,nhcd->nhgc", queries.double(), k.offset) * scale_log2
    return (scores + shift[..., None]).flatten(3)


def _weighed(weights: torch.Tensor, v: IntegerPart) -> torch.Tensor:
    """Return the sums of V over all tokens, [H, group, D], by weights [N, H, group, P]."""
    codes = v.codes - v.zero
    if v.scale.shape[-1] == 1:
        # Metadata is per token. Scales of tokens past the context may be NaN.
        scale, offset = (part[..., 0][:, :, None] for part in (v.scale, v.offset))
        folded = torch.where(weights > 0, weights * scale, 0.0)
        shift = torch.where(weights > 0, weights * offset, 0.0).sum((0, 3))
        integers = rounded(folded, (-1,))
        return torch.einsum("nhgt,nhtd->hgd", integers, codes) + shift[..., None]
    integers = torch.unflatten(rounded(weights, (-1,)), -1, (v.scale.shape[2], -1))
    by_chunk = torch.unflatten(codes, 2, (v.scale.shape[2], -1))
    sums = torch.einsum("nhgct,nhctd->nhgcd", integers, by_chunk)
    shift = integers.sum(-1)[..., None] * v.offset[:, :, None]
    return (sums * v.scale[:, :, None] + shift).sum((0, 3))
