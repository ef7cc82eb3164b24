"""Scores of pages and the pages selected by them, against plain torch."""

from __future__ import annotations

import pytest
import torch

from kvspec_kernels.codecs.turboquant import TurboQuantSettings
from kvspec_kernels.formats import Log4Settings, Uniform4Settings
from kvspec_kernels.ops.page_selection import PageSelection, ScoredRequests, SelectedLists
from kvspec_kernels.reference import turboquant
from kvspec_kernels.reference.attention import PageReader
from kvspec_kernels.reference.page_selection import page_mass, select_pages, updated_mass
from kvspec_testkit.kernels.cases import RotatedReader, make_case

MOST_QUERIES, MAX_PAGES, MOST_PAGES = 4, 40, 32
# The CUDA kernel folds scales into queries and rounds these to fp16 (2^-11 of scores of about 4).
TOLERANCE = {"triton": {"atol": 2e-5, "rtol": 2e-3}, "cuda": {"atol": 2e-5, "rtol": 8e-3}}
# INT8 products round q times K's scales to multiples of 1 / 126 of the largest. For normally
# distributed numbers, 128 channels and codes that are 4.3 from their middle, a score has an error
# of 0.014 in log2 (one standard deviation), which is 1 % of a token's weight.
INT8_TOLERANCE = {"atol": 2e-5, "rtol": 3e-2}
CODECS = {
    "uniform4": Uniform4Settings.for_page,
    "log4": Log4Settings.for_page,
    "turboquant": TurboQuantSettings.for_page,
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


def selection_of(case, q, num_layers=1, backend="auto"):
    return PageSelection(
        len(case.indptr) - 1,
        MAX_PAGES,
        len(case.indptr) + 1,
        MOST_PAGES,
        num_layers,
        q.shape[1],
        case.num_kv_heads,
        q.shape[2],
        case.page_size,
        MOST_QUERIES,
        settings=case.settings,
        q_dtype=q.dtype,
        device=q.device,
        backend=backend,
    )


def queries(case, batch, dtype, device, seed=1):
    rng = torch.Generator(device).manual_seed(seed)
    shape = (batch * MOST_QUERIES, *case.q.shape[1:])
    return torch.randn(shape, generator=rng, device=device).to(dtype)


def requests(case, num_queries, known=None):
    """Request b has queries from MOST_QUERIES * b on. Its mass is in slot b + 2, that of the last
    request in slot 0."""
    device, count = case.indptr.device, len(num_queries)
    begins = [MOST_QUERIES * b for b in range(count)]
    index = (begins, num_queries, [*range(2, count + 1), 0], known or [0] * count)
    return ScoredRequests(case.indptr, case.indices, *(lists(each, device) for each in index))


def expected_mass(case, q, request, count):
    begin, end = case.indptr[request : request + 2].tolist()
    first = request * MOST_QUERIES
    q, pages = q[first : first + count], case.indices[begin:end]
    if isinstance(case.settings, TurboQuantSettings):
        # Rotated numbers round to others.
        reader = RotatedReader(case.settings, case.page_size, q.shape[-1], case.anchors)
        q = turboquant.rotate(q.float(), case.settings).to(q.dtype)
    else:
        sizes = (case.page_size, q.shape[-1], q.dtype)
        reader = PageReader(case.settings, "anchor", *sizes, case.anchors)
    k, _ = reader.read(pages, q.dtype)
    return page_mass(q, k, case.page_size, q.shape[-1] ** -0.5)


@pytest.fixture(params=["triton", "cuda"])
def backend(request, device):
    if request.param == "cuda" and device.type != "cuda":
        pytest.skip("the CUDA back end needs a GPU")
    return request.param


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("page_size", "group", "head_dim"),
    [(64, 4, 64), (32, 1, 32), (96, 3, 128), (64, 16, 256), (256, 8, 64)],
)
def test_mass_is_the_attention_on_each_page(
    device, backend, codec, bits, page_size, group, head_dim
):
    counts, num_queries = [3, 0, 17, 1, 5], [4, 2, 1, 3, 0]
    settings = CODECS[codec](page_size, bits)
    case = case_of(counts, settings, page_size, group, head_dim, torch.bfloat16, device)
    q = queries(case, len(counts), torch.bfloat16, device)
    if backend == "cuda" and (head_dim == 32 or codec == "turboquant"):
        with pytest.raises(ValueError, match="backend 'cuda' needs"):
            selection_of(case, q, backend=backend)
        return
    selection = selection_of(case, q, backend=backend)
    index = requests(case, num_queries)
    selection.score(0, q, case.anchors, index)
    is_int8 = backend == "cuda" and (codec, bits) != ("log4", 4)
    tolerance = INT8_TOLERANCE if is_int8 else TOLERANCE[backend]
    for request, count in enumerate(num_queries):
        num_pages = counts[request]
        found = selection.mass[0, index.slots[request], :, :num_pages]
        assert not selection.mass[0, index.slots[request], :, num_pages:].any()
        if count and num_pages:
            expected = expected_mass(case, q, request, count)
            torch.testing.assert_close(found, expected, **tolerance)
        else:
            assert not found.any(), "a request without queries was scored"


