"""Everything that reads or writes the records of a KV cache takes the kernels of the cache."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvspec_kernels.formats import Log4Settings, Uniform4Settings
from kvspec_kernels.jit import cuda_encode
from kvspec_kernels.ops.cuda_coverage import uncovered
from kvspec_testkit.kernels.encoding import make_pages
from sglang_kvspec.codecs.registry import make_codec
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.gpu_cache import GpuKVCache, RecordSlots
from sglang_kvspec.planning.capacity import CapacityPlan, PageBytes
from sglang_kvspec.runtime import record_attention
from sglang_kvspec.runtime.device_pages import DevicePages
from sglang_kvspec.runtime.draft_rows import DraftRows
from sglang_kvspec.runtime.step_attention import AnchorStep
from sglang_kvspec.runtime.targets import exact
from sglang_kvspec.runtime.targets.int8 import DeterministicInt8Attention, Int8TargetAttention
from sglang_kvspec.runtime.targets.record_step import RecordStep

SIZE, HEADS, HEAD_DIM = 64, 1, 64
CPU = torch.device("cpu")


def make_kv(kernels, target="int8", device=CPU):
    settings = {"page_size": SIZE, "head_dim": HEAD_DIM, "dtype": torch.bfloat16}
    geometry = KVGeometry(1, HEADS, HEAD_DIM, SIZE, torch.bfloat16)
    plan = CapacityPlan(8, 4, 8, 0, PageBytes(1, 1, 1), "test")
    codec = make_codec("uniform4", target=target, **settings)
    return GpuKVCache(geometry, codec, plan, device, kernels=kernels)


def encode_a_page(kv):
    index = torch.zeros(1, dtype=torch.int32)
    kv.encode_from(0, *kv.window.layer(0), index, RecordSlots(index + 1, index))


def score_pages(kv):
    queries = SimpleNamespace(by_layer=torch.zeros((1, 2, 4, HEAD_DIM)), most=4)
    DevicePages(kv, queries, None, 2, 2, 4)


def encode_anchors_anew(kv):
    codec = replace(kv.codec, target="exact", packs=True)
    raw = torch.zeros((1, HEADS, codec.residual_bytes), dtype=torch.uint8)
    codec.packed._anchors_by_kernel(raw, kv.kernels)


OPERATIONS = {
    "encode": encode_a_page,
    "scores": score_pages,
    "anchors of residuals": encode_anchors_anew,
    "draft": lambda kv: AnchorStep(kv, 4, DraftRows(2, 4, 8, SIZE, CPU), 2),
    "step": lambda kv: RecordStep(kv, 4, DraftRows(2, 4, 8, SIZE, CPU), 2),
}


@pytest.mark.parametrize(("page_size", "heads", "head_dim"), [(64, 2, 64), (32, 1, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_anchors_of_raw_residuals_are_those_of_the_pages(page_size, heads, head_dim, dtype, device):
    codec = make_codec(
        "uniform4",
        target="exact",
        page_size=page_size,
        head_dim=head_dim,
        dtype=dtype,
        packs=True,
    )
    k, v = make_pages(3, page_size, heads, head_dim, dtype)
    wanted = codec.encode(k, v)
    raw = wanted.residual.to(device)
    assert torch.equal(codec.packed._anchors_by_kernel(raw, "triton").cpu(), wanted.anchor)
    assert torch.equal(raw.cpu(), wanted.residual), "raw residuals stay as they are"
    assert torch.equal(codec.packed.anchors_of(wanted.residual), wanted.anchor)


@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_a_store_encodes_its_own_anchors_by_the_kernels_of_the_cache(kernels):
    kv = make_kv(kernels, "exact")
    codec = replace(kv.codec, packs=True)
    plan = replace(kv.plan, host_pages=8, page_bytes=PageBytes(1, 1, 1, 1, takes_anchors=True))
    made = GpuKVCache(kv.geometry, codec, plan, CPU, kernels=kernels)
    assert made.residuals.store._anchors._kernels == kernels


@pytest.mark.parametrize("name", OPERATIONS)
def test_cuda_is_asked_for(name):
    """No CUDA kernel covers a CPU."""
    with pytest.raises(ValueError, match="backend 'cuda' needs"):
        OPERATIONS[name](make_kv("cuda"))


@pytest.mark.parametrize("kernels", ["auto", "triton"])
@pytest.mark.parametrize("name", ["draft", "step"])
def test_triton_runs_here(name, kernels, device):
    if device.type == "cpu":
        OPERATIONS[name](make_kv(kernels))


def test_exact_records_and_tails_have_a_triton_kernel_only(device):
    rows = DraftRows(2, 4, 8, SIZE, device)
    RecordStep(make_kv("cuda", "exact", device), 4, rows, 2)
    AnchorStep(make_kv("cuda", "exact", device), 4, rows, 2, past=False)


@pytest.mark.parametrize(
    ("kernels", "is_covered", "attention", "tiles", "rows_of_a_pass"),
    [
        ("auto", True, Int8TargetAttention, (16, 32, 64, 128), None),
        ("auto", False, Int8TargetAttention, (16, 32, 64), 64),
        ("triton", True, Int8TargetAttention, (16, 32, 64), 64),
        ("auto", True, DeterministicInt8Attention, (64, 128), 128),
        ("triton", True, DeterministicInt8Attention, (64,), 64),
    ],
)
def test_sizes_of_verifications_follow_from_their_kernels(
    monkeypatch, kernels, is_covered, attention, tiles, rows_of_a_pass
):
    monkeypatch.setattr(record_attention, "verify_supported", lambda *sizes: is_covered)
    made = attention(make_kv(kernels), 4)
    assert made.query_tiles == tiles
    assert made.rows_of_a_pass == rows_of_a_pass


@pytest.mark.parametrize(
    ("settings", "target", "head_dim", "capability", "expected"),
    [
        (Uniform4Settings.for_page(64), "int8", 128, (9, 0), ()),
        (Log4Settings.for_page(64), "exact", 64, (9, 0), ()),
        (Uniform4Settings.for_page(64, 2), "exact", 128, (9, 0), ("encoding",)),
        (Uniform4Settings.for_page(64), "int8", 96, (9, 0), ("verifications",)),
        (Uniform4Settings.for_page(64), "exact", 80, (9, 0), ("drafts", "encoding")),
        (
            Uniform4Settings.for_page(64),
            "int8",
            128,
            (12, 0),
            ("drafts", "verifications", "encoding"),
        ),
    ],
)
def test_operations_without_a_cuda_kernel_are_named(
    monkeypatch, settings, target, head_dim, capability, expected
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    # The cache would keep the answer of another device.
    monkeypatch.setattr(cuda_encode, "supported", cuda_encode.supported.__wrapped__)
    shape = (64, head_dim, 32, 8, torch.bfloat16, torch.device("cuda"))
    assert uncovered(settings, target, *shape) == expected


@pytest.mark.parametrize(("hopper", "many"), [(True, "fa3"), (False, "fa2")])
def test_exact_prefills_take_fa3_on_hopper_only(monkeypatch, hopper, many):
    made = []

    class Pages:
        def __init__(self, kv, num_qo_heads):
            pass

        def make_wrapper(self, layout, backend="fa2"):
            made.append((layout, backend))

        def make_ragged_wrapper(self, backend):
            made.append(("ragged", backend))

    monkeypatch.setattr(exact, "FlashInferPages", Pages)
    monkeypatch.setattr(exact, "is_hopper", lambda device: hopper)
    exact.ExactTargetAttention(make_kv("auto", "exact"), 4)
    assert made == [("HND", "fa2"), ("NHD", "fa2"), ("HND", many), ("ragged", many)]
