"""KV that was computed on one side is the KV that the other side reads."""

from __future__ import annotations

import pytest
import torch

from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.kv.residual_table import ResidualState
from sglang_kvspec.runtime.disaggregation import lander
from sglang_kvspec.runtime.disaggregation.departures import NOT_NEEDED
from sglang_kvspec.transport import SegmentKey, Stream, TransferEnded, TransferFailed

ROOM, SIZE = 7, 32
LENGTHS = (1, SIZE - 1, SIZE, SIZE + 1, 3 * SIZE, 4 * SIZE + 5)


def assert_equal(actual, expected) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0)


def begin(lab, request) -> None:
    lab.departures.add(ROOM)
    lab.expect(request)
    lab.send(request)


def run(lab, request) -> None:
    begin(lab, request)
    lab.link.deliver()
    lab.pump()


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("mode", ["split", "packed", "full"])
def test_every_bit_arrives(make_lab, mode, num_tokens) -> None:
    lab = make_lab(mode)
    request = lab.request(num_tokens)
    run(lab, request)
    assert lab.arrivals.is_draftable(ROOM)
    timeline = lab.arrivals.admit(ROOM, request.decode_pages[-1])
    assert timeline is not None
    assert timeline.prefill_ended_at == 1000.0
    assert lab.arrivals.summary(ROOM)["seconds"]["anchors"] == 1.0
    assert_equal(lab.target(request), (request.k, request.v))
    assert_equal(lab.draft(request), lab.prefill_draft(request))
    assert len(lab.arrivals) == 0
    lab.departures.pump()
    assert lab.departures.of(ROOM).ended == ""


@pytest.mark.parametrize(("mode", "loss"), [("int8", 0.01), ("int4", 0.12), ("cachegen", 0.4)])
def test_lossy_modes_lose_little(make_lab, mode, loss) -> None:
    """Noise has no similar neighbours, on which CacheGen depends."""
    lab = make_lab(mode)
    request = lab.request(4 * SIZE + 5)
    run(lab, request)
    lab.arrivals.admit(ROOM, request.decode_pages[-1])
    k, _ = lab.target(request)
    assert not torch.equal(k, request.k), "nothing was lost"
    assert (k - request.k).norm() / request.k.norm() < loss
    assert_equal((k[:, 4 * SIZE :],), (request.k[:, 4 * SIZE :],))


@pytest.mark.parametrize("target", ["exact", "int8"])
def test_drafts_begin_on_anchors_alone(make_lab, target) -> None:
    lab = make_lab(target=target)
    request = lab.request(4 * SIZE + 5)
    begin(lab, request)
    lab.link.deliver([Stream.ANCHOR], at=[0, 1, 2])
    lab.pump()
    assert not lab.arrivals.is_draftable(ROOM)
    lab.link.deliver([Stream.ANCHOR])
    lab.pump()
    assert lab.arrivals.is_draftable(ROOM)
    assert lab.arrivals.fields(ROOM)[0] == b"first token     "
    lab.arrivals.admit(ROOM, request.decode_pages[-1])
    assert_equal(lab.draft(request), lab.prefill_draft(request))
    states = [lab.decode.residuals.table.state(p) for p in request.decode_pages[:-1]]
    assert states == [ResidualState.IN_FLIGHT] * 4
    with pytest.raises(AssertionError, match="without a residual"):
        lab.target(request)
    lab.link.deliver([Stream.RESIDUAL])
    lab.pump()
    # The last page is in the recent window, and not full.
    for arrived, sent in zip(lab.target(request), lab.prefill_target(request), strict=True):
        assert_equal((arrived[:, : 4 * SIZE],), (sent[:, : 4 * SIZE],))


@pytest.mark.parametrize("target", ["exact", "int8"])
@pytest.mark.parametrize("num_pages", [1, 3])
def test_a_last_page_that_is_encoded_already(make_lab, target, num_pages) -> None:
    """The last page is encoded where an equal prefix was cached."""
    lab = make_lab(target=target)
    request = lab.request(num_pages * SIZE)
    lab.prefill.move_out_of_window(request.prefill_pages[-2:])
    run(lab, request)
    lab.arrivals.admit(ROOM, request.decode_pages[-1])
    assert_equal(lab.target(request), lab.prefill_target(request))
    assert len(lab.arrivals) == 0


