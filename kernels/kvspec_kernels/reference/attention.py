"""Attention over encoded pages in plain torch: the specification of the kernels.

A request attends to a past of encoded pages and to a full-precision tail. Every query token sees
all of the past. The last tokens of the tail are the query tokens themselves: query i of n sees
`tail_len - n + i + 1` tail tokens. Log-sum-exps are to base 2 and of the scaled scores, as in
FlashInfer: lse = log2(sum over visible tokens of 2^(score * log2 e)). Without a visible token the
output is 0 and the lse -inf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from kvspec_kernels.codecs.spec import CodecSpec
from kvspec_kernels.formats import anchor_layout, residual_layout
from kvspec_kernels.reference import exact
from kvspec_kernels.reference.codec import reference_of

KV = tuple[torch.Tensor, torch.Tensor]


class Reader(Protocol):
    """Decoder of one layer's pages of page_size tokens and heads of head_dim."""

    @property
    def page_size(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    def read(self, pages: torch.Tensor, dtype: torch.dtype) -> KV:
        """Return (k, v), each [len(pages) * P, H, D] `dtype`."""
        ...


@dataclass(frozen=True, slots=True)
class PageReader:
    """Decoder of one layer's pages. `source` names the precision.

    anchors [num_pages, H, nbytes] uint8; residuals [num_slots, H, nbytes] uint8, page i's at slot
    residual_slots[i].
    """

    settings: CodecSpec
    source: Literal["anchor", "int8", "exact"]
    page_size: int
    head_dim: int
    kv_dtype: torch.dtype
    anchors: torch.Tensor
    residuals: torch.Tensor | None = None
    residual_slots: torch.Tensor | None = None

    def read(self, pages: torch.Tensor, dtype: torch.dtype) -> KV:
        """Return (k, v), each [len(pages) * P, H, D] `dtype`."""
        k, v = self._decode(pages.long(), dtype)
        return k.to(dtype).flatten(0, 1), v.to(dtype).flatten(0, 1)

    def _decode(self, pages: torch.Tensor, dtype: torch.dtype) -> KV:
        layout = anchor_layout(self.settings, self.page_size, self.head_dim)
        anchors = self.anchors[pages]
        codec = reference_of(self.settings)
        if self.source == "anchor":
            return codec.decode_anchor(anchors, self.settings, layout, dtype)
        assert self.residuals is not None
        assert self.residual_slots is not None
        residuals = self.residuals[self.residual_slots[pages].long()]
        sizes = (self.page_size, self.head_dim, self.kv_dtype)
        upgrade = residual_layout(self.settings, self.source, *sizes)
        if self.source == "exact":
            return exact.decode(residuals, upgrade)
        return codec.decode_refined(anchors, residuals, self.settings, layout, upgrade, dtype)


@dataclass(frozen=True, slots=True)
class WindowTail:
    """Full-precision tokens after the past. k, v [num_slots, P, H, D]; request b's pages are
    indices[indptr[b] : indptr[b + 1]], of which its first lens[b] tokens count."""

    k: torch.Tensor
    v: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    lens: torch.Tensor

    def read(self, request: int, dtype: torch.dtype) -> KV:
        """Return (k, v), each [lens[request], H, D] `dtype`."""
        begin, end = self.indptr[request : request + 2].tolist()
        pages, num_tokens = self.indices[begin:end].long(), int(self.lens[request])
        k, v = (part[pages].flatten(0, 1)[:num_tokens].to(dtype) for part in (self.k, self.v))
        return k, v


def paged_attention(
    q: torch.Tensor,
    reader: Reader,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    *,
    qo_indptr: torch.Tensor,
    sm_scale: float | None = None,
    tail: WindowTail | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from queries q [num_tokens, num_qo_heads, D] of several requests. Returns new tensors
    out [num_tokens, num_qo_heads, D] and lse [num_tokens, num_qo_heads], both in fp32.

    Request b has queries qo_indptr[b] .. qo_indptr[b + 1] and past pages
    indices[indptr[b] : indptr[b + 1]], the last filled up to last_page_len[b]. Everything is
    computed in `dtype`.
    """
    scale = 1 / math.sqrt(reader.head_dim) if sm_scale is None else sm_scale
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)
    for request in range(len(indptr) - 1):
        queries = slice(int(qo_indptr[request]), int(qo_indptr[request + 1]))
        num_queries = queries.stop - queries.start
        begin, end = indptr[request : request + 2].tolist()
        past_len = (end - begin - 1) * reader.page_size + int(last_page_len[request])
        past_len = past_len if end > begin else 0
        k, v = (part[:past_len] for part in reader.read(indices[begin:end], dtype))
        num_seen = torch.full((num_queries,), past_len, device=q.device)
        if tail is not None:
            tail_k, tail_v = tail.read(request, dtype)
            k, v = torch.cat((k, tail_k)), torch.cat((v, tail_v))
            index = torch.arange(num_queries, device=q.device)
            num_seen += (len(tail_k) - num_queries + index + 1).clamp_min(0)
        out[queries], lse[queries] = attend(q[queries].to(dtype), k, v, num_seen, scale)
    return out, lse


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_seen: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from query i of q [n, num_qo_heads, D] to the first num_seen[i] of k, v [T, H, D].

    q, k and v have one dtype; products and weights are rounded to it. Returns (out
    [n, num_qo_heads, D], lse [n, num_qo_heads] fp32).
    """
    group = q.shape[1] // k.shape[1]
    keys, values = (part.repeat_interleave(group, dim=1).movedim(0, 1) for part in (k, v))
    scores = (q.movedim(0, 1) @ keys.transpose(1, 2)) * scale
    hidden = torch.arange(len(k), device=q.device) >= num_seen[:, None]
    scores.masked_fill_(hidden, -math.inf)
    lse = torch.logsumexp(scores.float(), dim=-1) / math.log(2)
    # The weights of a query without visible tokens are NaN.
    weights = scores.softmax(-1).nan_to_num(0.0)
    return (weights @ values).movedim(1, 0), lse.movedim(1, 0)


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two disjoint sets of tokens into attention over their union.

    Returns out [..., D] and base-2 lse [...], both fp32. The output of a set without tokens
    (lse -inf) is ignored.
    """
    top = torch.maximum(lse_a, lse_b).float()
    finite_top = torch.where(top == -math.inf, 0.0, top)
    weight_a, weight_b = (torch.exp2(lse.float() - finite_top) for lse in (lse_a, lse_b))
    total = weight_a + weight_b
    share_a, share_b = (
        torch.where(weight > 0, weight / total, 0.0)[..., None] for weight in (weight_a, weight_b)
    )
    zero = torch.zeros((), device=out_a.device)
    out = torch.where(share_a > 0, out_a.float(), zero) * share_a
    out = out + torch.where(share_b > 0, out_b.float(), zero) * share_b
    return out, finite_top + torch.log2(total)
