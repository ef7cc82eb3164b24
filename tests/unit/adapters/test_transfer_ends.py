"""SGLang's senders and receivers where strangers choose rooms, and where requests are cancelled."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError

from kvspec_patches import chunk_tokens
from sglang_kvspec.adapters.transfer import decode, decoding
from sglang_kvspec.adapters.transfer.decode import DecodeManager, KVSpecReceiver
from sglang_kvspec.adapters.transfer.peers import WEIGHTS_CHANGED
from sglang_kvspec.adapters.transfer.prefill import KVSpecSender, PrefillManager
from sglang_kvspec.core.errors import ConfigError, HandshakeRefused, TransportError
from sglang_kvspec.runtime.disaggregation.departures import Departures
from sglang_kvspec.runtime.disaggregation.timeline import Timeline
from sglang_kvspec.transport import TransferOpened
from sglang_kvspec.transport.counters import LinkCounters

ADDR, ROOM = "127.0.0.1:8998", 7
WIRE = SimpleNamespace(anchor_bytes=1, residual_bytes=0)
WRONG_ROOMS = (0, -1, 1 << 63, 1 << 70, "7", True)


class Link:
    def __init__(self) -> None:
        self.aborted: dict[int, str] = {}
        self.events: list = []

    def abort(self, transfer: int, reason: str) -> None:
        self.aborted[transfer] = reason

    def take_events(self) -> list:
        taken, self.events = self.events, []
        return taken


@pytest.fixture
def prefill() -> PrefillManager:
    manager = object.__new__(PrefillManager)
    manager.loop, manager.refusal = Link(), None
    manager.departures = Departures(None, WIRE, manager.loop, None)
    manager.bootstrap_timeout_s = 300.0
    return manager


@pytest.fixture
def decode_manager() -> DecodeManager:
    manager = object.__new__(DecodeManager)
    manager.refusal = None
    manager.links = SimpleNamespace(live=lambda addr: None, trouble=lambda addr: "ReadTimeout")
    manager._serving = SimpleNamespace(model_config=SimpleNamespace(vocab_size=1000))
    manager.arrivals = SimpleNamespace(fail_all=lambda reason: None)
    return manager


def sender(manager, room=ROOM) -> KVSpecSender:
    return KVSpecSender(manager, ADDR, room)


def failure_of(end) -> str:
    assert end.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError) as raised:
        end.failure_exception()
    return str(raised.value)


@pytest.mark.parametrize("room", WRONG_ROOMS)
def test_no_room_but_a_number_on_the_wire(prefill, decode_manager, room) -> None:
    for end in (sender(prefill, room), KVSpecReceiver(decode_manager, ADDR, room)):
        assert "bootstrap_room must be in" in failure_of(end)


def test_a_room_in_use_belongs_to_the_first(prefill) -> None:
    first = sender(prefill)
    assert "in use" in failure_of(sender(prefill))
    assert first.poll() == KVPoll.Bootstrapping
    prefill.loop.events.append(TransferOpened(ROOM))
    assert first.poll() == KVPoll.WaitingForInput


def test_a_request_that_sglang_drops_gives_its_room_up(prefill) -> None:
    end = sender(prefill)
    assert end.poll() == KVPoll.Bootstrapping
    del end
    assert prefill.loop.aborted == {ROOM: "the request has ended"}
    assert sender(prefill).poll() == KVPoll.Bootstrapping


def test_a_receiver_learns_that_another_rank_aborted(prefill) -> None:
    end = sender(prefill)
    with pytest.raises(KVTransferError, match="another rank of this server"):
        end.failure_exception()
    assert prefill.loop.aborted == {
        ROOM: "another rank of the prefill server cancelled the request"
    }
    assert sender(prefill).poll() == KVPoll.Bootstrapping


@pytest.mark.parametrize("names_tokens", [False, True], ids=["0.5.16", "0.5.17"])
def test_the_last_page_of_a_prompt_may_be_partial(prefill, names_tokens) -> None:
    """Each release of SGLang tells in its way that 2 of 10 tokens are in the third page of 4."""
    end, sent = sender(prefill), []
    prefill.page_size, prefill.kv_args = 4, SimpleNamespace(aux_data_ptrs=[], aux_item_lens=[])
    prefill.departures = SimpleNamespace(
        send=lambda *args: sent.append(args), send_last=lambda *args: sent.append(args)
    )
    end.init(3, aux_index=0)
    req = SimpleNamespace(disagg_kv_sender=end, origin_input_ids=range(10), start_send_idx=0)
    # The last forward may also have computed an output token.
    for pages, computed, is_last in (([5, 6], 8, False), ([7], 11, True)):
        stop, more = min(computed, 10), {}
        if names_tokens:
            more = {"num_kv_tokens": stop - req.start_send_idx}
        else:
            req.extend_range = SimpleNamespace(end=computed)
            chunk_tokens.hook(None, req, last_chunk=is_last)
        end.send(pages, [], **more)
        req.start_send_idx = stop
    assert sent == [(ROOM, [5, 6]), (ROOM, [7], 2, ())]


def test_senders_of_others_learn_of_no_tokens() -> None:
    other = object()
    req = SimpleNamespace(disagg_kv_sender=other, origin_input_ids=range(10), start_send_idx=0)
    chunk_tokens.hook(None, req, last_chunk=True, end_idx=10)


def test_after_an_update_of_weights_nothing_is_sent(prefill) -> None:
    """Transfers under way and later ones are refused, here and at the receiver."""
    early = sender(prefill)
    prefill.weights_will_change()
    late = sender(prefill, 8)
    reason = WEIGHTS_CHANGED.format("prefill")
    assert prefill.loop.aborted == {ROOM: reason, 8: reason}
    assert reason in failure_of(early)
    assert reason in failure_of(late)


def test_after_an_update_of_weights_nothing_is_received(decode_manager) -> None:
    decode_manager.weights_will_change()
    end = KVSpecReceiver(decode_manager, ADDR, ROOM)
    end.init(0)
    assert WEIGHTS_CHANGED.format("decode") in failure_of(end)


def test_a_receiver_waits_for_a_link_but_not_for_ever(decode_manager, monkeypatch) -> None:
    end = KVSpecReceiver(decode_manager, ADDR, ROOM)
    end.init(0)
    assert end.poll() == KVPoll.Bootstrapping
    decode_manager.links.live = lambda addr: "a link"
    assert end.poll() == KVPoll.WaitingForInput
    decode_manager.links.live = lambda addr: None
    end = KVSpecReceiver(decode_manager, ADDR, ROOM)
    end.init(0)
    monkeypatch.setattr(decode, "CONNECT_TIMEOUT_S", -1.0)
    assert "no link to the prefill server at 127.0.0.1:8998 in 0 s: ReadTimeout" in failure_of(end)


def test_a_refusal_fails_a_receiver_at_once(decode_manager) -> None:
    def live(addr: str) -> None:
        raise HandshakeRefused("model must be the same")

    decode_manager.links.live = live
    end = KVSpecReceiver(decode_manager, ADDR, ROOM)
    end.init(0)
    assert "model must be the same" in failure_of(end)


def test_an_arrived_request_may_fail_until_all_ranks_have_it(decode_manager) -> None:
    end = KVSpecReceiver(decode_manager, ADDR, ROOM)
    reasons = {}
    decode_manager.links.loops = list
    decode_manager.arrivals.failure = reasons.get
    end._link, end._is_expected, end.conclude_state = "a link", True, KVPoll.Success
    assert end.poll() == KVPoll.Success
    reasons[ROOM] = "the prefill server is gone"
    assert "the prefill server is gone" in failure_of(end)


@pytest.mark.parametrize(("num_tokens", "may_run"), [(4, True), (63, True), (64, False)])
def test_only_warm_ups_may_lack_a_prefill_server(num_tokens, may_run) -> None:
    """A longer request would read whole pages that were never written."""
    ids = [5] * num_tokens
    req = SimpleNamespace(bootstrap_host="2.2.2.2", bootstrap_room=0, origin_input_ids=ids)
    assert (decoding.why_not(req, None, 64) is None) is may_run


def test_a_loop_that_has_ended_is_reported_and_not_counted(prefill, decode_manager) -> None:
    """A call for metrics must never end the server."""

    def counters() -> LinkCounters:
        raise TransportError("the sender's loop has failed: a defect")

    ended, alive = SimpleNamespace(counters=counters), SimpleNamespace(counters=LinkCounters)
    prefill.loop = ended
    assert prefill.link_counters() == []
    assert prefill.report() == {"ended": "the sender's loop has failed: a defect"}
    decode_manager.links.loops = lambda: [ended, alive]
    assert decode_manager.link_counters() == [LinkCounters()]


def test_a_decode_server_knows_one_key(decode_manager) -> None:
    folder = SimpleNamespace(transfer_keys="/keys", transfer="split", is_lossy=False)
    serving = SimpleNamespace(
        config=folder, identity=lambda: None, keys=lambda: SimpleNamespace(peers={b"a", b"b"})
    )
    with pytest.raises(ConfigError, match="which all prefill servers share, got 2"):
        DecodeManager(None, None, serving)


@pytest.mark.parametrize(("token", "is_one"), [(0, True), (999, True), (1000, False), (-1, False)])
def test_tokens_are_of_the_vocabulary(decode_manager, token, is_one) -> None:
    assert decode_manager.is_token(token.to_bytes(4, "little", signed=True) + b"...") is is_one


def test_drafts_are_counted_by_when_they_began() -> None:
    """Residuals may arrive before a round of drafts ends, and each draft was made in its own
    step."""
    arrivals = SimpleNamespace(is_pending=lambda room: room == ROOM)
    there = decoding.Decoding(SimpleNamespace(manager=SimpleNamespace(arrivals=arrivals)))
    state = SimpleNamespace(room=ROOM, timeline=Timeline(0.0))
    assert there.is_pending(state)
    assert not there.is_pending(SimpleNamespace(room=None))
    there.note_drafts(state, [0.3, 0.1], on_anchors=True)
    there.note_drafts(state, on_anchors=False)
    assert there.drafts_on_anchors == 2
    state.timeline.note_verification(0.0, 4)
    first, second, third = state.timeline.token_s[1:4]
    assert second - first == pytest.approx(0.2)
    assert third >= second + 0.1
