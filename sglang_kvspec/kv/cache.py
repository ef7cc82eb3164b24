"""KV cache of one rank: its pools, and the life of a page in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch

from sglang_kvspec.codecs.base import Codec
from sglang_kvspec.core.errors import CapacityError
from sglang_kvspec.kv.anchor_places import AnchorPlaces
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.recent_window import RecentWindow
from sglang_kvspec.kv.record_copies import RecordCopies
from sglang_kvspec.kv.record_pool import RecordPool
from sglang_kvspec.kv.record_transfers import RecordTransfers
from sglang_kvspec.kv.residual_pages import Residuals
from sglang_kvspec.planning.capacity import PADDING_PAGES, CapacityPlan


class PagedKVCache(ABC):
    """Anchors, recent window and residuals, addressed by SGLang's pages.

    Page ids run from 0 (SGLang's padding page) to plan.num_pages. A page is free, in the window,
    encoded, or in the window and encoded. Opening, encoding and freeing apply to all layers.
    anchor_places: which encoded pages have anchors, and where in `anchors`. records: reads and
    writes whole pages for tiers and links outside of the cache.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        codec: Codec,
        plan: CapacityPlan,
        device: torch.device,
        *,
        table_device: torch.device,
        residuals: Residuals,
        copies: RecordCopies,
    ) -> None:
        """table_device: device of the window's slot table. copies: moves records between the CPU
        and the device."""
        self.geometry = geometry
        self.codec = codec
        self.plan = plan
        self.device = device
        self.residuals = residuals
        self.anchors, self.kept_anchors = (
            RecordPool(
                geometry.num_layers, num_slots, geometry.num_kv_heads, codec.anchor_bytes, device
            )
            for num_slots in (plan.anchor_pages + PADDING_PAGES, plan.kept_anchor_pages)
        )
        self.anchor_places = AnchorPlaces(plan.num_pages, plan.anchor_pages, device)
        self.window = RecentWindow(
            geometry, plan.num_pages, plan.window_pages, device, table_device
        )
        self.records = RecordTransfers(self, copies)
        self._encoded: set[int] = set()

    # Window

    def open_pages(self, pages: Iterable[int]) -> None:
        """Give each of these pages a window slot, unless the page has one. None may be encoded.

        If the window is full, the oldest committed page leaves it. Raises CapacityError when all
        pages in the window are still mutable.
        """
        for page in pages:
            assert page not in self._encoded, f"page {page} is encoded and cannot be written"
            if page in self.window.slots:
                continue
            if not self.window.slots.num_free:
                self._make_room()
            self.window.slots.acquire(page)

    def _make_room(self) -> None:
        oldest = self.window.committed_pages()[:1]
        if not oldest:
            raise CapacityError(
                f"all {self.window.slots.num_slots} pages of the recent window are being written"
            )
        self.move_out_of_window(oldest)

    @abstractmethod
    def commit_pages(self, pages: Sequence[int]) -> None:
        """Mark window pages whose tokens are all verified. The pages stay in the window."""

    @abstractmethod
    def move_out_of_window(self, pages: Sequence[int]) -> None:
        """Free the window slots of committed pages. After this call the pages are encoded."""

    def encode_committed(self, pages: Iterable[int]) -> None:
        """Encode the committed pages among these that are not encoded yet. The pages leave the
        window."""
        waiting = [page for page in pages if self.window.is_committed(page)]
        self.move_out_of_window([page for page in waiting if page not in self._encoded])

    # Encoding

    def begin_encode(self, pages: Sequence[int]) -> None:
        """Announce free pages that will be written whole, layer by layer."""
        assert not any(page in self.window.slots for page in pages), (
            "a page of the recent window is not free"
        )
        self._begin_encode(pages)

    def _begin_encode(self, pages: Sequence[int]) -> None:
        assert self._encoded.isdisjoint(pages), "a page is already encoded"
        self.residuals.begin(pages)
        self.anchor_places.begin(pages)

    def finish_encode(self, pages: Sequence[int]) -> None:
        """Make pages readable once all their layers are encoded."""
        self.residuals.finish(pages)
        self.finish_anchors(pages)

    def begin_landing(self, pages: Sequence[int]) -> None:
        """Announce free pages whose records come from elsewhere, through `records`.

        Write the anchors first, then call finish_anchors(). Residuals may follow later, and end
        with residuals.finish(). finish_encode() ends both.
        """
        assert not any(page in self.window.slots for page in pages), (
            "a page of the recent window is not free"
        )
        assert self._encoded.isdisjoint(pages), "a page is already encoded"
        assert self.anchor_places.holds_all, "records that land need a place for their anchors"
        self.residuals.begin_landing(pages)

    def finish_anchors(self, pages: Iterable[int]) -> None:
        """Let drafts read the anchors of pages. Their residuals may still be IN_FLIGHT."""
        self._encoded.update(pages)

    @abstractmethod
    def write_whole(
        self, pages: Sequence[int], k: torch.Tensor, v: torch.Tensor, *, anchors: bool = True
    ) -> None:
        """Encode distinct free pages from all their tokens. k, v: [N, num_layers, page_size,
        num_kv_heads, head_dim] on the device, with equal strides. anchors: False if no draft
        will read these pages, so that anchors need not be written."""

    def is_encoded(self, page: int) -> bool:
        return page in self._encoded

    # Freeing

    def free_anchors(self, pages: Sequence[int]) -> None:
        """Free the anchors of pages that no draft will read; the pages may still be in the window.
        The target must be `exact`, for which residuals alone suffice."""
        assert self.codec.target == "exact", "verifications at int8 read anchors"
        self.anchor_places.free_unread(pages)

    def free_pages(self, pages: Iterable[int]) -> None:
        """Forget the contents of pages that SGLang freed."""
        pages = list(pages)
        for page in pages:
            self.window.release(page)
            self.residuals.release(page)
            self._encoded.discard(page)
        self.anchor_places.release(pages)

    def free_all(self) -> None:
        """Forget all pages."""
        self.free_pages(set(self._encoded) | set(self.window.slots))

    @property
    def hbm_nbytes(self) -> int:
        """Bytes of GPU memory; on a CPU, the bytes that a GPU would hold."""
        anchors = self.anchors.nbytes + self.kept_anchors.nbytes
        return anchors + self.window.nbytes + self.residuals.hbm_nbytes

    def check_integrity(self) -> None:
        """Raise AssertionError when pools and tables disagree."""
        self.window.check_integrity()
        self.residuals.check_integrity()
        self.anchor_places.check_integrity(self._encoded)
        num_absent = self.residuals.table.counts()["ABSENT"]
        assert num_absent == self.plan.num_pages + 1 - len(self._encoded), (
            "residual states and encoded pages disagree"
        )
