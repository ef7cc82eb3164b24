"""DeviceAttention over a residual cache of a few pages, against ReferenceAttention.

On a CPU it runs in Triton's interpreter, with a stand-in for FlashInfer. Slots, layouts and page
moves are those of a GPU.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from kvspec_testkit.runtime import paged_prefill
from kvspec_testkit.runtime.attention_pair import AttentionPair
from sglang_kvspec.core.errors import CapacityError
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.host_copies import HostCopies
from sglang_kvspec.kv.offloaded_residuals import OffloadedResidualCache
from sglang_kvspec.kv.page_records import copy_in, copy_out
from sglang_kvspec.kv.residual_table import ResidualState
from sglang_kvspec.runtime.draft_rows import DraftRows
from sglang_kvspec.runtime.head_lists import HeadLists

PAGE = 64
# Both sides round to bf16 (2^-9 relative). The GPU computes 8-bit pages in fp16. A wrong page, slot
# or length gives errors of the order of 1.
TOLERANCE = 0.02


@pytest.fixture
def pair(monkeypatch, device):
    if device.type == "cpu":
        monkeypatch.setitem(sys.modules, "flashinfer", paged_prefill)
    # A small size for the interpreter, and on a GPU a size that FlashInfer has.
    head_dim = 32 if device.type == "cpu" else 128
    geometry = KVGeometry(2, 1, head_dim, PAGE, torch.bfloat16)
    return partial(
        AttentionPair,
        geometry=geometry,
        device=device,
        num_qo_heads=2,
        num_pages=24,
        tolerance=TOLERANCE,
    )


@pytest.mark.parametrize("packs", [False, True], ids=["raw", "packed"])
def test_pages_are_fetched_for_every_reader(pair, packs):
    both = pair("uniform4", "exact", cache_pages=6, packs=packs)
    both.prefill(a=4 * PAGE + 7)
    both.prefill(b=3 * PAGE + 60)
    # A second chunk, which reads evicted pages.
    both.prefill(a=PAGE)
    both.verify(a=3)
    # The verification fills a page and begins the next. The accepted tokens end before that.
    both.verify({"b": 2}, b=9)
    both.verify(b=5)
    both.verify(a=1)
    both.free("a")
    both.prefill(c=5 * PAGE)
    both.verify(b=2)
    both.verify(c=2)
    assert both.kv.residuals.bytes_fetched >= 8
    assert len(both.encoded("bc")) > both.kv.plan.cache_pages


@pytest.mark.parametrize(
    ("codec", "target", "packs"),
    [("log4", "exact", False), ("uniform4", "int8", False), ("uniform4", "exact", True)],
)
def test_pages_that_were_away_read_as_before(pair, codec, target, packs):
    both = pair(codec, target, cache_pages=5, packs=packs)
    both.prefill(a=3 * PAGE + 7)
    both.prefill(b=2 * PAGE + 60)
    kv = both.kv
    pages = [page for page in both.encoded("ab") if page not in kv.window.slots]
    records = copy_out(kv, pages)
    kv.free_pages(pages)
    # After this read all other pages are in the store, and the content of the cache does not
    # matter.
    kv.records.read_residuals(both.encoded("ab"))
    kv.residuals.evict(kv.residuals.table.pages_in(both.encoded("ab"), ResidualState.RESIDENT))
    for layer in range(both.geometry.num_layers):
        kv.anchors.layer(layer)[torch.tensor(pages, device=kv.device)] = 255
        kv.residuals.cache_layer(layer).fill_(255)
    copy_in(kv, pages, records)
    both.verify(a=3)
    both.prefill(b=PAGE)
    rows = DraftRows(2, 1, 8, PAGE, kv.device)
    both.draft(rows, 0, a=1, b=1)
    both.verify(b=2)


@pytest.mark.parametrize("packs", [False, True], ids=["raw", "packed"])
def test_repeats_read_the_target_and_store_nothing(pair, packs):
    both = pair("uniform4", "exact", cache_pages=6, packs=packs)
    both.prefill(a=3 * PAGE + 7)
    both.prefill(b=2 * PAGE)
    encoded, used = both.encoded("ab"), len(both.kv.window.slots)
    # Longer than the pages of the request, from the middle of a page and from its start.
    both.repeat(a=5 * PAGE)
    both.repeat(b=PAGE + 3)
    both.repeat(a=2)
    assert (both.encoded("ab"), len(both.kv.window.slots)) == (encoded, used)
    both.verify(a=3)
    both.prefill(b=PAGE)
    both.verify(b=2)


def test_int8_has_slots_for_pages_that_a_verification_fills(pair):
    both = pair("uniform4", "int8", cache_pages=3)
    both.prefill(a=PAGE + 60)
    both.prefill(b=2 * PAGE)
    # The verification fills a page and begins the next. In the end the cache holds no page of b.
    both.verify({"a": 2}, a=9)
    both.verify(a=5)
    both.verify(b=2)
    assert both.kv.residuals.bytes_fetched
    assert len(both.encoded("ab")) > both.kv.plan.cache_pages


def test_drafts_continue_those_of_an_earlier_round(pair, device):
    """The batch has changed, and drafts cross the end of a page."""
    both = pair("uniform4", "exact", cache_pages=6)
    both.prefill(a=PAGE + 61)
    both.prefill(b=70)
    rows = DraftRows(2, 8, 24, PAGE, device)
    both.draft(rows, 0, a=2, b=2)
    both.draft(DraftRows(1, 8, 24, PAGE, device), 2, a=4)
    # b continues later.
    both.draft(rows, 2, b=3)
    both.verify({"a": 5}, a=7)
    both.verify(b=6)


def test_drafts_of_layers_and_heads_that_read_pages_of_their_own(pair, device):
    both = pair(
        "uniform4",
        "exact",
        cache_pages=6,
        geometry=replace(pair.keywords["geometry"], num_kv_heads=2),
    )
    both.prefill(a=4 * PAGE + 5)
    both.prefill(b=PAGE + 61)
    rows = DraftRows(2, 8, 24, PAGE, device, lists=HeadLists(2, 2, device))
    # The newest full page is in the window, which a GPU always reads.
    seen = {"a": torch.tensor([[[0, 1, 3], [1, 2, 3]], [[0, 2, 3], [0, 1, 3]]])}
    both.draft(rows, 0, seen, a=2, b=1)
    both.verify(a=3, b=2)


def test_a_forward_beyond_the_cache_is_refused(pair):
    both = pair("uniform4", "exact", cache_pages=4)
    both.prefill(a=3 * PAGE)
    both.prefill(b=3 * PAGE)
    with pytest.raises(CapacityError, match="one forward needs more residuals"):
        both.verify(a=1, b=1)


def kernels_are_told_too_late(monkeypatch):
    monkeypatch.setattr(OffloadedResidualCache, "sync", lambda residuals: None)


def nothing_is_written_through(monkeypatch):
    monkeypatch.setattr(HostCopies, "copy_out", lambda copies, pairs: None)


@pytest.mark.parametrize("fault", [kernels_are_told_too_late, nothing_is_written_through])
def test_a_fault_is_found(pair, monkeypatch, fault):
    fault(monkeypatch)
    both = pair("uniform4", "exact", cache_pages=4)
    both.prefill(a=3 * PAGE)
    both.prefill(b=3 * PAGE)
    with pytest.raises(AssertionError, match="relative error"):
        both.verify(a=1)
