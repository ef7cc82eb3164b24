"""KVSpec's pools as SGLang's KV cache object."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from sglang_kvspec.adapters.activation import debug_mode
from sglang_kvspec.adapters.compat.memory_pool import KVCache
from sglang_kvspec.adapters.compat.request_kv import kv_of
from sglang_kvspec.adapters.compat.runtime_context import get_parallel
from sglang_kvspec.adapters.gpus import kernels_on, visible_gpus
from sglang_kvspec.adapters.pool_sizing import (
    codec_of,
    describe,
    draft_copy_bytes,
    geometry_of,
    take_plan,
)
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.kv.prefix_tiers import PrefixTiers
from sglang_kvspec.kv.reference_cache import ReferenceKVCache
from sglang_kvspec.runtime.disaggregation.retracted_kv import RetractedKV
from sglang_kvspec.runtime.pages import PageKeeper
from sglang_kvspec.runtime.pressure import Pressure
from sglang_kvspec.runtime.remote_prefixes import EarlyStarts

logger = logging.getLogger(__name__)


class KVSpecPool(KVCache):  # type: ignore[misc]
    """SGLang's KV cache object over KVSpec's pools, for the kvspec attention backend alone.

    SGLang's per-slot accessors raise NotImplementedError: their use would bypass verification.
    """

    post_capture_active = False

    def __init__(self, kv: PagedKVCache, *, start_layer: int, end_layer: int, device: str) -> None:
        geometry = kv.geometry
        super().__init__(
            size=kv.plan.num_pages * geometry.page_size,
            page_size=geometry.page_size,
            dtype=geometry.dtype,
            layer_num=geometry.num_layers,
            device=device,
            enable_memory_saver=False,
            start_layer=start_layer,
            end_layer=end_layer,
        )
        self.kv = kv
        # Tiers for prefixes that leave the pool; set by the prefix cache.
        self.prefix_tiers: PrefixTiers | None = None
        # Requests that start on anchors; set by the prefix cache, None where no request may.
        self.early_starts: EarlyStarts | None = None
        self.pressure = Pressure()
        # Moves pages out of the recent window; set by the worker.
        self.keeper: PageKeeper | None = None
        # Keeps the KV of a retracted request, by its pages and tokens; set on a decode server.
        self.keep_retracted: Callable[[list[int], int], RetractedKV] | None = None
        # Called with freed pages, before anything can write to these pages again.
        self.freed_listeners: list[Callable[[list[int]], None]] = []
        self.head_num = geometry.num_kv_heads
        self.head_dim = geometry.head_dim
        self._finalize_allocation_log(self.size)

    def get_kv_size_bytes(self) -> int:
        return self.kv.hbm_nbytes

    def retire(self, req: Any, req_to_token_pool: Any) -> None:
        """Encode the committed pages of a request that ends, which SGLang caches as a prefix."""
        if self.keeper is None:
            return
        held = kv_of(req)
        slots = req_to_token_pool.req_to_token[held.req_pool_idx, : held.kv_committed_len]
        self.keeper.retire(slots[:: self.page_size].cpu().to(torch.int64) // self.page_size)

    def on_pages_freed(self, pages: list[int]) -> None:
        for listener in self.freed_listeners:
            listener(pages)
        self.kv.free_pages(pages)

    def on_all_pages_freed(self) -> None:
        for listener in self.freed_listeners:
            listener(list(range(1, self.kv.plan.num_pages + 1)))
        self.kv.free_all()

    def get_cpu_copy(self, indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Keep the KV of a request that a decode server retracts. indices: its slots. Other
        arguments differ by release, and concern caches that KVSpec does not serve."""
        assert self.keep_retracted is not None, (
            "only a decode server may keep KV of retracted requests"
        )
        return self.keep_retracted(self._pages_of(indices), len(indices))

    def load_cpu_copy(
        self, kv_cache_cpu: Any, indices: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """Bring back the KV of a retracted request. indices: its new slots. Other arguments: as
        with get_cpu_copy()."""
        kv_cache_cpu.restore(self._pages_of(indices))

    def _pages_of(self, indices: torch.Tensor) -> list[int]:
        pages: list[int] = (indices[:: self.page_size] // self.page_size).tolist()
        return pages

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Return no buffers: KVSpec's transfer backend asks for pages, not for addresses."""
        return [], [], []

    def _refuse(self) -> NoReturn:
        raise NotImplementedError("only the attention backend kvspec reads and writes KVSpec pages")

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        self._refuse()

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        self._refuse()

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._refuse()

    def set_kv_buffer(self, *args: Any, **kwargs: Any) -> None:
        self._refuse()

    def move_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        self._refuse()


def build_pool(kvc: Any, config: KVSpecConfig, max_total_num_tokens: int) -> KVSpecPool:
    """Allocate the pools that the sizing planned. Rank 0 logs what fits."""
    plan, geometry = take_plan(kvc), geometry_of(kvc)
    planned_tokens = plan.num_pages * geometry.page_size
    assert max_total_num_tokens == planned_tokens, "SGLang must use the tokens of the capacity plan"
    codec = codec_of(kvc, config)
    if kvc.device == "cpu":
        kv: PagedKVCache = ReferenceKVCache(geometry, codec, plan, torch.device("cpu"))
        if debug_mode() and plan.host_pages:
            kv.residuals.keep_checksums()
    else:
        device = torch.device(kvc.device, kvc.gpu_id)
        kv = GpuKVCache(geometry, codec, plan, device, kernels=config.kernels)
    parallel = get_parallel()
    if parallel.tp_rank == 0:
        copies = draft_copy_bytes(kvc, config)
        if kvc.device != "cpu":
            gpu = visible_gpus()[kvc.gpu_id]
            logger.info("KVSpec: %s, %s", gpu.name, kernels_on(gpu, config.kernels))
        logger.info(describe(plan, config, codec, geometry.page_size, parallel.tp_size, copies))
        if kvc.device != "cpu" and config.host_gb and not plan.host_pages:
            logger.warning(
                "--kvspec-host-gb %g is not used: as many tokens fit into GPU memory without it",
                config.host_gb,
            )
        if config.frees_anchors and not plan.pages_without_anchors:
            logger.warning(
                "keep_anchors=false has no effect: a prompt of the model's context length could "
                "need the anchors of all pages (raise the KV memory or --max-total-tokens, or "
                "lower --context-length)"
            )
    return KVSpecPool(
        kv,
        start_layer=kvc.layer_info.start_layer,
        end_layer=kvc.layer_info.end_layer,
        device=kvc.device,
    )
