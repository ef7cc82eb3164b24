"""The KV cache of one rank on a GPU: kernels encode, and every residual lies in GPU memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvspec_kernels.ops.encode import encode_pages
from sglang_kvspec.codecs.base import Codec
from sglang_kvspec.core.errors import UnsupportedError
from sglang_kvspec.planning.capacity import CapacityPlan
from sglang_kvspec.pools.geometry import KVGeometry
from sglang_kvspec.pools.kv_tiers import KVTiers

# Pages that publish() encodes at once.
PUBLISH_PAGES = 16


class DeviceKV(KVTiers):
    """A full page is encoded as soon as all its tokens are committed ("published"), so that
    verifications read records alone; while it is among a request's newest it stays in the window
    as well, where drafts read it in full precision.
    """

    def __init__(
        self, geometry: KVGeometry, codec: Codec, plan: CapacityPlan, device: torch.device
    ) -> None:
        """Raises UnsupportedError for a plan with a host store or for fp32."""
        if plan.host_pages:
            raise UnsupportedError("--kvspec-host-gb must be 0 or unset on a GPU in this version")
        if geometry.dtype not in (torch.bfloat16, torch.float16):
            raise UnsupportedError(
                f"--kvspec on a GPU serves bf16 and fp16 KV caches, got {geometry.dtype}"
            )
        super().__init__(geometry, codec, plan, device, torch.device("cpu"))
        # Kernels find a page's residual by this; page 0 is never looked up.
        slots = torch.arange(-1, plan.num_pages, dtype=torch.int32, device=device)
        self.residual_slots = slots.clamp_(min=0)
        # Window slots to encode, and as what pages.
        self._published = torch.full((2, PUBLISH_PAGES), -1, dtype=torch.int32, device=device)
        self._publishing: torch.cuda.CUDAGraph | None = None

    def encode_from(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        source: torch.Tensor,
        pages: torch.Tensor,
    ) -> None:
        """Write the records of pages [N] of a layer from k, v [S, page_size, num_kv_heads,
        head_dim], of which page i is source[i]. source and pages are int32 on the device."""
        encode_pages(
            k,
            v,
            source,
            self.anchors.layer(layer),
            pages,
            self.residuals.cache_layer(layer),
            pages - 1,
            self.codec.settings,
            self.codec.target,  # type: ignore[arg-type]
        )

    def publish(self, pages: Sequence[int]) -> None:
        """Encode window pages whose tokens are all committed; they stay in the window."""
        if not pages:
            return
        for page in pages:
            self.window.mark_committed(page)
        self._begin_encode(pages)
        for first in range(0, len(pages), PUBLISH_PAGES):
            part = pages[first : first + PUBLISH_PAGES]
            # Entries of -1 are skipped.
            index = torch.full((2, PUBLISH_PAGES), -1, dtype=torch.int32)
            index[0, : len(part)] = torch.tensor([self.window.slots.slot_of(p) for p in part])
            index[1, : len(part)] = torch.tensor(part)
            if self.device.type == "cuda":
                index = index.pin_memory()
            self._published.copy_(index, non_blocking=True)
            if self._publishing is not None:
                self._publishing.replay()
            else:
                self._encode_published()
        self.finish_encode(pages)

    def _encode_published(self) -> None:
        for layer in range(self.geometry.num_layers):
            self.encode_from(layer, *self.window.layer(layer), *self._published)

    def capture_publishing(self) -> None:
        """Make a CUDA graph of what publish() launches, a kernel a layer. Not before the kernels
        ran once."""
        self._published.fill_(-1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._encode_published()
        self._publishing = graph

    def move_out_of_window(self, pages: Sequence[int]) -> None:
        assert self._encoded.issuperset(pages), "only a published page may leave the window"
        for page in pages:
            self.window.release(page)
