"""Paged inputs for tests and benchmarks of the attention kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kvspec_kernels import formats
from kvspec_kernels.codecs.spec import CodecSpec
from kvspec_kernels.codecs.turboquant import TurboQuantSettings
from kvspec_kernels.formats import RecordLayout, Target
from kvspec_kernels.ops.attention import Tail
from kvspec_kernels.ops.attention_plan import Source
from kvspec_kernels.reference import attention, exact, fragments, rows, turboquant
from kvspec_kernels.reference.codec import reference_of

POISON_BYTE = 0xFF
# Pages that are encoded at a time, to bound memory.
ENCODED_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Paged inputs of one layer. Pages are shuffled, in pools with spare pages. Spare pages, and
    memory after the last token of a request, are NaN and bytes of 0xFF.

    pages[b]: the pages that request b owns. indices: the pages in use.
    """

    q: torch.Tensor
    qo_indptr: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    anchors: torch.Tensor
    residuals: torch.Tensor
    residual_slots: torch.Tensor
    tail: Tail | None
    settings: CodecSpec
    source: Source
    page_size: int
    pages: tuple[torch.Tensor, ...]

    @property
    def num_kv_heads(self) -> int:
        return self.anchors.shape[1]

    def reference(
        self, dtype: torch.dtype, sm_scale: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse) of `reference/attention.py`, computed in `dtype`, as fp32."""
        reader = attention.PageReader(
            self.settings,
            self.source,
            self.page_size,
            self.q.shape[-1],
            self.q.dtype,
            self.anchors,
            self.residuals,
            self.residual_slots,
        )
        return attention.paged_attention(
            self.q,
            reader,
            self.indptr,
            self.indices,
            self.last_page_len,
            qo_indptr=self.qo_indptr,
            sm_scale=sm_scale,
            tail=attention.WindowTail(*self.tail) if self.tail else None,
            dtype=dtype,
        )

    def baseline(
        self, dtype: torch.dtype, sm_scale: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return reference(), but of a codec that rotates with rotated numbers, which round to
        others in `dtype`. All is rotated: queries, pages and tail. Outputs are rotated back."""
        settings = self.settings
        if self.source != "anchor" or not isinstance(settings, TurboQuantSettings):
            return self.reference(dtype, sm_scale)
        rotate = partial(turboquant.rotate, settings=settings)
        tail = None
        if self.tail is not None:
            k, v = (rotate(part.float()) for part in self.tail[:2])
            tail = attention.WindowTail(k, v, *self.tail[2:])
        out, lse = attention.paged_attention(
            rotate(self.q.float()),
            RotatedReader(settings, self.page_size, self.q.shape[-1], self.anchors),
            self.indptr,
            self.indices,
            self.last_page_len,
            qo_indptr=self.qo_indptr,
            sm_scale=sm_scale,
            tail=tail,
            dtype=dtype,
        )
        return turboquant.rotate_back(out, settings), lse

    def shortened(self, lens: Sequence[int]) -> AttentionCase:
        """Return a case with the same pools and queries, but pasts that end earlier. Its index
        tensors are new and keep their shapes."""
        indptr, indices, last_page_len = page_table(self.pages, lens, self.page_size)
        padded = torch.zeros_like(self.indices)
        padded[: len(indices)] = indices
        return dataclasses.replace(self, indptr=indptr, indices=padded, last_page_len=last_page_len)


