"""Stand-in in plain torch for the parts of FlashInfer that ExactTargetAttention uses."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

State = tuple[torch.Tensor, torch.Tensor]


class BatchPrefillWithPagedKVCacheWrapper:
    """Attention over paged KV. layout: "HND", pages [slots, num_kv_heads, page_size, head_dim], or
    "NHD". buffers: tensors that runs of a CUDA graph read, instead of the arguments of plan()."""

    def __init__(self, workspace: torch.Tensor, layout: str, backend: str, **buffers: Any) -> None:
        self._layout, self._buffers = layout, buffers
        self._max_rows: int | None = None

    def reset_workspace_buffer(self, floats: torch.Tensor, ints: torch.Tensor) -> None:
        """Do nothing: this class needs no workspace."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        causal: bool,
        **dtypes: torch.dtype,
    ) -> None:
        if self._buffers:
            self._fill(qo_indptr, kv_indptr, kv_indices, last_page_len)
        else:
            self._index = (qo_indptr, kv_indptr, kv_indices.clone(), last_page_len)
        self._group, self._size, self._causal = num_qo_heads // num_kv_heads, page_size, causal

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, ...], return_lse: bool = False) -> Any:
        """Return outputs like q, and with return_lse their base-2 LSE [num_tokens, heads]. Results
        of tokens outside the plan are NaN: FlashInfer may return anything there."""
        qo, begins, indices, lasts = self._index
        out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan)
        out[: int(qo[-1])], lse[: int(qo[-1])] = 0, -torch.inf
        for i, last in enumerate(lasts.tolist()):
            span = slice(int(qo[i]), int(qo[i + 1]))
            ids = indices[begins[i] : begins[i + 1]].long()
            if len(ids) and span.stop > span.start:
                num_tokens = (len(ids) - 1) * self._size + last
                k, v = (self._tokens(part, ids)[:num_tokens] for part in kv)
                out[span], lse[span] = _attend(q[span], k, v, self._causal)
        return (out, lse) if return_lse else out

    def _fill(self, qo_indptr: torch.Tensor, *others: torch.Tensor) -> None:
        """Fill the buffers for later runs. Sizes may not exceed the first plan's, for which a graph
        is captured."""
        num_rows = int(qo_indptr[-1])
        self._max_rows = num_rows if self._max_rows is None else self._max_rows
        assert num_rows <= self._max_rows, (
            f"{num_rows} tokens, at most {self._max_rows} of the first plan are allowed"
        )
        names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        self._index = tuple(self._buffers[f"{name}_buf"] for name in names)
        for name, values, place in zip(names, (qo_indptr, *others), self._index, strict=True):
            fixed = name != "paged_kv_indices"
            assert len(values) == len(place) or not fixed, (
                f"{name} has {len(values)} entries, the first plan had {len(place)}"
            )
            place[: len(values)].copy_(values)

    def _tokens(self, pages: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        chosen = pages[ids] if self._layout == "NHD" else pages[ids].transpose(1, 2)
        return chosen.flatten(0, 1).float().repeat_interleave(self._group, dim=1)


class BatchPrefillWithRaggedKVCacheWrapper:
    """Attention of requests whose keys and values are concatenated, like their queries."""

    def __init__(self, workspace: torch.Tensor, layout: str, backend: str) -> None:
        assert layout == "NHD"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        causal: bool,
        **dtypes: torch.dtype,
    ) -> None:
        assert qo_indptr.tolist() == kv_indptr.tolist()
        self._ends, self._causal = qo_indptr.tolist(), causal
        self._group = num_qo_heads // num_kv_heads

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_lse: bool = False
    ) -> Any:
        """Return outputs, and with return_lse their LSE, like the paged wrapper."""
        out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf)
        for begin, end in pairwise(self._ends):
            span = slice(begin, end)
            own_k, own_v = (
                part[span].float().repeat_interleave(self._group, dim=1) for part in (k, v)
            )
            out[span], lse[span] = _attend(q[span], own_k, own_v, self._causal)
        return (out, lse) if return_lse else out


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> State:
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * q.shape[-1] ** -0.5
    if causal:
        last_seen = torch.arange(len(k) - len(q), len(k))
        scores = scores.masked_fill(torch.arange(len(k)) > last_seen[:, None], -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out.to(q.dtype), scores.logsumexp(-1).T / torch.tensor(2.0).log()


def merge_state(
    one: torch.Tensor, one_lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> State:
    """Merge attention over two sets of tokens into attention over both."""
    lse = torch.logaddexp2(one_lse, other_lse)
    weights = (one_lse - lse).exp2()[..., None], (other_lse - lse).exp2()[..., None]
    merged = one.float() * weights[0] + other.float() * weights[1]
    return merged.to(one.dtype), lse
