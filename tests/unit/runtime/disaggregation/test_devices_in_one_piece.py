"""The baselines of --kvspec-transfer between the pools of two GPUs, with the codec in plain torch
as encoder. Pages cross in one piece, and are encoded where they land."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.core.errors import CodecError
from sglang_kvspec.kv.page_records import copy_out
from sglang_kvspec.kv.residual_table import ResidualState
from sglang_kvspec.runtime.disaggregation import page_wire
from sglang_kvspec.transport import Stream

SIZE, LAYERS, PAGES = 32, 2, 7
MODES = {"full": 0.0, "int8": 0.01, "int4": 0.12, "cachegen": 0.4}


class WholeLab:
    """Two servers on GPU pools. The pages of a prompt lie on `at[0]` of the first and `at[1]` of
    the second server. k, v [PAGES, LAYERS, SIZE, heads, head_dim] are their content."""

    def __init__(self, make, make_wire, mode, **options):
        shape = {"num_layers": LAYERS, "num_pages": 20, "page_size": SIZE, "window_pages": 2}
        self.kvs = [make(encodes=True, **shape, **options) for _ in range(2)]
        self.wires = [make_wire(kv, mode) for kv in self.kvs]
        self.at = list(range(1, PAGES + 1)), list(range(20, 20 - PAGES, -1))
        geometry = self.kvs[0].geometry
        rng = torch.Generator().manual_seed(0)
        shape = (2, PAGES, LAYERS, SIZE, geometry.num_kv_heads, geometry.head_dim)
        self.k, self.v = torch.randn(shape, generator=rng).to(geometry.dtype)
        self.kvs[0].write_whole(self.at[0], self.k, self.v)

    def cross(self):
        """Send all pages, in two landings. Return the payloads."""
        payloads = self.wires[0].pack(Stream.ANCHOR, self.at[0])
        for part in (slice(0, 3), slice(3, PAGES)):
            self.wires[1].land(Stream.ANCHOR, self.at[1][part], payloads[part])
        self.kvs[1].check_integrity()
        return payloads


@pytest.fixture(params=["all in GPU memory", "in a store"])
def make_lab(request, make_device_kv, make_wire):
    store = request.param == "in a store"

    def make(mode):
        # Fewer pages than the prompt has, but no fewer than are encoded at once.
        cache = 4 if store else None
        return WholeLab(make_device_kv, make_wire, mode, store=store, cache_pages=cache)

    return make


@pytest.fixture(autouse=True)
def few_pages_at_once(monkeypatch):
    """Shrink the limits, so that several portions are landed."""
    monkeypatch.setattr(page_wire, "AT_ONCE_BYTES", 2 * 2 * LAYERS * SIZE * 2 * 16 * 2)
    monkeypatch.setattr("sglang_kvspec.kv.gpu_cache.COMMIT_PAGES", 3)


@pytest.mark.parametrize(("mode", "loss"), MODES.items())
def test_what_was_sent_is_what_is_read(make_lab, mode, loss):
    lab = make_lab(mode)
    lab.cross()
    for got, want in zip(lab.kvs[1].records.read_whole(lab.at[1]), (lab.k, lab.v), strict=True):
        assert got.dtype == want.dtype
        error = (got.float() - want.float()).norm() / want.float().norm()
        assert error == 0 if loss == 0 else 0 < error < loss
    states = [lab.kvs[1].residuals.table.state(page) for page in lab.at[1]]
    assert set(states) <= {ResidualState.RESIDENT, ResidualState.STORED}


def test_drafts_read_what_a_prefill_would_have_encoded(make_lab):
    lab = make_lab("full")
    lab.cross()
    sent, got = (copy_out(kv, pages) for kv, pages in zip(lab.kvs, lab.at, strict=True))
    assert all(map(torch.equal, sent, got))


def test_a_page_of_another_size_lands_nowhere(make_lab):
    lab = make_lab("int4")
    payloads = lab.wires[0].pack(Stream.ANCHOR, lab.at[0])
    with pytest.raises(CodecError, match="a page of int4 must have"):
        lab.wires[1].land(Stream.ANCHOR, lab.at[1][:2], [payloads[0], [payloads[1][0][:-1]]])
    assert not any(map(lab.kvs[1].is_encoded, lab.at[1]))
    lab.kvs[1].check_integrity()


@pytest.mark.parametrize("mode", MODES)
def test_many_pages_are_packed_as_each_alone(make_lab, mode):
    lab = make_lab(mode)
    together = lab.wires[0].pack(Stream.ANCHOR, lab.at[0])
    alone = [lab.wires[0].pack(Stream.ANCHOR, [page])[0] for page in lab.at[0]]
    assert all(torch.equal(*pair) for (pair,) in map(zip, together, alone))
    assert len(together) == PAGES


def test_what_a_codec_cannot_carry_is_refused(make_lab):
    lab = make_lab("int8")
    lab.kvs[0].free_all()
    lab.k[4, 1, 3, 0, 5] = float("nan")
    lab.kvs[0].write_whole(lab.at[0], lab.k, lab.v)
    with pytest.raises(CodecError, match=r"K holds nan at .* \[1, 3, 0, 5\]"):
        lab.wires[0].pack(Stream.ANCHOR, lab.at[0])