def test_all_that_drafts_need_is_packed_before_residuals(lab) -> None:
    request = lab.request(4 * SIZE + 5)
    lab.departures.add(ROOM)
    lab.departures.note_prompt(ROOM, request.token_ids)
    lab.departures.send_last(ROOM, request.prefill_pages, 5, (b"first token     ", b"a" * 17))
    streams = [key.stream for key in lab.link.offers]
    assert streams == [Stream.ANCHOR] * 5 + [Stream.RESIDUAL] * 4


def test_residuals_may_come_before_anchors(lab) -> None:
    request = lab.request(4 * SIZE)
    begin(lab, request)
    lab.link.deliver([Stream.RESIDUAL])
    lab.pump()
    assert not lab.arrivals.is_draftable(ROOM)
    lab.link.deliver([Stream.ANCHOR])
    lab.pump()
    lab.arrivals.admit(ROOM, request.decode_pages[-1])
    assert_equal(lab.target(request), (request.k, request.v))


def test_freed_pages_end_a_transfer_unharmed(lab) -> None:
    """Pages that arrive for a finished request land nowhere, even if another request has its
    pages."""
    request = lab.request(4 * SIZE + 5)
    begin(lab, request)
    lab.link.deliver([Stream.ANCHOR])
    lab.pump()
    lab.arrivals.admit(ROOM, request.decode_pages[-1])
    lab.arrivals.release(request.decode_pages)
    lab.decode.free_pages(request.decode_pages)
    assert lab.link.cancelled == {ROOM: NOT_NEEDED}
    with pytest.raises(ValueError, match="in use"):
        lab.expect(request)
    lab.pump()
    assert lab.decode.residuals.table.num_in(ResidualState.ABSENT) == 13
    assert lab.arrivals.failure(ROOM) is None
    # The room and the pages are used again.
    lab.link.offers.clear()
    lab.link.to_sender.append(TransferEnded(ROOM, NOT_NEEDED))
    lab.departures.pump()
    assert lab.departures.of(ROOM).ended == ""
    lab.departures.forget(ROOM)
    run(lab, request)
    lab.arrivals.admit(ROOM, request.decode_pages[-1])
    assert_equal(lab.target(request), (request.k, request.v))


def test_a_failure_is_reported_and_leaves_nothing(lab) -> None:
    request = lab.request(4 * SIZE + 5)
    begin(lab, request)
    lab.link.deliver([Stream.ANCHOR])
    lab.pump()
    lab.link.to_receiver.append(TransferFailed(ROOM, "the sender was silent for 31.0 s"))
    lab.pump()
    assert lab.arrivals.failure(ROOM) == "the sender was silent for 31.0 s"
    assert not lab.arrivals.is_draftable(ROOM)
    lab.arrivals.release(request.decode_pages)
    lab.decode.free_pages(request.decode_pages)
    assert lab.arrivals.failure(ROOM) is None
    lab.decode.check_integrity()


@pytest.mark.parametrize("stream", list(Stream))
def test_a_page_of_another_size_fails_its_request_alone(lab, stream) -> None:
    request = lab.request(2 * SIZE + 5)
    begin(lab, request)
    key = SegmentKey(ROOM, stream, 0, 0)
    lab.link.offers[key] = lab.link.offers[key][:-1]
    lab.link.deliver()
    lab.pump()
    assert "bytes, expected" in lab.arrivals.failure(ROOM)
    assert ROOM in lab.link.cancelled


def test_a_room_is_open_once_its_receiver_asked(lab) -> None:
    request = lab.request(SIZE)
    lab.expect(request, 8)
    lab.departures.pump()
    assert lab.departures.add(8).is_open
    assert not lab.departures.add(9).is_open
    with pytest.raises(ValueError, match="in use"):
        lab.departures.add(9)
    lab.departures.forget(9)
    assert lab.link.aborted == {9: "the request has ended"}
    assert not lab.departures.add(9).is_open


def test_damaged_handovers_are_refused(lab) -> None:
    request = lab.request(SIZE + 3)
    lab.departures.add(ROOM)
    lab.send(request)
    data = torch.frombuffer(
        bytearray(lab.link.offers[SegmentKey(ROOM, Stream.ANCHOR, 1, 0)]), dtype=torch.uint8
    )
    header, tail = lab.format.decode(data)
    assert header.num_tail_tokens == 3
    assert_equal((tail[:, 0],), (request.k[:, SIZE:],))
    for spoiled in (data[:-1], data[:3], data[:0], data.roll(1), torch.zeros_like(data)):
        with pytest.raises(TransportError):
            lab.format.decode(spoiled)


