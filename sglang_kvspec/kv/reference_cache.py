"""KV cache of one rank in plain torch. A CPU serves with it, and it specifies the GPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from sglang_kvspec.codecs.base import Codec
from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.decoded_anchors import DecodedAnchors
from sglang_kvspec.kv.forward_plan import ForwardPlan, RowKind
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.page_memo import PageMemo
from sglang_kvspec.kv.record_copies import CpuRecordCopies
from sglang_kvspec.kv.residual_cache import ResidualCache
from sglang_kvspec.planning.capacity import CapacityPlan

KV = tuple[torch.Tensor, torch.Tensor]


class ReferenceKVCache(PagedKVCache):
    """KV cache in plain torch. A page is free, in the window (full precision), or encoded (anchor
    and residual). All reads and writes name a layer."""

    residuals: ResidualCache

    def __init__(
        self, geometry: KVGeometry, codec: Codec, plan: CapacityPlan, device: torch.device
    ) -> None:
        """Raise ConfigError when the residual store does not fit into host memory."""
        copies = CpuRecordCopies()
        super().__init__(
            geometry,
            codec,
            plan,
            device,
            table_device=device,
            residuals=ResidualCache(geometry, plan, codec.residual_bytes, device, copies),
            copies=copies,
        )
        self._decoded = DecodedAnchors(geometry, plan.num_pages)
        record_bytes = codec.anchor_bytes + codec.residual_bytes
        self._targets = PageMemo(
            geometry,
            plan.num_pages + 1,
            geometry.num_layers * geometry.num_kv_heads * record_bytes,
        )
        self._window_targets = PageMemo(geometry, plan.window_pages, geometry.plain_page_bytes)

    # Life of a page

    def commit_pages(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.window.mark_committed(page)

    def move_out_of_window(self, pages: Sequence[int]) -> None:
        """Encode committed window pages, all layers, and free their window slots."""
        if not pages:
            return
        assert all(map(self.window.is_committed, pages)), "only a committed page may be encoded"
        ids = self._ids(pages)
        self._begin_encode(pages)
        for layer in range(self.geometry.num_layers):
            self.encode(layer, ids, *self.window.read(layer, ids))
        self.finish_encode(pages)
        for page in pages:
            self.window.release(page)

    def free_pages(self, pages: Iterable[int]) -> None:
        pages = list(pages)
        super().free_pages(pages)
        for page in pages:
            self._decoded.forget(page)

    def write_whole(
        self, pages: Sequence[int], k: torch.Tensor, v: torch.Tensor, *, anchors: bool = True
    ) -> None:
        ids = self._ids(pages)
        self.begin_encode(pages)
        for layer in range(self.geometry.num_layers):
            if anchors:
                self.encode(layer, ids, k[:, layer], v[:, layer])
            else:
                exact = self.codec.encode_exact(k[:, layer], v[:, layer])
                self.residuals.write(layer, ids, exact)
        self.finish_encode(pages)

    def _ids(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self.device)

    # A forward

    @contextmanager
    def forward(self, plan: ForwardPlan) -> Iterator[None]:
        """Prepare the pages of a forward, whose layers the caller runs in this context.

        Window pages are opened, and residuals that a prefill reads are prefetched into the
        residual cache. At the end, pages that the forward wrote whole become readable. Raises
        CapacityError when the window has no room. A forward that raises leaves its pages as they
        are; nothing may read them.
        """
        size = self.geometry.page_size
        past = [row.past_pages(size) for row in plan.rows if row.kind is RowKind.PREFILL]
        if past:
            self.residuals.prefetch(page for pages in past for page in pages.tolist())
        direct: list[int] = []
        for row in plan.rows:
            window, whole = row.split_written(size)
            self.open_pages(window)
            direct += whole
        if direct:
            self.begin_encode(direct)
        yield
        if direct:
            self.finish_encode(direct)

    def encode(self, layer: int, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Encode pages [N] of one layer from k, v [N, page_size, num_kv_heads, head_dim]."""
        record = self.codec.encode(k, v)
        self.anchors.write(layer, self.anchor_places.of(pages), record.anchor)
        self.residuals.write(layer, pages, record.residual)

    # Reading

    def draftable(self, pages: torch.Tensor) -> torch.Tensor:
        """Return those of full pages [N] that a draft can read: from the window, or from
        anchors."""
        if self.anchor_places.holds_all:
            return pages
        return pages[(self.window.slots.table[pages] >= 0) | self.anchor_places.have(pages)]

    def read_draft(self, layer: int, pages: torch.Tensor, into: KV | None = None) -> KV:
        """Return distinct pages [N] as a draft sees them: from the window if possible, else from
        anchors.

        (k, v), each [N, page_size, num_kv_heads, head_dim]; into: contiguous tensors for them.
        """
        shape = (len(pages), *self.geometry.page_shape)
        dtype = self.geometry.dtype
        k, v = into or (torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype))
        in_window = self.window.slots.table[pages] >= 0
        # A request's newest pages are its last ones. In another order, they are put in place below.
        in_order = bool((in_window[1:] >= in_window[:-1]).all())
        order = torch.arange(len(pages)) if in_order else in_window.long().argsort(stable=True)
        num_encoded = len(pages) - int(in_window.sum())
        encoded, recent = pages[order[:num_encoded]], pages[order[num_encoded:]]
        self._read_anchors(layer, encoded, (k[:num_encoded], v[:num_encoded]))
        self.window.read_into(layer, recent, (k[num_encoded:], v[num_encoded:]))
        if not in_order:
            for part in (k, v):
                part[order] = part.clone()
        return k, v

    def _read_anchors(self, layer: int, pages: torch.Tensor, into: KV) -> None:
        def decode(fresh: torch.Tensor) -> KV:
            assert self._encoded.issuperset(fresh.tolist()), "a page without an anchor was read"
            assert bool(self.anchor_places.have(fresh).all()), "anchors without a place were read"
            return self.codec.decode_anchor(self.anchors.read(layer, self.anchor_places.of(fresh)))

        self._decoded.read(layer, pages, decode, into)

    def read_target(self, layer: int, pages: torch.Tensor) -> KV:
        """Return full pages [N] as verification and prefill see them, at the target precision.

        A page in the window reads as it will once it is encoded. So what a token sees does not
        depend on the time of encoding. Shapes as in read_draft.
        """

        def decode(encoded: torch.Tensor) -> KV:
            residuals = self.residuals.read(layer, encoded)
            if self.codec.target == "exact":
                return self.codec.decode_exact(residuals)
            records = self.anchors.read(layer, encoded), residuals
            return self._targets.read(layer, encoded, records, self.codec.decode_target)

        return self._read(layer, pages, decode)

    def as_target(self, k: torch.Tensor, v: torch.Tensor) -> KV:
        """Return full pages [N, page_size, num_kv_heads, head_dim] as they read once encoded."""
        if self.codec.target == "exact":
            return k, v
        record = self.codec.encode(k, v)
        return self.codec.decode_target(record.anchor, record.residual)

    def _read(
        self,
        layer: int,
        pages: torch.Tensor,
        read_encoded: Callable[[torch.Tensor], KV],
    ) -> KV:
        in_window = self.window.slots.table[pages] >= 0
        if not bool(in_window.any()):
            return read_encoded(pages)
        recent = self._read_window(layer, pages[in_window])
        if bool(in_window.all()):
            return recent
        encoded = read_encoded(pages[~in_window])
        # A request's newest pages are its last ones, so the two parts are usually in order.
        in_order = bool((in_window[1:] >= in_window[:-1]).all())
        place = None if in_order else in_window.long().argsort(stable=True).argsort()
        merged = (torch.cat(both) for both in zip(encoded, recent, strict=True))
        k, v = (part if place is None else part.index_select(0, place) for part in merged)
        return k, v

    def _read_window(self, layer: int, pages: torch.Tensor) -> KV:
        recent = self.window.read(layer, pages)
        if self.codec.target == "exact":
            return recent
        slots = self.window.slots.table[pages]
        return self._window_targets.read(layer, slots, recent, self.as_target)

    def check_integrity(self) -> None:
        super().check_integrity()
        assert self._encoded.isdisjoint(self.window.slots), (
            "a page of the recent window is also encoded"
        )
