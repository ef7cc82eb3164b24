"""A request that is retracted on a decode server resumes unchanged, in other pages."""

from __future__ import annotations

import gc

import pytest
import torch

from sglang_kvspec.runtime.disaggregation.departures import NOT_NEEDED
from sglang_kvspec.runtime.disaggregation.retracted_kv import RetractedKV
from sglang_kvspec.transport import Stream

ROOM, SIZE = 7, 32


def begin(lab, num_tokens, streams):
    request = lab.request(num_tokens)
    lab.departures.add(ROOM)
    lab.expect(request)
    lab.send(request)
    lab.link.deliver(streams)
    lab.pump()
    lab.arrivals.admit(ROOM, request.decode_pages[-1])
    return request


def retract(lab, request) -> RetractedKV:
    kept = RetractedKV(lab.decode, lab.arrivals, request.decode_pages, request.num_tokens)
    lab.arrivals.release(request.decode_pages)
    lab.decode.free_pages(request.decode_pages)
    lab.decode.check_integrity()
    return kept


def resume(lab, kept, request) -> None:
    request.decode_pages = [page - 5 for page in request.decode_pages]
    kept.restore(request.decode_pages)
    lab.arrivals.admit(ROOM, request.decode_pages[-1])
    lab.decode.check_integrity()


@pytest.mark.parametrize("num_tokens", [5, SIZE, 3 * SIZE, 4 * SIZE + 5])
@pytest.mark.parametrize("arrives", ["before", "while set aside", "after"])
def test_a_request_resumes_wherever_its_residuals_are(lab, num_tokens, arrives) -> None:
    streams = list(Stream) if arrives == "before" else [Stream.ANCHOR]
    request = begin(lab, num_tokens, streams)
    kept = retract(lab, request)
    if arrives == "while set aside":
        lab.link.deliver()
        lab.pump()
    resume(lab, kept, request)
    assert lab.link.cancelled == {}
    lab.link.deliver()
    lab.pump()
    for actual, expected in zip(lab.target(request), (request.k, request.v), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert len(lab.arrivals) == 0


def test_a_request_that_does_not_resume_is_cancelled(lab) -> None:
    request = begin(lab, 4 * SIZE + 5, [Stream.ANCHOR])
    kept = retract(lab, request)
    assert lab.link.cancelled == {}
    del kept
    gc.collect()
    assert lab.link.cancelled == {ROOM: NOT_NEEDED}


def test_a_request_that_failed_meanwhile_stays_failed(lab) -> None:
    from sglang_kvspec.transport import TransferFailed

    request = begin(lab, 4 * SIZE + 5, [Stream.ANCHOR])
    kept = retract(lab, request)
    lab.link.to_receiver.append(TransferFailed(ROOM, "gone"))
    lab.pump()
    resume(lab, kept, request)
    assert lab.arrivals.failure(ROOM) == "gone"


def test_a_last_page_may_belong_to_another_request_meanwhile(lab) -> None:
    """The end of a retracted request has no effect on the new owner of its pages."""
    request = begin(lab, 2 * SIZE + 5, [Stream.ANCHOR])
    kept = retract(lab, request)
    page = request.decode_pages[-1]
    lab.arrivals.expect(8, lab.receiver_end, [page], 60.0)
    del kept
    gc.collect()
    lab.arrivals.release([page])
    assert set(lab.link.cancelled) == {ROOM, 8}