@dataclass(frozen=True, slots=True)
class RotatedReader:
    """PageReader of TurboQuant's anchors that leaves them rotated."""

    settings: TurboQuantSettings
    page_size: int
    head_dim: int
    anchors: torch.Tensor

    def read(self, pages: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        layout = formats.anchor_layout(self.settings, self.page_size, self.head_dim)
        k, v = turboquant.decode_rotated(self.anchors[pages.long()], self.settings, layout)
        return rows.to_pages(k, dtype).flatten(0, 1), rows.to_pages(v, dtype).flatten(0, 1)


def make_case(
    lens: Sequence[int],
    *,
    settings: CodecSpec,
    source: Source,
    page_size: int = 64,
    head_dim: int = 64,
    num_kv_heads: int = 2,
    group: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    q_lens: Sequence[int] | None = None,
    tail_lens: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    pool_pages: int | None = None,
    seed: int = 0,
) -> AttentionCase:
    """Return a case of requests with `lens` past tokens and q_lens query tokens, by default one.

    pool_pages: size of every pool, more than the pages in use, which are the last of the pool.
    """
    device = torch.device(device)
    rng = torch.Generator(device).manual_seed(seed)
    q_lens = [1] * len(lens) if q_lens is None else q_lens
    counts = [-(-length // page_size) for length in lens]
    page = (page_size, num_kv_heads, head_dim)
    pools = _Pools(rng, page, dtype, settings, source, pool_pages)
    all_pages = pools.allocate(sum(counts))
    anchors, residuals, residual_slots = pools.encoded(all_pages, _filled(lens, page_size, device))
    pages = torch.split(all_pages, counts)
    indptr, indices, last_page_len = page_table(pages, lens, page_size)
    tail = None if tail_lens is None else pools.tail(tail_lens)
    q = torch.randn((sum(q_lens), num_kv_heads * group, head_dim), generator=rng, device=device).to(
        dtype
    )
    return AttentionCase(
        q=q,
        qo_indptr=_offsets(q_lens, device),
        indptr=indptr,
        indices=indices,
        last_page_len=last_page_len,
        anchors=anchors,
        residuals=residuals,
        residual_slots=residual_slots,
        tail=tail,
        settings=settings,
        source=source,
        page_size=page_size,
        pages=pages,
    )


def page_table(
    pages: Sequence[torch.Tensor], lens: Sequence[int], page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (indptr, indices, last_page_len) int32 of requests that use their first lens[b]
    tokens."""
    device = pages[0].device
    counts = [-(-length // page_size) for length in lens]
    used = [owned[:count] for owned, count in zip(pages, counts, strict=True)]
    last = [(length - 1) % page_size + 1 if length else 0 for length in lens]
    return (
        _offsets(counts, device),
        torch.cat(used).to(torch.int32),
        torch.tensor(last, dtype=torch.int32, device=device),
    )


def results_for(case: AttentionCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of NaN, to be overwritten."""
    lse = torch.full(case.q.shape[:2], torch.nan, dtype=torch.float32, device=case.q.device)
    return torch.full_like(case.q, torch.nan), lse


@dataclass(frozen=True, slots=True)
class _Pools:
    """Pools of a case: allocation and contents."""

    rng: torch.Generator
    page: tuple[int, int, int]
    dtype: torch.dtype
    settings: CodecSpec
    source: Source
    pool_pages: int | None

    @property
    def _has_corrections(self) -> bool:
        """Return False for residuals of the target exact, also beside anchors that drafts read of a
        codec without the target int8."""
        if self.source == "exact":
            return False
        try:
            self.settings.correction_fields(self.page[0], self.page[2])
        except formats.FormatError:
            return False
        return True

    def allocate(self, count: int) -> torch.Tensor:
        """Return `count` shuffled ids from the upper end of a pool."""
        order = torch.randperm(count, generator=self.rng, device=self.rng.device)
        return order + self._size(count) - count

    def _size(self, needed: int) -> int:
        size = needed + 3 if self.pool_pages is None else self.pool_pages
        assert size > needed, (size, needed)
        return size

    def encoded(
        self, pages: torch.Tensor, filled: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (anchors, residuals, residual_slots) with `pages` [N] written. filled: [N, P],
        True for the tokens in use."""
        size, device = self._size(len(pages)), pages.device
        page_size, heads, head_dim = self.page
        target: Target = "int8" if self._has_corrections else "exact"
        anchor = formats.anchor_layout(self.settings, page_size, head_dim)
        residual = formats.residual_layout(self.settings, target, page_size, head_dim, self.dtype)
        anchors, residuals = (
            torch.full((size, heads, nbytes), POISON_BYTE, dtype=torch.uint8, device=device)
            for nbytes in (anchor.nbytes, residual.nbytes)
        )
        slots = self.allocate(len(pages))
        residual_slots = torch.zeros(size, dtype=torch.int32, device=device)
        residual_slots[pages] = slots.to(torch.int32)
        means = torch.randn((1, 1, heads, head_dim), generator=self.rng, device=device)
        for begin in range(0, len(pages), ENCODED_AT_ONCE):
            part = slice(begin, begin + ENCODED_AT_ONCE)
            k, v = self._values(len(pages[part]), means)
            anchors[pages[part]], residuals[slots[part]] = self._records(
                k, v, filled[part], anchor, residual
            )
        return anchors, residuals, residual_slots

    def _records(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        filled: torch.Tensor,
        anchor: RecordLayout,
        residual: RecordLayout,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        codes = residual if self._has_corrections else None
        reference = reference_of(self.settings)
        anchors, residuals = reference.encode(k, v, self.settings, anchor, codes)
        for field in anchor.fields:
            # Poison the metadata of tokens that are not in use.
            stored = field.view(anchors)
            if field.name == "v_norm":
                stored.masked_fill_(~filled[:, None, :, None], torch.nan)
            elif field.name.startswith("v_") and field.shape == filled.shape[1:]:
                by_token = fragments.from_row_order(stored)
                by_token = by_token.masked_fill(~filled[:, None, :], torch.nan)
                stored.copy_(fragments.row_order(by_token))
        if residuals is None:
            beyond = ~filled[:, :, None, None]
            k, v = (part.masked_fill(beyond, torch.nan) for part in (k, v))
            residuals = exact.encode(k, v, residual)
        return anchors, residuals

    def tail(self, lens: Sequence[int]) -> Tail:
        page_size, heads, head_dim = self.page
        device = self.rng.device
        counts = [-(-length // page_size) for length in lens]
        slots = self.allocate(sum(counts))
        filled = _filled(lens, page_size, device)
        means = torch.randn((1, 1, heads, head_dim), generator=self.rng, device=device)
        windows = []
        for values in self._values(len(slots), means):
            shape = (self._size(len(slots)), *self.page)
            window = torch.full(shape, torch.nan, device=device, dtype=self.dtype)
            window[slots] = values.masked_fill(~filled[:, :, None, None], torch.nan)
            windows.append(window)
        return Tail(
            window_k=windows[0],
            window_v=windows[1],
            indptr=_offsets(counts, device),
            indices=slots.to(torch.int32),
            lens=torch.tensor(lens, dtype=torch.int32, device=device),
        )

    def _values(self, num_pages: int, means: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return pages k, v in the KV dtype, with features of real caches. K's channels vary around
        `means`, some of them widely. One token of V is far larger than the others."""
        device = self.rng.device
        shape = (num_pages, *self.page)
        k = torch.randn(shape, generator=self.rng, device=device)
        k *= torch.where(torch.arange(shape[-1], device=device) % 13 == 5, 4.0, 1.0)
        k += 2 * means
        v = torch.randn(shape, generator=self.rng, device=device)
        v[:, shape[1] // 3] *= 8
        return k.to(self.dtype), v.to(self.dtype)


def _filled(lens: Sequence[int], page_size: int, device: torch.device) -> torch.Tensor:
    """Return [N, page_size] for the pages of all requests: True for tokens in use."""
    parts = [
        torch.arange(-(-length // page_size) * page_size, device=device) < length for length in lens
    ]
    return torch.cat(parts).view(-1, page_size)


def _offsets(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return running sums of counts with a leading 0, int32."""
    sizes = torch.tensor([0, *counts], dtype=torch.int64, device=device)
    return sizes.cumsum(0).to(torch.int32)
