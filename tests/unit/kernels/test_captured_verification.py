"""Verifications over tensors at fixed addresses, against ReferenceAttention.

On a CPU they run in Triton's interpreter, with a stand-in for FlashInfer; on a GPU from CUDA
graphs.
"""

from __future__ import annotations

import sys

import pytest
import torch

from kvspec_kernels.jit import chunks, cuda_verify
from kvspec_testkit.runtime import paged_prefill
from kvspec_testkit.runtime.attention_pair import AttentionPair
from kvspec_testkit.runtime.captured_verification import CapturedVerification
from sglang_kvspec.core.seams import TARGET_ATTENTIONS
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.runtime.draft_rows import DraftRows
from sglang_kvspec.runtime.piggyback_rows import PiggybackRows
from sglang_kvspec.runtime.targets import int8
from sglang_kvspec.runtime.verify_rows import VerifyRows
from sglang_kvspec.runtime.verify_sizes import VerifySize

PAGE, NUM_PAGES, MAX_TOKENS, MAX_ROWS = 64, 12, 16, 3
# Both sides round to bf16 (2^-9 relative). The GPU computes 8-bit pages in fp16. A wrong page, slot
# or length gives errors of the order of 1.
TOLERANCE = 0.02
TARGETS = pytest.mark.parametrize(
    "target", ["exact", "int8", "deterministic", "int8_deterministic"]
)


@pytest.fixture
def make_pair(monkeypatch, device):
    if device.type == "cpu":
        monkeypatch.setitem(sys.modules, "flashinfer", paged_prefill)

    def make(target, cache_pages=NUM_PAGES):
        # A small size for the interpreter, and on a GPU a size that FlashInfer has.
        head_dim, num_layers = (32, 1) if device.type == "cpu" else (128, 2)
        attention = TARGET_ATTENTIONS.load(target)
        pair = AttentionPair(
            "uniform4",
            attention.target,
            KVGeometry(num_layers, 1, head_dim, PAGE, torch.bfloat16),
            device,
            num_qo_heads=2,
            num_pages=NUM_PAGES,
            cache_pages=cache_pages,
            tolerance=TOLERANCE,
            attention=attention,
        )
        # On a GPU this memory may be that of an earlier pair, with the same records.
        for layer in range(num_layers):
            pair.kv.anchors.layer(layer).fill_(255)
            pair.kv.residuals.cache_layer(layer).fill_(255)
        return pair

    return make


def captured(pair, *sizes):
    """Return verifications of these sizes over one VerifyRows."""
    return made_over(pair, rows_of(pair), sizes)


def rows_of(pair):
    splits = pair.attention.splits_by_page
    return VerifyRows(
        MAX_TOKENS,
        MAX_ROWS,
        2 * MAX_ROWS if splits else MAX_TOKENS,
        max_pages=NUM_PAGES,
        max_past=2 * NUM_PAGES,
        max_tail=2 * MAX_ROWS,
        max_encoded=MAX_ROWS if splits else 0,
        page_size=PAGE,
        device=pair.kv.device,
    )


def captured_with_piggyback(pair, *sizes, max_piggyback=2):
    """Return verifications of these sizes, in whose forwards other requests may draft."""
    verify = rows_of(pair)
    device = pair.kv.device
    tokens = torch.zeros((2, max_piggyback + MAX_TOKENS), dtype=torch.int64, device=device)
    drafts = DraftRows(max_piggyback, 1, NUM_PAGES, PAGE, device, tokens[:, :max_piggyback])
    return made_over(pair, verify, sizes, PiggybackRows(drafts, verify, tokens))


def made_over(pair, rows, sizes, piggyback=None):
    made = pair.attention.make_verifications(rows)
    return [CapturedVerification(pair, rows, made.make(size), size, piggyback) for size in sizes]


@TARGETS
def test_verifications_one_after_another(make_pair, target):
    pair = make_pair(target)
    large, small = captured(pair, VerifySize(16, 12), VerifySize(4, 2))
    pair.prefill(a=PAGE + 60, b=PAGE, c=3)
    # a fills a page and begins the next, b begins a page, and c stays in its first page.
    large.verify({"a": 7}, a=9, b=2, c=5)
    # Fewer requests and tokens: the data of the larger verification must have no effect.
    small.verify(b=2)
    pair.verify(a=2, b=3)
    small.verify({"c": 1}, c=2, a=1)


