"""Scores of pages and the pages selected by them, against plain torch."""

from __future__ import annotations

import pytest
import torch

from kvspec_kernels.formats import Log4Settings, Uniform4Settings
from kvspec_kernels.ops.page_selection import PageSelection
from kvspec_kernels.reference.attention import PageReader
from kvspec_kernels.reference.page_selection import page_mass, select_pages
from kvspec_testkit.kernels.cases import make_case

MOST_QUERIES, MAX_PAGES = 4, 40
CODECS = {
    "uniform4": Uniform4Settings.for_page,
    "log4": Log4Settings.for_page,
}


def case_of(num_pages, settings, page_size, group, head_dim, dtype, device):
    return make_case(
        [count * page_size for count in num_pages],
        settings=settings,
        source="anchor",
        page_size=page_size,
        head_dim=head_dim,
        group=group,
        dtype=dtype,
        device=device,
    )


def selection_of(case, q, num_layers=1):
    return PageSelection(
        len(q),
        MAX_PAGES,
        num_layers,
        q.shape[2],
        case.num_kv_heads,
        q.shape[3],
        case.page_size,
        MOST_QUERIES,
        settings=case.settings,
        q_dtype=q.dtype,
        device=q.device,
    )


def queries(case, batch, dtype, device, seed=1):
    rng = torch.Generator(device).manual_seed(seed)
    shape = (batch, MOST_QUERIES, *case.q.shape[1:])
    return torch.randn(shape, generator=rng, device=device).to(dtype)


def expected_mass(case, q, request, count):
    begin, end = case.indptr[request : request + 2].tolist()
    reader = PageReader(case.settings, "anchor", case.page_size, q.shape[-1], q.dtype, case.anchors)
    k, _ = reader.read(case.indices[begin:end], q.dtype)
    return page_mass(q[request, :count], k, case.page_size, q.shape[-1] ** -0.5)


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("page_size", "group", "head_dim"), [(64, 4, 64), (32, 1, 32), (96, 3, 128)]
)
def test_mass_is_the_attention_on_each_page(device, codec, bits, page_size, group, head_dim):
    counts, num_queries = [3, 0, 17, 1, 5], [4, 2, 1, 3, 0]
    settings = CODECS[codec](page_size, bits)
    case = case_of(counts, settings, page_size, group, head_dim, torch.bfloat16, device)
    q = queries(case, len(counts), torch.bfloat16, device)
    selection = selection_of(case, q)
    given = torch.tensor(num_queries, dtype=torch.int32, device=device)
    selection.score(0, q, case.anchors, case.indptr, case.indices, given)
    for request, count in enumerate(num_queries):
        begin, end = case.indptr[request : request + 2].tolist()
        found = selection.mass[0, begin:end].T
        if count and end > begin:
            expected = expected_mass(case, q, request, count)
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-3)
        else:
            assert not found.any(), "a request without queries was scored"


def lists(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_the_best_pages_are_selected_in_their_order(device):
    settings = Uniform4Settings.for_page(64)
    case = case_of([9, 1, 0, 30], settings, 64, 2, 32, torch.float32, device)
    q = queries(case, 4, torch.float32, device)
    selection = selection_of(case, q, num_layers=2)
    given = lists([4, 4, 4, 4], device)
    for layer in range(2):
        selection.score(layer, q + layer, case.anchors, case.indptr, case.indices, given)
    wanted, num_last = [5, 3, 2, 12], [2, 1, 0, 3]
    out_indptr = lists([0, *torch.tensor(wanted).cumsum(0).tolist()], device)
    out = lists([[[-9] * 2] * 2] * (sum(wanted) + 1), device)
    selection.select(
        case.indptr,
        case.indices,
        out_indptr,
        out,
        lists(num_last, device),
        num_first=1,
        most_pages=30,
    )
    for request, count in enumerate(wanted):
        begin, end = case.indptr[request : request + 2].tolist()
        first = int(out_indptr[request])
        found = out[first : first + count].permute(1, 2, 0)
        mass = selection.mass[:, begin:end].transpose(1, 2)
        kept = min(count, end - begin)
        places = select_pages(mass, kept, min(1, kept), min(num_last[request], kept))
        assert torch.equal(found[..., :kept], case.indices[begin:end][places])
        assert (found[..., kept:] == -1).all()
    assert (out[-1] == -9).all(), "a list was written beyond its end"


def test_of_equal_pages_the_first_are_selected(device):
    settings = Uniform4Settings.for_page(64)
    case = case_of([12], settings, 64, 1, 32, torch.float32, device)
    selection = selection_of(case, queries(case, 1, torch.float32, device))
    selection.mass[:] = 0.25
    selection.mass[0, 7] = 0.5
    out = lists([[[-9] * 2]] * 5, device)
    index = (case.indptr, case.indices, lists([0, 5], device), out, lists([1], device))
    selection.select(*index, num_first=1, most_pages=12)
    assert torch.equal(out[:, 0, 0], case.indices[[0, 1, 2, 7, 11]])


def test_wrong_shapes_are_refused(device):
    case = case_of([3], Uniform4Settings.for_page(64), 64, 1, 32, torch.float32, device)
    q = queries(case, 1, torch.float32, device)
    selection = selection_of(case, q)
    count = lists([4], device)
    with pytest.raises(ValueError, match=r"q must have shape"):
        selection.score(0, q[:, :3], case.anchors, case.indptr, case.indices, count)
    with pytest.raises(ValueError, match=r"indptr must have shape"):
        selection.score(0, q, case.anchors, case.indptr[:1], case.indices, count)
