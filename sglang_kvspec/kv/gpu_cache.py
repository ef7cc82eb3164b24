"""The KV cache of one rank on a GPU: kernels encode, and read residuals from GPU memory only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from kvspec_kernels.ops.encode import encode_pages
from sglang_kvspec.codecs.base import Codec
from sglang_kvspec.core.errors import UnsupportedError
from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.lanes import Lanes, make_lanes
from sglang_kvspec.kv.offloaded_residuals import OffloadedResidualCache
from sglang_kvspec.kv.record_pool import RecordPool
from sglang_kvspec.kv.residual_cache import ResidualCache
from sglang_kvspec.kv.staged_records import StagedRecords
from sglang_kvspec.kv.transfers import send_into, sent_together, to_device
from sglang_kvspec.planning.capacity import CapacityPlan

# Pages that publish() encodes at once.
PUBLISH_PAGES = 16


class GpuKVCache(PagedKVCache):
    """A full page is encoded as soon as all its tokens are committed ("published"), so that
    verifications read records alone; while it is among a request's newest it stays in the window
    as well, where drafts read it in full precision.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        codec: Codec,
        plan: CapacityPlan,
        device: torch.device,
        lanes: Lanes | None = None,
    ) -> None:
        """lanes: what copies to and from a host store run in, the device's own streams unless
        given. Raises UnsupportedError for fp32."""
        if geometry.dtype not in (torch.bfloat16, torch.float16):
            raise UnsupportedError(
                f"--kvspec on a GPU serves bf16 and fp16 KV caches, got {geometry.dtype}"
            )
        self._lanes = lanes or make_lanes(device)
        self._staged = StagedRecords(device, self._lanes.main)
        self._hosted: OffloadedResidualCache | None = None
        super().__init__(geometry, codec, plan, device, torch.device("cpu"))
        own = torch.arange(-1, plan.num_pages, dtype=torch.int32, device=device).clamp_(min=0)
        # Kernels find a page's residual by this; page 0 is never looked up.
        self.residual_slots: torch.Tensor = self._hosted.slots_on_device if self._hosted else own
        # Window slots to encode, and as what pages.
        self._published = torch.full((2, PUBLISH_PAGES), -1, dtype=torch.int32, device=device)
        self._publishing: torch.cuda.CUDAGraph | None = None

    def _make_residuals(self) -> ResidualCache:
        if not self.plan.host_pages:
            return super()._make_residuals()
        parts = (self.geometry, self.plan, self.codec.residual_bytes, self.device)
        self._hosted = OffloadedResidualCache(*parts, self._lanes)
        return self._hosted

    def warm_up(self) -> None:
        """Compile what copies of residuals run, while no page is in use."""
        if self._hosted is not None:
            self._hosted.warm_up()

    def require_residuals(self, pages: Iterable[int], *, by_layer: bool = False) -> None:
        """The next forward reads these encoded pages at the target precision. by_layer: it waits
        for them with await_layer() before each layer. Raises CapacityError when the residual cache
        cannot hold them all at once."""
        if self._hosted is not None:
            self._hosted.require(pages, by_layer=by_layer)

    def prefetch_residuals(self, pages: Iterable[int]) -> None:
        """The prefill's forward requires them, layer by layer."""

    def await_layer(self, layer: int) -> None:
        """The forward goes on to read residuals of this layer."""
        if self._hosted is not None:
            self._hosted.await_layer(layer)

    def await_residuals(self, pages: Iterable[int]) -> None:
        if self._hosted is not None:
            self._hosted.await_fetches(pages)

    def place_residuals(self, pages: Iterable[int]) -> None:
        """The next forward encodes these pages before it attends, also such as it may not keep; its
        kernels find all residuals by `residual_slots` now."""
        if self._hosted is not None:
            self._hosted.lend(pages)
            self._hosted.sync()

    def end_forward(self) -> None:
        """A forward that place_residuals() prepared is given to the device."""
        if self._hosted is not None:
            self._hosted.take_back()

    def encode_from(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        source: torch.Tensor,
        pages: torch.Tensor,
        residual_slots: torch.Tensor,
    ) -> None:
        """Write the records of pages [N] of a layer from k, v [S, page_size, num_kv_heads,
        head_dim], of which page i is source[i]. source and pages are int32 on the device; entries
        of -1 in both are skipped. residual_slots: as residual_slots_of(pages) gives, once for all
        layers of a forward."""
        encode_pages(
            k,
            v,
            source,
            self.anchors.layer(layer),
            pages,
            self.residuals.cache_layer(layer),
            residual_slots,
            self.codec.settings,
            self.codec.target,  # type: ignore[arg-type]
        )

    def residual_slots_of(self, pages: torch.Tensor) -> torch.Tensor:
        """Where residuals of pages [N], int32 on the device, are now: like pages, anything valid
        where they are -1."""
        return self.residual_slots.index_select(0, pages.clamp(min=0))

    def exact_pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all residual slots, in place, where the target is `exact`: each [slots,
        num_kv_heads, page_size, head_dim] of the model's KV dtype, contiguous in the last two."""
        assert self.codec.target == "exact", "residuals are corrections, not values"
        geometry = self.geometry
        records = self.residuals.cache_layer(layer).view(geometry.dtype)
        shape = (*records.shape[:2], 2, geometry.page_size, geometry.head_dim)
        k, v = records[..., : 2 * geometry.page_size * geometry.head_dim].view(shape).unbind(2)
        return k, v

    def publish(self, pages: Sequence[int]) -> None:
        """Encode window pages whose tokens are all committed; they stay in the window."""
        if not pages:
            return
        for page in pages:
            self.window.mark_committed(page)
        # Whatever the last forward read may make room.
        self.require_residuals(())
        self._begin_encode(pages)
        self.place_residuals(())
        for first in range(0, len(pages), PUBLISH_PAGES):
            part = pages[first : first + PUBLISH_PAGES]
            # Entries of -1 are skipped.
            index = torch.full((2, PUBLISH_PAGES), -1, dtype=torch.int32)
            index[0, : len(part)] = torch.tensor([self.window.slots.slot_of(p) for p in part])
            index[1, : len(part)] = torch.tensor(part)
            send_into([(self._published, index)])
            if self._publishing is not None:
                self._publishing.replay()
            else:
                self._encode_published()
        self.finish_encode(pages)

    def _encode_published(self) -> None:
        source, pages = self._published
        slots = self.residual_slots_of(pages)
        for layer in range(self.geometry.num_layers):
            self.encode_from(layer, *self.window.layer(layer), source, pages, slots)

    def capture_publishing(self) -> None:
        """Make a CUDA graph of what publish() launches, a kernel a layer. Not before the kernels
        ran once."""
        self._published.fill_(-1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._encode_published()
        self._publishing = graph

    def encode_committed(self, pages: Iterable[int]) -> None:
        """They were published as they became full."""

    def _complete(self, page: int) -> None:
        self.publish([page])

    # Records from elsewhere

    def warm_up_records(self) -> None:
        pools = [self.anchors] if self._hosted is not None else [self.anchors, self.residuals.cache]
        for pool in pools:
            self._staged.write(pool, [0], self._staged.read(pool, [0]))
        if self.plan.kept_anchor_pages:
            self._staged.copy(self.anchors, [0], self.kept_anchors, [0])

    def write_anchors(self, pages: Sequence[int], records: torch.Tensor) -> None:
        self._staged.write(self.anchors, pages, records)

    def write_residuals(self, pages: Sequence[int], records: torch.Tensor) -> None:
        if self._hosted is not None:
            self._hosted.write_pages(pages, records)
        else:
            self._staged.write(self.residuals.cache, self._slots_of(pages), records)

    def read_anchors(self, pages: Sequence[int]) -> torch.Tensor:
        return self._staged.read(self.anchors, pages)

    def read_residuals(self, pages: Sequence[int]) -> torch.Tensor:
        if self._hosted is not None:
            return self._hosted.read_pages(pages)
        self.residuals.check_readable(pages)
        return self._staged.read(self.residuals.cache, self._slots_of(pages))

    def _copy_anchors(
        self,
        source: RecordPool,
        source_slots: Sequence[int],
        target: RecordPool,
        target_slots: Sequence[int],
    ) -> None:
        self._staged.copy(source, source_slots, target, target_slots)

    # Full precision from elsewhere

    def read_whole(self, pages: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.codec.target == "exact", "residuals are corrections, not values"
        records = to_device(self.device, self.read_residuals(pages))
        k, v = self.codec.decode_exact(records.flatten(0, 1))
        shape = (len(pages), self.geometry.num_layers, *k.shape[1:])
        return k.view(shape), v.view(shape)

    def write_whole(
        self, pages: Sequence[int], k: torch.Tensor, v: torch.Tensor, *, anchors: bool = True
    ) -> None:
        """Writes anchors in any case, which takes no longer. With a host store the residual cache
        must have room for PUBLISH_PAGES beside what is being encoded."""
        for first in range(0, len(pages), PUBLISH_PAGES):
            part = pages[first : first + PUBLISH_PAGES]
            # Whatever the last forward read may make room.
            self.require_residuals(())
            self.begin_encode(part)
            self.place_residuals(())
            rows = torch.arange(first, first + len(part), dtype=torch.int32)
            ids = torch.tensor(part, dtype=torch.int32)
            source, places = sent_together(self.device, [rows, ids])
            slots = self.residual_slots_of(places)
            for layer in range(self.geometry.num_layers):
                self.encode_from(layer, k[:, layer], v[:, layer], source, places, slots)
            self.finish_encode(part)

    def _slots_of(self, pages: Sequence[int]) -> list[int]:
        return [self.residuals.cache_slots.slot_of(page) for page in pages]

    def move_out_of_window(self, pages: Sequence[int]) -> None:
        assert self._encoded.issuperset(pages), "only a published page may leave the window"
        for page in pages:
            self.window.release(page)