@TARGETS
def test_residuals_that_come_from_the_host(make_pair, target):
    pair = make_pair(target, cache_pages=3)
    (both,) = captured(pair, VerifySize(16, 12))
    pair.prefill(a=PAGE + 60)
    pair.prefill(b=2 * PAGE + 3)
    both.verify({"a": 6}, a=9)
    both.verify(b=2)
    both.verify(a=3)
    assert pair.kv.residuals.bytes_fetched


@TARGETS
def test_piggyback_drafts_are_made_in_the_same_forward(make_pair, target):
    pair = make_pair(target)
    large, small = captured_with_piggyback(pair, VerifySize(16, 12), VerifySize(4, 2))
    pair.prefill(a=PAGE + 60, b=PAGE - 2, c=3)
    # b fills its page with its second draft and begins another with the third.
    small.verify(piggyback={"b": 0}, a=2)
    large.verify({"a": 7}, piggyback={"b": 1, "c": 0}, a=9)
    small.verify(piggyback={"b": 2}, c=2)
    # No request piggybacks; earlier piggyback drafts have no effect.
    large.verify({"b": 3}, a=3, b=4)
    small.verify(piggyback={"b": 0, "a": 0}, c=1)


def test_piggyback_drafts_read_anchors_alone(make_pair):
    """Residuals of the requests that draft are not fetched."""
    pair = make_pair("int8", cache_pages=3)
    (both,) = captured_with_piggyback(pair, VerifySize(16, 12))
    pair.prefill(a=2 * PAGE + 3)
    pair.prefill(b=3 * PAGE + 60)
    both.verify(b=1)
    fetched = pair.kv.residuals.bytes_fetched
    both.verify(piggyback={"a": 0}, b=1)
    assert pair.kv.residuals.bytes_fetched == fetched
    both.verify(piggyback={"b": 0}, a=9)


def test_nothing_happens_once_cleared(make_pair):
    pair = make_pair("exact")
    (one,) = captured(pair, VerifySize(4, 4))
    pair.prefill(a=70)
    one.verify(a=3)
    layers = range(pair.geometry.num_layers)
    before = [part.clone() for layer in layers for part in pair.kv.window.layer(layer)]
    one.run_cleared()
    after = [part for layer in layers for part in pair.kv.window.layer(layer)]
    assert all(same_bits(*both) for both in zip(before, after, strict=True))


def same_bits(one, other):
    """Compare bit by bit, since memory that was never written may hold NaN."""
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def slots_are_not_cleared(monkeypatch):
    monkeypatch.setattr("sglang_kvspec.runtime.verify_rows.filled", lambda values, *_: values)


def pages_are_not_encoded_on_the_way(monkeypatch):
    monkeypatch.setattr(GpuKVCache, "encode_from", lambda *arguments: None)


@pytest.mark.parametrize("fault", [slots_are_not_cleared, pages_are_not_encoded_on_the_way])
def test_a_fault_is_found(make_pair, monkeypatch, fault):
    pair = make_pair("int8")
    pair.prefill(a=PAGE + 60, b=2)
    fault(monkeypatch)
    (one,) = captured(pair, VerifySize(16, 12))
    with pytest.raises(AssertionError, match=r"relative error|not 0"):  # noqa: PT012
        one.verify({"a": 6}, a=9, b=5)
        one.verify(b=2)


def test_a_verification_without_room_for_partial_results_is_not_captured(make_pair, monkeypatch):
    """Room is needed for the parts that a size has tokens for, not for all that there may be."""
    monkeypatch.setattr(chunks, "CHUNK_TOKENS", PAGE)
    pair = make_pair("int8_deterministic")
    small, large = VerifySize(2, 2), VerifySize(MAX_TOKENS, 12)
    made = pair.attention.make_verifications(rows_of(pair))
    assert made.has_room(small)
    assert made.has_room(large)
    needed = [made._nbytes(size) for size in (small, large)]
    assert needed[0] < needed[1]
    monkeypatch.setattr(int8, "MOST_BYTES_CAPTURED", needed[1] - 1)
    assert made.has_room(small)
    assert not made.has_room(large)
    # Kernels of short chunks are of no use to other tests.
    cuda_verify._verify_kernel.cache_clear()
