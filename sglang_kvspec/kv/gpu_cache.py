"""KV cache of one rank on a GPU: kernels encode, and read residuals from GPU memory only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from kvspec_kernels.ops.attention_plan import Backend
from kvspec_kernels.ops.capture import captured_graph
from kvspec_kernels.ops.encode import encode_pages
from sglang_kvspec.codecs.base import Codec
from sglang_kvspec.core.errors import UnsupportedError
from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.copy_streams import CopyStreams, make_copy_streams
from sglang_kvspec.kv.forward_plan import ForwardPlan, RowKind
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.offloaded_residuals import OffloadedResidualCache
from sglang_kvspec.kv.residual_cache import ResidualCache
from sglang_kvspec.kv.staged_records import StagedRecords
from sglang_kvspec.kv.target_rows import TargetRows, target_rows
from sglang_kvspec.kv.transfers import send_into, sent_together
from sglang_kvspec.planning.capacity import CapacityPlan

# Most committed pages that one launch per layer encodes.
COMMIT_PAGES = 16


class RecordSlots(NamedTuple):
    """Slots of pages [N] for kernels that encode, each int32 on the device. anchors: -1 for an
    entry that is no page. residuals: any valid slot for such an entry."""

    anchors: torch.Tensor
    residuals: torch.Tensor


class GpuKVCache(PagedKVCache):
    """KV cache on a GPU. A full page is encoded as soon as all its tokens are committed, so that
    verifications read only records. While the page is among a request's newest, it stays in the
    window as well, where drafts read it in full precision.

    kernels: back end of everything that reads or writes its records.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        codec: Codec,
        plan: CapacityPlan,
        device: torch.device,
        copy_streams: CopyStreams | None = None,
        kernels: Backend = "auto",
    ) -> None:
        """copy_streams: for copies to and from a host store; None: new ones for the device.

        Raises UnsupportedError if the KV dtype is neither bf16 nor fp16, and ConfigError if the
        host store cannot be pinned.
        """
        if geometry.dtype not in (torch.bfloat16, torch.float16):
            raise UnsupportedError(
                "--kvspec on a GPU needs KV in bf16 or fp16, got "
                f"{geometry.dtype}: set --dtype bfloat16 or float16"
            )
        self.kernels = kernels
        copy_streams = self._copy_streams = copy_streams or make_copy_streams(device)
        copies = StagedRecords(device, copy_streams.main)
        parts = (geometry, plan, codec.residual_bytes, device)
        self._offloaded: OffloadedResidualCache | None = None
        if plan.host_pages:
            anchors = None if plan.page_bytes.takes_anchors else lambda: self.anchors
            self._offloaded = OffloadedResidualCache(
                *parts, copy_streams, packed=codec.packed, anchors=anchors, kernels=kernels
            )
        super().__init__(
            geometry,
            codec,
            plan,
            device,
            table_device=torch.device("cpu"),
            residuals=self._offloaded or ResidualCache(*parts, copies),
            copies=copies,
        )
        own = torch.arange(-1, plan.num_pages, dtype=torch.int32, device=device).clamp_(min=0)
        # Cache slot of each page's residual, for kernels. They never look up page 0.
        self.residual_slots: torch.Tensor = (
            self._offloaded.slots_on_device if self._offloaded is not None else own
        )
        # Window slots to encode, and their page ids.
        self._committing = torch.full((2, COMMIT_PAGES), -1, dtype=torch.int32, device=device)
        self._commit_graph: torch.cuda.CUDAGraph | None = None

    def warm_up(self) -> None:
        """Compile the kernels that copy residuals. Call while no page is in use."""
        if self._offloaded is not None:
            self._offloaded.warm_up()

    # A forward

    @contextmanager
    def forward(self, plan: ForwardPlan, *, split_by_page: bool) -> Iterator[TargetRows]:
        """Prepare a forward at the target precision, which the caller enqueues in this context.

        The pages that the forward reads, writes and encodes get their slots, which the yielded
        index tensors name. Later work may read the pages that the forward writes whole.
        split_by_page: as for target_rows(). If the plan has PREFILL rows, call await_layer() before
        a layer reads residuals. Raises CapacityError when the window or the residual cache has no
        room for all pages at once. A forward that raises leaves its pages as they are; nothing may
        read them.
        """
        size = self.geometry.page_size
        past = [page for row in plan.rows for page in row.past_pages(size).tolist()]
        direct: list[int] = []
        for row in plan.rows:
            window, whole = row.split_written(size)
            self.open_pages(window)
            direct += whole
        slot_of = self.window.slots.slot_of
        rows = target_rows(plan, size, slot_of, split_by_page=split_by_page)
        # A prefill hides fetches behind its layers. A verification's pages are mostly prefetched.
        by_layer = any(row.kind is RowKind.PREFILL for row in plan.rows)
        lent = rows.encode_pages.tolist()
        with self.placed(past, encodes=direct, lends=lent, by_layer=by_layer):
            yield rows

    @contextmanager
    def placed(
        self,
        reads: Iterable[int] = (),
        *,
        encodes: Sequence[int] = (),
        lends: Iterable[int] = (),
        by_layer: bool = False,
    ) -> Iterator[None]:
        """Keep the residuals of pages in cache slots while the caller enqueues work.

        reads: encoded pages. encodes: free or window pages, readable for later work. lends: pages
        that have a residual for this work only. by_layer: call await_layer() before each layer.
        Raises CapacityError when the residual cache cannot hold all pages at once.
        """
        if self._offloaded is not None:
            self._offloaded.require(reads, by_layer=by_layer)
        self._begin_encode(encodes)
        self.anchor_places.sync()
        if self._offloaded is not None:
            self._offloaded.place(lends)
        yield
        self.finish_encode(encodes)
        if self._offloaded is not None:
            self._offloaded.return_lent_slots()

    def await_layer(self, layer: int) -> None:
        """Make the forward wait until the residuals of this layer are in the cache."""
        if self._offloaded is not None:
            self._offloaded.await_layer(layer)

    def encode_from(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        source: torch.Tensor,
        slots: RecordSlots,
    ) -> None:
        """Write the records of N pages of a layer: page i is source[i] of k, v [S, page_size,
        num_kv_heads, head_dim]. source: int32 on the device; entries of -1 are skipped. slots:
        record_slots_of() the pages, computed once for all layers of a forward."""
        encode_pages(
            k,
            v,
            source,
            self.anchors.layer(layer),
            slots.anchors,
            self.residuals.cache_layer(layer),
            slots.residuals,
            self.codec.settings,
            self.codec.target,  # type: ignore[arg-type]
            self.kernels,
        )

    def record_slots_of(self, pages: torch.Tensor) -> RecordSlots:
        """Return the present slots of pages [N] int32 on the device. Entries of -1 are no pages."""
        residuals = self.residual_slots.index_select(0, pages.clamp(min=0))
        return RecordSlots(self.anchor_places.on_device(pages), residuals)

    def exact_pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of K and V of all residual slots of a layer. Each is [slots, num_kv_heads,
        page_size, head_dim] of the model's KV dtype, contiguous in the last two. The target must
        be `exact`."""
        assert self.codec.target == "exact", (
            "int8 residuals hold corrections, not values: target must be exact"
        )
        geometry = self.geometry
        records = self.residuals.cache_layer(layer).view(geometry.dtype)
        shape = (*records.shape[:2], 2, geometry.page_size, geometry.head_dim)
        k, v = records[..., : 2 * geometry.page_size * geometry.head_dim].view(shape).unbind(2)
        return k, v

    # Committed pages

    def commit_pages(self, pages: Sequence[int]) -> None:
        """Encode window pages whose tokens are all committed. They stay in the window."""
        if not pages:
            return
        for page in pages:
            self.window.mark_committed(page)
        with self.placed(encodes=pages):
            for first in range(0, len(pages), COMMIT_PAGES):
                part = pages[first : first + COMMIT_PAGES]
                # Entries of -1 are skipped.
                index = torch.full((2, COMMIT_PAGES), -1, dtype=torch.int32)
                index[0, : len(part)] = torch.tensor([self.window.slots.slot_of(p) for p in part])
                index[1, : len(part)] = torch.tensor(part)
                send_into([(self._committing, index)])
                if self._commit_graph is not None:
                    self._commit_graph.replay()
                else:
                    self._encode_committing()

    def _encode_committing(self) -> None:
        source, pages = self._committing
        slots = self.record_slots_of(pages)
        for layer in range(self.geometry.num_layers):
            self.encode_from(layer, *self.window.layer(layer), source, slots)

    def capture_commits(self) -> None:
        """Capture a CUDA graph of the kernels that commit_pages() launches, one per layer. The
        kernels must have run once."""
        self._committing.fill_(-1)
        with captured_graph() as graph:
            self._encode_committing()
        self._commit_graph = graph

    def move_out_of_window(self, pages: Sequence[int]) -> None:
        assert self._encoded.issuperset(pages), "only a committed page may leave the recent window"
        for page in pages:
            self.window.release(page)

    def write_whole(
        self, pages: Sequence[int], k: torch.Tensor, v: torch.Tensor, *, anchors: bool = True
    ) -> None:
        """Encode free pages. Always writes anchors, which takes no longer. With a host store, the
        residual cache must have room for COMMIT_PAGES besides the pages that are being encoded."""
        assert not any(page in self.window.slots for page in pages), (
            "a page of the recent window is not free"
        )
        for first in range(0, len(pages), COMMIT_PAGES):
            part = pages[first : first + COMMIT_PAGES]
            with self.placed(encodes=part):
                rows = torch.arange(first, first + len(part), dtype=torch.int32)
                ids = torch.tensor(part, dtype=torch.int32)
                source, places = sent_together(self.device, [rows, ids])
                slots = self.record_slots_of(places)
                for layer in range(self.geometry.num_layers):
                    self.encode_from(layer, k[:, layer], v[:, layer], source, slots)
