"""Residuals outside of a KV cache: what comes back, and what is refused."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.kv.residual_forms import PackedForm, residual_form
from sglang_kvspec.kv.stored_pages import StoredPages, write_stored

PAGES, ELSEWHERE = [5, 2, 9], [1, 3, 4]
LAYERS, HEADS = 10, 4


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def make_two(request, make_kv):
    """Return a function that makes two KV caches with packed residuals, and writes pages of these
    values to the first."""

    def make(k, v, **options):
        sizes = {"num_layers": LAYERS, "num_kv_heads": HEADS}
        kvs = [make_kv(dtype=request.param, packs=True, **sizes, **options) for _ in range(2)]
        kvs[0].write_whole(PAGES, k.to(request.param), v.to(request.param))
        return kvs

    return make


def values(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, len(PAGES), LAYERS, 32, HEADS, 16, generator=generator)


def spoil(part, page, layers, head):
    """Make values of a page so different in size that its records do not fit."""
    generator = torch.Generator().manual_seed(7)
    size = torch.rand(part[page, layers, :, head].shape, generator=generator)
    part[page, layers, :, head] = 2.0 ** (30 * size - 16)


def assert_same(source, target):
    """Check that pages ELSEWHERE of the target are pages PAGES of the source."""
    for read in ("read_draft", "read_target"):
        for layer in range(LAYERS):
            wanted = getattr(source, read)(layer, torch.tensor(PAGES))
            found = getattr(target, read)(layer, torch.tensor(ELSEWHERE))
            for ours, theirs in zip(found, wanted, strict=True):
                assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


def stored_of(kv):
    form = residual_form(kv.codec, kv.geometry)
    slots = form.read_slots(kv.records, PAGES)
    anchors = kv.records.read_anchors(PAGES[: len(slots)])
    return form, StoredPages(anchors, torch.stack(slots)) if slots else None


def num_unfit(kv):
    return (~kv.records.read_packed(PAGES).fits).sum((1, 2)).tolist()


@pytest.mark.parametrize("store", [True, False])
def test_slots_come_back(make_two, store):
    k, v = values(1)
    spoil(v, 1, slice(4, 6), 2)
    source, target = make_two(k, v, store=store, cache_pages=2 if store else None)
    assert num_unfit(source) == [0, 2, 0]
    form, stored = stored_of(source)
    assert stored.residuals.shape == (3, form.slot_bytes)
    write_stored(target, form, ELSEWHERE, stored, {})
    assert_same(source, target)
    target.check_integrity()


def test_a_slot_takes_little_more_than_half_of_raw_bytes(make_kv):
    options = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 64}
    options |= {"num_pages": 1, "window_pages": 1, "dtype": torch.bfloat16}
    raw, packed = (make_kv(packs=packs, **options) for packs in (False, True))
    sizes = [residual_form(kv.codec, kv.geometry).slot_bytes for kv in (raw, packed)]
    assert sizes[0] == 32 * 8 * 2 * 64 * 128 * 2
    assert 0.5 < sizes[1] / sizes[0] < 0.54


def test_pages_are_stored_up_to_one_that_needs_more_than_a_slot(make_two):
    k, v = values(2)
    spoil(v, 1, slice(0, 3), 1)
    source, _ = make_two(k, v)
    form, stored = stored_of(source)
    assert isinstance(form, PackedForm)
    assert form.num_spare == 2
    assert num_unfit(source) == [0, 3, 0]
    assert len(stored.residuals) == 1


@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_parts_come_back(make_two, num_parts):
    k, v = values(3)
    spoil(v, 0, slice(None), 1)
    spoil(v, 0, slice(3, 5), 3)
    spoil(k, 2, slice(9, 10), 0)
    source, target = make_two(k, v)
    assert num_unfit(source) == [12, 0, 1]
    form = residual_form(source.codec, source.geometry)
    payloads = form.read_parts(source.records, PAGES, num_parts)
    assert all(len(parts) == num_parts for parts in payloads)
    for parts in payloads:
        form.check(parts)
        assert all(part.numel() <= form.part_bytes(num_parts) for part in parts)
    target.begin_landing(ELSEWHERE)
    target.records.write_anchors(ELSEWHERE, source.records.read_anchors(PAGES))
    target.finish_anchors(ELSEWHERE)
    form.write_parts(target.records, ELSEWHERE, payloads)
    target.residuals.finish(ELSEWHERE)
    assert_same(source, target)


def test_parts_of_other_sizes_than_their_records_need_are_refused(make_two):
    k, v = values(5)
    spoil(v, 0, slice(0, 1), 1)
    source, _ = make_two(k, v)
    form = residual_form(source.codec, source.geometry)
    ((part,),) = form.read_parts(source.records, PAGES[:1], 1)
    form.check([part])
    row = source.codec.packed.raw_v_bytes
    for wrong in (part[:0], part[:-1], part[:-row], torch.cat((part, part[-row:]))):
        with pytest.raises(TransportError, match=f"have \\[{len(wrong)}\\] bytes"):
            form.check([wrong])


def test_no_pages(make_two):
    source, target = make_two(*values(9))
    form, stored = stored_of(source)
    assert form.read_slots(source.records, []) == []
    write_stored(target, form, [], stored.first(0), {})
    assert form.read_parts(source.records, [], 2) == []


def test_pages_without_residuals_are_not_packed(make_two):
    source, target = make_two(*values(10))
    target.begin_landing(ELSEWHERE)
    target.records.write_anchors(ELSEWHERE, source.records.read_anchors(PAGES))
    target.finish_anchors(ELSEWHERE)
    with pytest.raises(AssertionError, match="page 1 has no residual"):
        target.records.read_packed(ELSEWHERE)


@pytest.mark.parametrize("fill", [0, 255])
def test_slots_of_foreign_bytes_do_no_harm(make_two, fill):
    """A peer may store any bytes under a right checksum. Pages beside them stay right."""
    k, v = values(6)
    spoil(v, 1, slice(4, 5), 2)
    source, target = make_two(k, v)
    form, stored = stored_of(source)
    stored.residuals[0] = fill
    write_stored(target, form, ELSEWHERE, stored, {})
    for layer in range(LAYERS):
        wanted = source.read_target(layer, torch.tensor(PAGES[1:]))
        found = target.read_target(layer, torch.tensor(ELSEWHERE[1:]))
        assert all(map(torch.equal, found, wanted))


def test_a_residual_beside_another_anchor_gives_other_values(make_two):
    """So tiers and wires must pair them, as they do for int8."""
    source, target = make_two(*values(8))
    form, stored = stored_of(source)
    write_stored(target, form, ELSEWHERE, stored._replace(anchors=stored.anchors.flip(0)), {})
    with pytest.raises(AssertionError):
        assert_same(source, target)