def test_few_queries_replace_a_share_of_the_mass(device):
    counts = [7, 5, 3]
    settings = Uniform4Settings.for_page(64)
    case = case_of(counts, settings, 64, 2, 32, torch.bfloat16, device)
    q = queries(case, 3, torch.bfloat16, device)
    selection = selection_of(case, q, backend="triton")
    before = requests(case, [4, 4, 4])
    selection.score(0, q, case.anchors, before)
    known, num_queries = [7, 2, 0], [1, 2, 1]
    old = [selection.mass[0, s, :, :n].clone() for s, n in zip(before.slots, known, strict=True)]
    newest = queries(case, 3, torch.bfloat16, device, seed=2)
    selection.score(0, newest, case.anchors, requests(case, num_queries, known))
    for request, count in enumerate(num_queries):
        new = expected_mass(case, newest, request, count)
        kept = old[request] if known[request] else None
        expected = updated_mass(kept, new, count, MOST_QUERIES)
        found = selection.mass[0, before.slots[request], :, : counts[request]]
        torch.testing.assert_close(found, expected, **TOLERANCE["triton"])


def lists(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_the_best_pages_are_selected_in_their_order(device):
    settings = Uniform4Settings.for_page(64)
    case = case_of([9, 1, 0, 30], settings, 64, 2, 32, torch.float32, device)
    q = queries(case, 4, torch.float32, device)
    selection = selection_of(case, q, num_layers=2)
    index = requests(case, [4, 4, 4, 4])
    for layer in range(2):
        selection.score(layer, q + layer, case.anchors, index)
    wanted, num_last = [5, 3, 2, 12], [2, 1, 0, 3]
    out_indptr = lists([0, *torch.tensor(wanted).cumsum(0).tolist()], device)
    out = lists([[[-9] * 2] * 2] * (sum(wanted) + 1), device)
    wanted_lists = SelectedLists(
        case.indptr, case.indices, index.slots, out_indptr, lists(num_last, device)
    )
    selection.unread[:] = -9
    selection.select(wanted_lists, out, num_first=1)
    wait(device)
    assert selection.unread[1] == -9, "the slot of no request was written"
    for request, count in enumerate(wanted):
        begin, end = case.indptr[request : request + 2].tolist()
        first = int(out_indptr[request])
        found = out[first : first + count].permute(1, 2, 0)
        mass = selection.mass[:, index.slots[request], :, : end - begin]
        kept = min(count, end - begin)
        places = select_pages(mass, kept, min(1, kept), min(num_last[request], kept))
        assert torch.equal(found[..., :kept], case.indices[begin:end][places])
        assert (found[..., kept:] == -1).all()
        unread = mass.sum(-1) - mass.gather(-1, places).sum(-1)
        slot = int(index.slots[request])
        assert float(selection.unread[slot]) == pytest.approx(float(unread.mean()), abs=1e-6)
    assert (out[-1] == -9).all(), "a list was written beyond its end"


def wait(device):
    """Wait for what the device writes to memory of the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def test_of_equal_pages_the_first_are_selected(device):
    settings = Uniform4Settings.for_page(64)
    case = case_of([12], settings, 64, 1, 32, torch.float32, device)
    selection = selection_of(case, queries(case, 1, torch.float32, device))
    selection.mass[:] = 0.25
    selection.mass[..., 7] = 0.5
    out = lists([[[-9] * 2]] * 5, device)
    index = (lists(values, device) for values in ([0], [0, 5], [1]))
    selection.select(SelectedLists(case.indptr, case.indices, *index), out, num_first=1)
    assert torch.equal(out[:, 0, 0], case.indices[[0, 1, 2, 7, 11]])


def test_wrong_shapes_are_refused(device):
    case = case_of([3], Uniform4Settings.for_page(64), 64, 1, 32, torch.float32, device)
    q = queries(case, 1, torch.float32, device)
    selection = selection_of(case, q)
    index = requests(case, [4])
    with pytest.raises(ValueError, match=r"q must have shape"):
        selection.score(0, q[:, :, :16], case.anchors, index)
    with pytest.raises(ValueError, match=r"indptr must have shape"):
        selection.score(0, q, case.anchors, index._replace(indptr=case.indptr[:1]))
