"""Sizes and conditions that need a CUDA device: long contexts, large batches and pools, CUDA
graphs."""

from __future__ import annotations

import pytest
import torch

from kvspec_kernels.formats import Log4Settings, Uniform4Settings
from kvspec_kernels.ops.capture import captured_graph
from kvspec_testkit.kernels.cases import make_case, results_for
from kvspec_testkit.kernels.comparison import assert_attention

pytestmark = pytest.mark.gpu

LLAMA_8B = {"page_size": 64, "head_dim": 128, "num_kv_heads": 8, "group": 4}
CODECS = {"log4": Log4Settings, "uniform4": Uniform4Settings}
# (source, bits of an anchor code, query tokens of a request)
KINDS = {
    "draft": ("anchor", 4, 1),
    "draft-2bit": ("anchor", 2, 1),
    "int8": ("int8", 4, 16),
    "int8-2bit": ("int8", 2, 16),
    "exact": ("exact", 4, 16),
}


@pytest.fixture(autouse=True)
def give_memory_back():
    """Free the largest pools, of 35 GB, which other processes may need for tests."""
    yield
    torch.cuda.empty_cache()


@pytest.fixture(params=CODECS)
def codec(request):
    return CODECS[request.param]


@pytest.fixture(params=KINDS)
def make(request, codec, device):
    """make_case of the shape of Llama-8B, for drafting and for both targets."""
    source, bits, q_len = KINDS[request.param]
    settings = codec.for_page(LLAMA_8B["page_size"], bits)

    def make(lens, **options):
        sizes = {"q_lens": [q_len] * len(lens), "tail_lens": [q_len + 5] * len(lens)}
        sizes |= {**LLAMA_8B, "settings": settings, "source": source, "device": device}
        return make_case(lens, **(sizes | options))

    return make


def test_longest_context(make, check):
    check(make([131072, 7]))


def test_batch_of_256(make, check):
    lens = torch.randint(0, 700, (256,), generator=torch.Generator().manual_seed(3)).tolist()
    check(make([*lens[:-1], 20000]))


def test_pools_over_2_31_elements(make, check):
    case = make([300, 5000], pool_pages=57000)
    assert case.anchors.numel() > 2**31
    assert case.residuals.numel() > 2**31
    assert case.tail.window_k.numel() > 2**31
    assert case.indices.max() > 56000
    check(case)


def test_graph_replays_with_other_lengths(make, prepare):
    case = make([9000, 64, 500, 0])
    run = prepare(case)
    out, lse = results_for(case)
    # The first run compiles, before the capture.
    run(out, lse)
    with captured_graph() as graph:
        run(out, lse)
    q_len = int(case.qo_indptr[1])
    for lens in ([9000, 64, 500, 0], [1, 0, 499, 0], [8999, 63, 0, 0], [0, 0, 0, 0]):
        other = case.shortened(lens)
        for name in ("indptr", "indices", "last_page_len"):
            getattr(case, name).copy_(getattr(other, name))
        case.tail.lens.copy_(torch.tensor([q_len, q_len + 1, q_len + 5, q_len]))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        assert_attention(case, out, lse)


def test_run_neither_allocates_nor_waits(make, prepare):
    case = make([9000, 64, 500, 0])
    run = prepare(case)
    out, lse = results_for(case)
    run(out, lse)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(out, lse)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
