"""Inputs and figures of the benchmark of the packed exact residual's kernels."""

from __future__ import annotations

import bench_packed_exact as bench
import pytest
import torch
from attention.timing import Timing

from kvspec_kernels.reference import exact, uniform4


@pytest.fixture(scope="module")
def records():
    return bench.make_records(2, torch.device("cpu"))


def test_records_belong_together(records):
    anchor_layout, layout = records.layouts
    assert records.anchors.shape == (2 * bench.KV_HEADS, anchor_layout.nbytes)
    assert records.raw.shape == (2 * bench.KV_HEADS, 2 * layout.raw_nbytes)
    assert records.packed.shape == (2 * bench.KV_HEADS, layout.nbytes)
    assert records.fits.all()
    assert 0.8 < records.used_bytes / records.packed.nbytes < 1
    settings = bench.Uniform4Settings.for_page(bench.PAGE_SIZE)
    raw_layout = bench.residual_layout(
        settings, "exact", bench.PAGE_SIZE, bench.HEAD_DIM, bench.DTYPE
    )
    by_head = [rows.unflatten(0, (2, bench.KV_HEADS)) for rows in (records.raw, records.anchors)]
    pages = exact.decode(by_head[0], raw_layout)
    assert torch.equal(uniform4.encode(*pages, settings, anchor_layout)[0], by_head[1])


def test_figures_count_bytes_read(records):
    names = ("pack", "unpack", "copy_of_pack", "copy_of_unpack")
    times = {name: Timing(1e-6 * (number + 1), 1e-8) for number, name in enumerate(names)}
    found = {figure.name: figure for figure in bench.figures(records, times)}
    read = records.anchors.nbytes + records.raw.nbytes
    assert found["exactres.pack.tbps"].value == pytest.approx(read / 1e6)
    assert found["exactres.pack.tbps"].baseline == pytest.approx(read / 3e6, abs=1e-3)
    assert found["exactres.pack.share_of_copy"].value == pytest.approx(3.0)
    read = records.anchors.nbytes + records.used_bytes
    assert found["exactres.unpack.tbps"].value == pytest.approx(read / 2e6)
    assert found["exactres.unpack.share_of_copy"].value == pytest.approx(2.0)
    assert found["exactres.unpack.us"].value == pytest.approx(2.0)
    assert found["exactres.kernels.fallback_share"].value == 0
