"""Parts that unit tests share: one light, repeatable hypothesis profile and small KV caches."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from sglang_kvspec.codecs import make_codec
from sglang_kvspec.codecs.base import Codec
from sglang_kvspec.core.config import Target
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.reference_cache import ReferenceKVCache
from sglang_kvspec.planning.capacity import CapacityPlan, PageBytes

# Without a CUDA device kernels run in Triton's interpreter. An environment variable selects the
# interpreter when triton is imported, so the kernels are imported here, before any test module. The
# variable must not reach the servers that other tests start.
KERNELS = (
    "kvspec_kernels.ops.attention",
    "kvspec_kernels.ops.deterministic_attention",
    "kvspec_kernels.ops.encode",
    "kvspec_kernels.ops.append",
    "kvspec_kernels.ops.page_selection",
    "kvspec_kernels.ops.products",
    "kvspec_kernels.ops.int4_products",
    "kvspec_kernels.ops.int4_rounding",
    "kvspec_kernels.ops.copy_rows",
    "kvspec_kernels.ops.packed_exact",
    "kvspec_kernels.ops.steps",
    "kvspec_kernels.jit.encode_turboquant",
    "kvspec_kernels.jit.log4",
    "kvspec_kernels.jit.records",
    "kvspec_kernels.jit.turboquant",
    "kvspec_kernels.jit.uniform4",
    "kvspec_testkit.kernels.division",
    "kvspec_testkit.kernels.own_codec",
)
if not torch.cuda.is_available() and "triton" not in sys.modules:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for name in KERNELS:
            importlib.import_module(name)
        # Triton imports this module at the first launch, and the module reads the variable, too.
        importlib.import_module("triton.experimental.gluon")

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
# Hypothesis starts with the profile "ci" on a CI server.
if settings.get_current_profile_name() in ("default", "ci"):
    settings.load_profile("unit")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Run torch on one thread: small tensors are slower on many threads, and CI runners are
    shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_kv() -> Callable[..., ReferenceKVCache]:
    """Return a function that builds a ReferenceKVCache of a few small pages. Its memory starts as
    NaN and 0xFF bytes.

    cache_pages: None holds every page. store: False keeps residuals in the cache alone.
    """

    def make(
        *, dtype: torch.dtype = torch.float32, store: bool = True, **options: Any
    ) -> ReferenceKVCache:
        return _poisoned(ReferenceKVCache, _parts(dtype=dtype, store=store, **options))

    return make


@pytest.fixture(scope="session")
def make_device_kv() -> Callable[..., Any]:
    """Return a function that builds a GpuKVCache of a few small pages, with options as for make_kv.
    The cache encodes nothing: its `encodings` lists (layer, window slots, pages) of each call.
    encodes: encode by the codec in plain torch instead. copy_streams: streams of the copies to its
    store."""
    from sglang_kvspec.kv.gpu_cache import GpuKVCache, RecordSlots

    class EncodingKV(GpuKVCache):
        def encode_from(
            self,
            layer: int,
            k: torch.Tensor,
            v: torch.Tensor,
            source: torch.Tensor,
            slots: RecordSlots,
        ) -> None:
            assert k.stride() == v.stride()
            assert {part.dtype for part in (source, *slots)} == {torch.int32}
            used = source >= 0
            rows, (anchors, residuals) = source[used].long(), (part[used].long() for part in slots)
            record = self.codec.encode(k[rows], v[rows])
            self.anchors.layer(layer)[anchors] = record.anchor
            self.residuals.cache_layer(layer)[residuals] = record.residual

    class RecordingKV(GpuKVCache):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.encodings: list[tuple[int, list[int], list[int]]] = []

        def encode_from(
            self,
            layer: int,
            k: torch.Tensor,
            v: torch.Tensor,
            source: torch.Tensor,
            slots: RecordSlots,
        ) -> None:
            window_k, window_v = self.window.layer(layer)
            assert k is window_k
            assert v is window_v
            assert source.dtype == slots.anchors.dtype == torch.int32
            used = source >= 0
            self.encodings.append((layer, source[used].tolist(), slots.anchors[used].tolist()))

    def make(
        *,
        dtype: torch.dtype = torch.bfloat16,
        store: bool = False,
        copy_streams: Any = None,
        encodes: bool = False,
        **options: Any,
    ) -> GpuKVCache:
        parts = _parts(dtype=dtype, store=store, **options)
        return _poisoned(
            partial(EncodingKV if encodes else RecordingKV, copy_streams=copy_streams), parts
        )

    return make


def _poisoned(kind: Callable[..., Any], parts: tuple[KVGeometry, Codec, CapacityPlan]) -> Any:
    # In deterministic mode torch.empty fills new memory with NaN, or all bits set.
    torch.use_deterministic_algorithms(True)
    try:
        return kind(*parts, torch.device("cpu"))
    finally:
        torch.use_deterministic_algorithms(False)


def _parts(
    *,
    codec: str = "uniform4",
    target: Target = "exact",
    dtype: torch.dtype,
    num_layers: int = 1,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 32,
    num_pages: int = 12,
    window_pages: int = 6,
    cache_pages: int | None = None,
    kept_anchor_pages: int = 0,
    anchor_pages: int | None = None,
    packs: bool = False,
    store: bool,
) -> tuple[KVGeometry, Codec, CapacityPlan]:
    geometry = KVGeometry(num_layers, num_kv_heads, head_dim, page_size, dtype)
    sizes = {"page_size": page_size, "head_dim": head_dim}
    bound = make_codec(codec, target=target, dtype=dtype, packs=packs, **sizes)
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
            takes_anchors=packs and anchor_pages is not None,
        ),
        binding="KV memory",
        kept_anchor_pages=kept_anchor_pages,
        pages_without_anchors=0 if anchor_pages is None else num_pages - anchor_pages,
    )
    return geometry, bound, plan


@pytest.fixture
def encoded(make_kv: Callable[..., ReferenceKVCache]) -> Callable[..., ReferenceKVCache]:
    """Return a function that builds a KV cache whose pages 1..num_encoded are encoded, the first
    ones resident. Options are as for make_kv."""

    def make(num_encoded: int, **options: Any) -> ReferenceKVCache:
        kv = make_kv(**options)
        pages = list(range(1, num_encoded + 1))
        k = torch.randn((num_encoded, 32, 2, 16), generator=torch.Generator().manual_seed(0))
        kv.begin_encode(pages)
        kv.encode(0, torch.tensor(pages), k, k)
        kv.finish_encode(pages)
        return kv

    return make


@pytest.fixture
def run_machine(make_kv: Callable[..., ReferenceKVCache]) -> Callable[..., None]:
    """Return a function that runs a state machine, which is made from make_kv."""

    def run(machine: Callable[..., Any], steps: int, **options: Any) -> None:
        run_state_machine_as_test(
            partial(machine, make_kv), settings=settings(stateful_step_count=steps, **options)
        )

    return run
