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
        slots = [self.window.slots.slot_of(page) for page in pages]
        index = torch.tensor([slots, list(pages)], dtype=torch.int32)
        index = index.to(self.device, non_blocking=True)
        for layer in range(self.geometry.num_layers):
            self.encode_from(layer, *self.window.layer(layer), index[0], index[1])
        self.finish_encode(pages)

    def move_out_of_window(self, pages: Sequence[int]) -> None:
        assert self._encoded.issuperset(pages), "only a published page may leave the window"
        for page in pages:
            self.window.release(page)
