"""What every KV cache of one rank shares: its pools, and the life of a page in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch

from sglang_kvspec.codecs.base import Codec
from sglang_kvspec.core.errors import CapacityError
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.recent_window import RecentWindow
from sglang_kvspec.kv.record_pool import RecordPool
from sglang_kvspec.kv.residual_cache import ResidualCache
from sglang_kvspec.kv.transfers import to_device
from sglang_kvspec.planning.capacity import CapacityPlan


class PagedKVCache(ABC):
    """Anchors, recent window and residuals, addressed by SGLang's pages.

    Page ids run from 0 (SGLang's padding page) to plan.num_pages. Opening, encoding and freeing
    concern all layers. table_device: where the window's slot table lies.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        codec: Codec,
        plan: CapacityPlan,
        device: torch.device,
        table_device: torch.device,
    ) -> None:
        self.geometry = geometry
        self.codec = codec
        self.plan = plan
        self.device = device
        self.anchors, self.kept_anchors = (
            RecordPool(
                geometry.num_layers, num_slots, geometry.num_kv_heads, codec.anchor_bytes, device
            )
            for num_slots in (plan.num_pages + 1, plan.kept_anchor_pages)
        )
        self.window = RecentWindow(
            geometry, plan.num_pages, plan.window_pages, device, table_device
        )
        self.residuals = self._make_residuals()
        self._encoded: set[int] = set()

    def _make_residuals(self) -> ResidualCache:
        return ResidualCache(self.geometry, self.plan, self.codec.residual_bytes, self.device)

    def open_pages(self, pages: Iterable[int]) -> None:
        """Give every page that is neither in the window nor encoded a place in the window.

        Makes room at the expense of committed pages. Raises CapacityError when all pages in the
        window are still mutable.
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
    def move_out_of_window(self, pages: Sequence[int]) -> None:
        """Free the window slots of committed pages, which are encoded from then on."""

    def begin_encode(self, pages: Sequence[int]) -> None:
        """These free pages will be written whole, layer by layer."""
        assert not any(page in self.window.slots for page in pages), "a window page is not free"
        self._begin_encode(pages)

    def _begin_encode(self, pages: Sequence[int]) -> None:
        assert self._encoded.isdisjoint(pages), "a page is encoded once"
        self.residuals.begin(pages)

    def finish_encode(self, pages: Sequence[int]) -> None:
        """All layers of these pages are encoded."""
        self.residuals.finish(pages)
        self.finish_anchors(pages)

    def finish_anchors(self, pages: Iterable[int]) -> None:
        """All anchors of these pages are there and drafts may read them; their residuals, still
        IN_FLIGHT, may come later: `residuals.finish()` says when they have."""
        self._encoded.update(pages)

    # The newest tokens

    def read_plain(self, page: int, num_tokens: int) -> torch.Tensor | None:
        """K and V of a page's first tokens as the model gave them: a copy [num_layers, 2,
        num_tokens, num_kv_heads, head_dim] on the CPU, which waits for it. A page outside of the
        window, whose residual must not lack, has them in its records; None where those lose
        some."""
        if page not in self.window.slots:
            if self.codec.target != "exact":
                return None
            k, v = self.read_whole([page])
            return torch.stack((k[0], v[0]), dim=1)[:, :, :num_tokens].cpu()
        slot = self.window.slots.slot_of(page)
        layers = map(self.window.layer, range(self.geometry.num_layers))
        tokens = [torch.stack([part[slot, :num_tokens] for part in layer]) for layer in layers]
        return torch.stack(tokens).cpu()

    def write_plain(self, page: int, tokens: torch.Tensor) -> None:
        """Put the first tokens of a free page, as read_plain() gives them, into the window. Raises
        CapacityError where that is full."""
        self.open_pages([page])
        slot, num_tokens = self.window.slots.slot_of(page), tokens.shape[2]
        on_device = to_device(self.device, tokens)
        for layer in range(self.geometry.num_layers):
            for part, values in zip(self.window.layer(layer), on_device[layer], strict=True):
                part[slot, :num_tokens] = values
        if num_tokens == self.geometry.page_size:
            self._complete(page)

    def _complete(self, page: int) -> None:
        """All tokens of a window page are verified."""
        self.window.mark_committed(page)

    # Records from elsewhere

    def begin_landing(self, pages: Sequence[int]) -> None:
        """These free pages will be written whole, by write_anchors() and finish_anchors(), then
        write_residuals() and `residuals.finish()`: at once, or residuals later."""
        assert not any(page in self.window.slots for page in pages), "a window page is not free"
        assert self._encoded.isdisjoint(pages), "a page is encoded once"
        self.residuals.begin_landing(pages)

    @abstractmethod
    def write_anchors(self, pages: Sequence[int], records: torch.Tensor) -> None:
        """records: [num_pages, num_layers, num_kv_heads, anchor_bytes] uint8 on the CPU, which are
        not to change any more. The pages are distinct."""

    @abstractmethod
    def write_residuals(self, pages: Sequence[int], records: torch.Tensor) -> None:
        """The same for residuals."""

    @abstractmethod
    def read_anchors(self, pages: Sequence[int]) -> torch.Tensor:
        """A copy of the anchors of encoded pages, as write_anchors() takes them, behind all that
        the device was given so far. The CPU waits for it."""

    @abstractmethod
    def read_residuals(self, pages: Sequence[int]) -> torch.Tensor:
        """The same for the residuals, wherever they are, of pages that have them."""

    def keep_anchors(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copy the anchors of encoded pages into slots of `kept_anchors`, where they stay when the
        pages are freed."""
        assert self._encoded.issuperset(pages), "only an encoded page has anchors"
        self._copy_anchors(self.anchors, pages, self.kept_anchors, slots)

    def restore_anchors(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """In place of write_anchors(), from such slots, which may be used again at once."""
        self._copy_anchors(self.kept_anchors, slots, self.anchors, pages)

    @abstractmethod
    def _copy_anchors(
        self,
        source: RecordPool,
        source_slots: Sequence[int],
        target: RecordPool,
        target_slots: Sequence[int],
    ) -> None:
        """Within the device's memory, behind all that the device was given so far. The target slots
        are distinct."""

    # Full precision from elsewhere

    @abstractmethod
    def read_whole(self, pages: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of encoded pages at the target precision, wherever they are: new tensors on the
        device, [N, num_layers, page_size, num_kv_heads, head_dim]."""

    @abstractmethod
    def write_whole(
        self, pages: Sequence[int], k: torch.Tensor, v: torch.Tensor, *, anchors: bool = True
    ) -> None:
        """Make distinct free pages encoded ones from all their tokens, as read_whole() gives them,
        in equal strides. anchors False: nobody drafts, so that anchors need not be written."""

    @abstractmethod
    def warm_up_records(self) -> None:
        """Before the first request: compile what copies of records run, and take the memory that
        they need."""

    @abstractmethod
    def encode_committed(self, pages: Iterable[int]) -> None:
        """Encode those of these pages that are full and verified and that are not encoded yet."""

    def await_residuals(self, pages: Iterable[int]) -> None:
        """What is enqueued from now on may read the residuals of these pages, whose fetch was
        started."""
        self.residuals.finish_fetches()

    @abstractmethod
    def prefetch_residuals(self, pages: Iterable[int]) -> None:
        """A prefill is about to read these pages of cached prefixes, then a verification."""

    def is_encoded(self, page: int) -> bool:
        return page in self._encoded

    def free_pages(self, pages: Iterable[int]) -> None:
        """SGLang freed these pages; whatever they held is gone."""
        for page in pages:
            self.window.release(page)
            self.residuals.release(page)
            self._encoded.discard(page)

    def free_all(self) -> None:
        self.free_pages(set(self._encoded) | set(self.window.slots))

    @property
    def hbm_nbytes(self) -> int:
        anchors = self.anchors.nbytes + self.kept_anchors.nbytes
        return anchors + self.window.nbytes + self.residuals.hbm_nbytes

    def check_integrity(self) -> None:
        """Raise AssertionError when pools and tables disagree."""
        self.window.check_integrity()
        self.residuals.check_integrity()
        num_absent = self.residuals.table.counts()["ABSENT"]
        assert num_absent == self.plan.num_pages + 1 - len(self._encoded), "page states were lost"
