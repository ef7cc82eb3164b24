"""What the unit tests share: one light, repeatable hypothesis profile and small KV caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from sglang_kvspec.codecs import make_codec
from sglang_kvspec.planning.capacity import CapacityPlan, PageBytes
from sglang_kvspec.pools.geometry import KVGeometry
from sglang_kvspec.pools.tiered_kv import TieredKV

# Generated cases are the same in every run; `--hypothesis-profile=explore` looks for new ones.
settings.register_profile(
    "unit",
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "explore", settings.get_profile("unit"), derandomize=False, max_examples=1000
)
# Hypothesis starts with "ci" where it sees a CI server.
if settings.get_current_profile_name() in ("default", "ci"):
    settings.load_profile("unit")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors are slower on many threads, and CI runners are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_kv() -> Callable[..., TieredKV]:
    """Builds a TieredKV of a few small pages whose memory starts as NaN and 0xFF bytes.

    cache_pages None holds every page; store False keeps residuals in the cache alone.
    """

    def make(
        *,
        codec: str = "log4",
        target: str = "exact",
        dtype: torch.dtype = torch.float32,
        num_layers: int = 1,
        num_kv_heads: int = 2,
        head_dim: int = 16,
        page_size: int = 32,
        num_pages: int = 12,
        window_pages: int = 6,
        cache_pages: int | None = None,
        store: bool = True,
    ) -> TieredKV:
        geometry = KVGeometry(num_layers, num_kv_heads, head_dim, page_size, dtype)
        sizes = {"page_size": page_size, "head_dim": head_dim, "dtype": dtype}
        bound = make_codec(codec, target=target, **sizes)
        records = num_layers * num_kv_heads
        plan = CapacityPlan(
            num_pages=num_pages,
            window_pages=window_pages,
            cache_pages=num_pages if cache_pages is None else cache_pages,
            host_pages=num_pages if store else 0,
            page_bytes=PageBytes(
                plain=geometry.plain_page_bytes,
                anchor=records * bound.anchor_bytes,
                residual=records * bound.residual_bytes,
            ),
            binding="KV memory",
        )
        # In deterministic mode torch.empty fills new memory with NaN, or all bits set.
        torch.use_deterministic_algorithms(True)
        try:
            return TieredKV(geometry, bound, plan, torch.device("cpu"))
        finally:
            torch.use_deterministic_algorithms(False)

    return make