OTHER = "the prefill server computed another prompt of the same length"


@pytest.mark.parametrize(
    ("num_tokens", "asked", "wrong"),
    [
        # A request that failed on the prefill server alone is computed there as a prompt of one
        # token. Both prompts have one page, so nothing else need differ.
        (1, range(SIZE), f"the prefill server sent KV of 1 tokens, the prompt has {SIZE}"),
        (SIZE + 3, [99, *range(1, SIZE + 3)], OTHER),
        (SIZE + 3, [*range(SIZE), 99, *range(SIZE + 1, SIZE + 3)], OTHER),
        (SIZE + 3, [*range(SIZE + 2), 99], OTHER),
    ],
    ids=["length", "first token", "last page", "last token"],
)
def test_another_prompt_is_noticed(lab, num_tokens, asked, wrong) -> None:
    request = lab.request(num_tokens)
    run(lab, request)
    assert lab.arrivals.is_draftable(ROOM)
    assert lab.arrivals.wrong_prompt(ROOM, request.token_ids) is None
    assert lab.arrivals.wrong_prompt(ROOM, asked) == wrong


def test_prompts_of_unknown_rooms_are_not_noted(lab) -> None:
    """SGLang's warm-up has such prompts."""
    lab.departures.note_prompt(ROOM, [1, 2])
    assert lab.departures.add(ROOM).prompt is None


def test_nothing_is_sent_of_an_aborted_request(lab) -> None:
    request = lab.request(3 * SIZE)
    lab.departures.add(ROOM)
    lab.expect(request)
    lab.departures.abort_all("the weights changed")
    lab.send(request)
    assert not lab.link.offers
    assert lab.link.aborted == {ROOM: "the weights changed"}
    assert lab.departures.of(ROOM).ended == "the weights changed"


def test_incomplete_requests_can_be_failed_together(lab) -> None:
    request = lab.request(2 * SIZE + 1)
    begin(lab, request)
    lab.link.deliver([Stream.ANCHOR])
    lab.pump()
    lab.arrivals.fail_all("the weights changed")
    assert lab.arrivals.failure(ROOM) == "the weights changed"
    assert lab.link.cancelled == {ROOM: "the weights changed"}
    lab.link.deliver([Stream.RESIDUAL])
    lab.pump()
    assert lab.decode.residuals.table.num_in(ResidualState.IN_FLIGHT) == 2


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_transfer_that_fails_fails_a_request_that_is_not_complete(lab, is_complete) -> None:
    request = lab.request(2 * SIZE + 1)
    begin(lab, request)
    if is_complete:
        lab.link.deliver([Stream.ANCHOR, Stream.RESIDUAL])
        lab.pump()
    lab.arrivals.note_failure(ROOM + 1, "of no request")
    lab.arrivals.note_failure(ROOM, "the link was cut")
    assert lab.arrivals.failure(ROOM) == (None if is_complete else "the link was cut")
    assert not lab.link.cancelled, "the sender knows"


def test_pages_may_be_freed_after_their_link_ended(lab) -> None:
    """The link's thread has died, and this has not been noticed yet."""
    request = lab.request(2 * SIZE + 1)
    lab.departures.add(ROOM)
    lab.expect(request)

    def cancel(transfer: int, reason: str) -> None:
        raise TransportError("the receiver's loop has failed: ZMQError")

    lab.receiver_end.cancel = cancel
    lab.arrivals.release(request.decode_pages)
    assert len(lab.arrivals) == 0
    assert not lab.arrivals.is_used(lab.receiver_end)


@pytest.mark.parametrize("mode", ["split", "packed", "full"])
def test_what_lands_at_once_is_copied_in_parts(make_lab, monkeypatch, mode) -> None:
    """The parts have two pages."""
    num_bytes = make_lab(mode).arrivals._wire.anchor_bytes
    monkeypatch.setattr(lander, "AT_ONCE_BYTES", 2 * num_bytes)
    lab = make_lab(mode)
    counts = []
    land = lab.arrivals._wire.land

    def counting(stream, pages, payloads) -> None:
        counts.append((stream, len(pages)))
        land(stream, pages, payloads)

    lab.arrivals._wire.land = counting
    request = lab.request(5 * SIZE + 5)
    run(lab, request)
    lab.arrivals.admit(ROOM, request.decode_pages[-1])
    assert_equal(lab.target(request), (request.k, request.v))
    assert [n for stream, n in counts if stream is Stream.ANCHOR] == [2, 2, 1]
