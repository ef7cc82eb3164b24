"""The life of a page in ReferenceKVCache, case by case."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.core.errors import CapacityError, CodecError

CODECS = pytest.mark.parametrize("codec", ["log4", "uniform4"])
TARGETS = pytest.mark.parametrize("target", ["exact", "int8"])


def random_pages(kv, num: int, seed: int = 0):
    g = kv.geometry
    rng = torch.Generator().manual_seed(seed)
    shape = (2, num, g.page_size, g.num_kv_heads, g.head_dim)
    k, v = torch.randn(shape, generator=rng).to(g.dtype)
    return k, v


def put_in_window(kv, pages, k, v, layer=0):
    kv.open_pages(pages)
    size = kv.geometry.page_size
    for page, k_page, v_page in zip(pages, k, v, strict=True):
        kv.window.write(layer, torch.full((size,), page), torch.arange(size), k_page, v_page)
        kv.window.mark_committed(page)


def encode_directly(kv, pages, k, v):
    kv.begin_encode(pages)
    kv.encode(0, torch.tensor(pages), k, v)
    kv.finish_encode(pages)


def as_seen(kv, k, v):
    """Return encoded pages as a draft sees them, and as the target sees them, by the codec
    alone."""
    record = kv.codec.encode(k, v)
    return kv.codec.decode_anchor(record.anchor), kv.codec.decode_target(*record)


def assert_same(got, want):
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@CODECS
@TARGETS
def test_encoding_changes_drafts_but_never_the_target(make_kv, codec, target):
    kv = make_kv(codec=codec, target=target)
    k, v = random_pages(kv, 2)
    drafted, targeted = as_seen(kv, k, v)
    ids = torch.tensor([5, 2])
    put_in_window(kv, [5, 2], k, v)
    assert_same(kv.read_target(0, ids), targeted)
    assert_same(kv.read_draft(0, ids), (k, v))
    kv.move_out_of_window([2, 5])
    assert_same(kv.read_target(0, ids), targeted)
    assert_same(kv.read_draft(0, ids), drafted)
    assert not torch.equal(drafted[0], k)
    if target == "exact":
        assert_same(targeted, (k, v))


@CODECS
@TARGETS
def test_the_target_is_the_same_from_window_cache_store_and_while_fetched(make_kv, codec, target):
    kv = make_kv(codec=codec, target=target, cache_pages=2)
    k, v = random_pages(kv, 5)
    encode_directly(kv, [1, 2, 3], k[:3], v[:3])
    put_in_window(kv, [4, 5], k[3:], v[3:])
    targeted = as_seen(kv, k, v)[1]
    order = torch.tensor([4, 2, 0, 3, 1])
    moves = [(None, ()), (kv.residuals.evict, [1]), (kv.residuals.start_fetch, [3])]
    for move, pages in moves:
        if move:
            move(pages)
        got = kv.read_target(0, order + 1)
        assert_same(got, (targeted[0][order], targeted[1][order]))
    kv.check_integrity()


def test_drafts_of_a_reused_page_see_its_new_anchors(make_kv):
    kv = make_kv()
    ids = torch.tensor([3])
    for seed in range(3):
        k, v = random_pages(kv, 1, seed)
        encode_directly(kv, [3], k, v)
        for _ in range(2):
            assert_same(kv.read_draft(0, ids), as_seen(kv, k, v)[0])
        kv.free_pages([3])


def test_a_reused_page_reads_raw_while_it_is_in_the_window(make_kv):
    kv = make_kv()
    encode_directly(kv, [3], *random_pages(kv, 1))
    kv.read_draft(0, torch.tensor([3]))
    kv.free_pages([3])
    k, v = random_pages(kv, 1, seed=1)
    put_in_window(kv, [3], k, v)
    assert_same(kv.read_draft(0, torch.tensor([3])), (k, v))
    kv.move_out_of_window([3])
    assert_same(kv.read_draft(0, torch.tensor([3])), as_seen(kv, k, v)[0])


def test_a_full_window_encodes_its_oldest_committed_page(make_kv):
    kv = make_kv(window_pages=3)
    k, v = random_pages(kv, 2)
    kv.open_pages([9])
    put_in_window(kv, [7, 4], k, v)
    kv.open_pages([1])
    assert kv.is_encoded(7)
    assert list(kv.window.slots) == [9, 4, 1]
    assert_same(kv.read_target(0, torch.tensor([7, 4])), (k, v))
    kv.check_integrity()


def test_a_window_of_mutable_pages_is_full(make_kv):
    kv = make_kv(window_pages=2)
    kv.open_pages([1, 2])
    kv.open_pages([2, 1])
    with pytest.raises(CapacityError, match="all 2 pages of the recent window"):
        kv.open_pages([3])
    kv.free_pages([1])
    kv.open_pages([3])


def test_an_encoded_page_cannot_be_written_again(make_kv):
    kv = make_kv()
    encode_directly(kv, [3], *random_pages(kv, 1))
    with pytest.raises(AssertionError, match="page 3 is encoded"):
        kv.open_pages([3])
    with pytest.raises(AssertionError, match="already encoded"):
        kv.begin_encode([3])


def test_a_page_being_written_cannot_be_encoded(make_kv):
    kv = make_kv()
    kv.open_pages([3])
    with pytest.raises(AssertionError, match="only a committed page"):
        kv.move_out_of_window([3])


def test_a_page_in_the_window_is_not_free_to_be_encoded_directly(make_kv):
    kv = make_kv()
    kv.open_pages([3])
    with pytest.raises(AssertionError):
        kv.begin_encode([3])


@pytest.mark.parametrize("read", ["read_target", "read_draft"])
def test_a_free_page_cannot_be_read(make_kv, read):
    kv = make_kv()
    encode_directly(kv, [3], *random_pages(kv, 1))
    kv.free_pages([3])
    with pytest.raises(AssertionError):
        getattr(kv, read)(0, torch.tensor([3]))


@pytest.mark.parametrize("state", ["window", "committed", "encoded", "fetching", "in flight"])
def test_freeing_leaves_nothing_behind(make_kv, state):
    kv = make_kv(cache_pages=2)
    k, v = random_pages(kv, 1)
    if state == "window":
        kv.open_pages([3])
    elif state == "committed":
        put_in_window(kv, [3], k, v)
    elif state == "in flight":
        kv.begin_encode([3])
    else:
        encode_directly(kv, [3], k, v)
    if state == "fetching":
        kv.residuals.evict([3])
        kv.residuals.start_fetch([3])
    kv.free_pages([3, 3])
    kv.check_integrity()
    assert not kv.is_encoded(3)
    assert kv.window.slots.num_free == kv.plan.window_pages
    assert kv.residuals.cache_slots.num_free == 2
    kv.residuals.finish_fetches()
    encode_directly(kv, [3], k, v)
    assert_same(kv.read_target(0, torch.tensor([3])), (k, v))


def test_free_all_empties_every_pool(make_kv):
    kv = make_kv(cache_pages=2)
    k, v = random_pages(kv, 3)
    encode_directly(kv, [1, 2, 3], k, v)
    put_in_window(kv, [4, 5, 6], k, v)
    kv.open_pages([7])
    kv.free_all()
    kv.check_integrity()
    assert len(kv.window.slots) == len(kv.residuals.cache_slots) == 0
    kv.free_all()


@TARGETS
@pytest.mark.parametrize("cache_pages", [0, 3])
def test_reading_no_pages(make_kv, target, cache_pages):
    kv = make_kv(target=target, cache_pages=cache_pages)
    nothing = torch.empty(0, dtype=torch.int64)
    for read in (kv.read_draft, kv.read_target):
        k, v = read(0, nothing)
        assert k.shape == v.shape == (0, 32, 2, 16)


def test_layers_are_kept_separate(make_kv):
    kv = make_kv(num_layers=3)
    by_layer = [random_pages(kv, 2, seed) for seed in range(3)]
    kv.begin_encode([6, 1])
    for layer, (k, v) in enumerate(by_layer):
        kv.encode(layer, torch.tensor([6, 1]), k, v)
    kv.finish_encode([6, 1])
    for layer, (k, v) in enumerate(by_layer):
        assert_same(kv.read_target(layer, torch.tensor([1, 6])), (k[[1, 0]], v[[1, 0]]))
        drafted = as_seen(kv, k, v)[0]
        assert_same(kv.read_draft(layer, torch.tensor([6, 1])), drafted)


@CODECS
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 1e-40, 3e38])
def test_every_bit_of_awkward_values_survives_the_exact_target(make_kv, codec, value):
    kv = make_kv(codec=codec)
    k, v = random_pages(kv, 1)
    k[0, 7, 1, 3] = value
    v[0, 31, 0, 15] = -value
    encode_directly(kv, [1], k, v)
    for got, want in zip(kv.read_target(0, torch.tensor([1])), (k, v), strict=True):
        assert torch.equal(got.contiguous().view(torch.int32), want.view(torch.int32))


def test_pages_of_another_dtype_are_refused(make_kv):
    kv = make_kv(dtype=torch.bfloat16)
    k, v = random_pages(kv, 1)
    kv.begin_encode([1])
    with pytest.raises(CodecError, match="bfloat16"):
        kv.encode(0, torch.tensor([1]), k.float(), v.float())


@pytest.mark.parametrize("store", [True, False])
def test_memory_is_what_the_plan_said(make_kv, store):
    kv = make_kv(cache_pages=3 if store else None, store=store)
    assert kv.hbm_nbytes == kv.plan.hbm_bytes


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda kv: kv.window.slots.acquire(1), "recent window is also encoded"),
        (lambda kv: kv._encoded.discard(1), "states and encoded pages disagree"),
        (lambda kv: kv.residuals.table.release(2), "has a cache slot|pages disagree"),
    ],
)
def test_integrity_check_sees_disagreement(make_kv, damage, message):
    kv = make_kv()
    k, v = random_pages(kv, 2)
    encode_directly(kv, [1, 2], k, v)
    kv.check_integrity()
    damage(kv)
    with pytest.raises(AssertionError, match=message):
        kv.check_integrity()
