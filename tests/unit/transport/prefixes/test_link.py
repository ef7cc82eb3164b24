"""A server fetches what another one published, unchanged, through faults of link and store."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvspec_testkit.transport.network import SENDER
from kvspec_testkit.transport.prefix_rig import (
    LAYOUT,
    TICK_S,
    Rig,
    anchor_of,
    chain_of,
    links_of,
    residual_of,
)
from sglang_kvspec.kv.prefix_store.disk_file import DiskFile
from sglang_kvspec.transport.frames import Stream
from sglang_kvspec.transport.prefix_server.outbox import MAX_UNSENT_BYTES
from sglang_kvspec.transport.prefixes import LookupEnded, PageFetched, PublishEnded
from sglang_kvspec.transport.prefixes.frames import (
    STORE_PIECE_BYTES,
    STORE_WIRE,
    Admit,
    Deny,
    Fetch,
    Gone,
    Piece,
    Seek,
)
from sglang_kvspec.transport.session import LinkState
from sglang_kvspec.transport.shaping import TokenBucket
from sglang_kvspec.transport.wire import Drop, FrameError

PAGE_BYTES = LAYOUT.anchor_page_bytes + LAYOUT.residual_page_bytes


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "prefixes")
    yield rig
    if SENDER in rig.network.ports:
        rig.shelves.close(5.0)


@pytest.fixture
def stocked(rig: Rig) -> Rig:
    """Server `a` has published six pages."""
    rig.connect("a")
    rig.publish("a", links_of(1, 2, 3, 4, 5, 6))
    rig.settle()
    assert rig.take("a") == [PublishEnded(i, is_kept=True) for i in range(6)]
    return rig


def fetched(rig: Rig, name: str, links: list) -> tuple[int, str | None]:
    """Return how many pages came, which must be right and without a gap, and why no more came."""
    *pages, end = rig.take(name)
    assert isinstance(end, LookupEnded), end
    numbers = set()
    for event in pages:
        assert isinstance(event, PageFetched)
        assert event.lookup == end.lookup
        assert event.anchor == anchor_of(links[event.page])
        assert event.residual == residual_of(links[event.page])
        numbers.add(event.page)
    assert numbers == set(range(len(pages)))
    return len(pages), end.reason


def test_another_server_fetches_what_one_published(stocked: Rig) -> None:
    stocked.connect("b")
    links = links_of(1, 2, 3, 4, 5, 6, 7)
    stocked.seek("b", 9, links)
    stocked.run()
    assert fetched(stocked, "b", links) == (6, None)
    # The same prefix from its third page on, and then another prompt.
    stocked.seek("b", 10, links[2:])
    stocked.run()
    assert fetched(stocked, "b", links[2:]) == (4, None)
    other = links_of(1, 9, 3)
    stocked.seek("b", 11, other)
    stocked.run()
    assert fetched(stocked, "b", other) == (1, None)
    stocked.seek("b", 12, links_of(8))
    stocked.run()
    assert stocked.take("b") == [LookupEnded(12, 0, None)]
    counters = stocked.clients["b"].counters
    assert counters.streams[Stream.ANCHOR].payload_bytes == 11 * LAYOUT.anchor_page_bytes
    assert counters.streams[Stream.RESIDUAL].payload_bytes == 11 * LAYOUT.residual_page_bytes
    assert not counters.dropped
    assert not stocked.server.link_counters.dropped


def test_the_store_outlives_its_process(stocked: Rig) -> None:
    links = links_of(1, 2, 3, 4, 5, 6)
    stocked.kill()
    stocked.run(40)
    assert stocked.clients["a"].state is LinkState.GREETING
    stocked.start()
    stocked.run(60)
    assert stocked.clients["a"].state is LinkState.LIVE
    stocked.seek("a", 1, links)
    stocked.run()
    assert fetched(stocked, "a", links) == (6, None)


def lines_of(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_a_store_that_dies_and_comes_back_is_logged_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rig.add("a")
    rig.run(3)
    ((level, text),) = lines_of(caplog)
    assert (level, text[:39]) == ("INFO", "KVSpec: linked to the prefix server toy")
    caplog.clear()
    rig.kill()
    for lookup in range(9):
        rig.seek("a", lookup, links_of(1))
        rig.run(20)
    ((level, text),) = lines_of(caplog)
    assert level == "WARNING"
    assert "no link to the prefix server toy (the prefix server does not answer)" in text
    assert "costs speed and changes no output" in text
    caplog.clear()
    rig.start()
    rig.run(60)
    assert [level for level, _ in lines_of(caplog)] == ["INFO"]


def test_a_store_that_is_not_there_at_the_start_is_logged_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rig.kill()
    rig.add("a")
    rig.run(100)
    assert not lines_of(caplog)
    rig.run(400)
    ((level, text),) = lines_of(caplog)
    assert level == "WARNING"
    assert "(no answer since this server started)" in text


def test_a_refusal_is_logged_once_on_either_side(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rig.add("a", msgspec.structs.replace(LAYOUT, store_version=99))
    rig.run(600)
    assert rig.clients["a"].counters.refusals > 2
    theirs, ours = sorted(lines_of(caplog), key=lambda line: "refuses this" in line[1])
    assert {theirs[0], ours[0]} == {"WARNING"}
    for _, text in (theirs, ours):
        assert "store version" in text
        assert "changes no output" in text


def test_a_prefix_server_with_a_full_disk_says_so_once(
    stocked: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: DiskFile, offset: int, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DiskFile, "write", fail)
    stocked.publish("a", links_of(7, 8, 9), first=10)
    stocked.settle()
    ((level, text),) = lines_of(caplog)
    assert level == "WARNING"
    assert "No space left on device. New prefixes are not kept" in text


def test_a_silent_store_ends_everything_in_bounded_time(stocked: Rig) -> None:
    client = stocked.clients["a"]
    # The server's socket still takes frames, but the server no longer reads them.
    stocked.server = _Stopped()  # type: ignore[assignment]
    stocked.seek("a", 5, links_of(1, 2))
    stocked.publish("a", links_of(9), first=50)
    began_s = stocked.network.clock()
    while client.state is LinkState.LIVE:
        stocked.tick()
    assert stocked.network.clock() - began_s <= 1.5 + 2 * TICK_S
    stocked.tick()
    assert stocked.take("a") == [
        LookupEnded(5, 0, "the prefix server does not answer"),
        PublishEnded(50, is_kept=False),
    ]
    # After the link is lost, requests end at once.
    stocked.seek("a", 6, links_of(1, 2))
    stocked.publish("a", links_of(9), first=51)
    stocked.tick()
    assert stocked.take("a") == [
        LookupEnded(6, 0, "no link to the prefix server"),
        PublishEnded(51, is_kept=False),
    ]


class _Stopped:
    def step(self) -> None:
        pass


def test_a_store_that_has_started_anew_is_greeted_again_at_once(stocked: Rig) -> None:
    stocked.kill()
    stocked.start()
    stocked.seek("a", 5, links_of(1, 2))
    stocked.run(4)
    assert stocked.take("a") == [LookupEnded(5, 0, "the prefix server has restarted")]
    assert stocked.clients["a"].state is LinkState.LIVE


def test_models_do_not_see_each_other(stocked: Rig) -> None:
    links = links_of(1, 2)
    stocked.connect("b", layout=msgspec.structs.replace(LAYOUT, model="another"))
    stocked.seek("b", 1, links)
    stocked.run()
    assert stocked.take("b") == [LookupEnded(1, 0, None)]
    for change in ({"settings": "{1}"}, {"record_version": 99}):
        client = stocked.add("c", layout=msgspec.structs.replace(LAYOUT, **change))
        stocked.run(3)
        assert client.state is LinkState.REFUSED
        assert ("at most 2" if "settings" in change else "record version") in str(client.denial)
        stocked.seek("c", 1, links)
        stocked.run(2)
        assert stocked.take("c") == [LookupEnded(1, 0, "no link to the prefix server")]


def test_stores_of_other_versions_take_no_model_of_the_limit(stocked: Rig) -> None:
    """Their folders stay after an update, and no server can use them."""
    stocked.connect("b", layout=msgspec.structs.replace(LAYOUT, model="another"))
    third = msgspec.structs.replace(LAYOUT, model="a third")
    refused = stocked.add("c", layout=third)
    stocked.run(3)
    assert refused.state is LinkState.REFUSED
    (path,) = (
        path
        for path in stocked.folder.glob("*/identity.json")
        if json.loads(path.read_text())["model"] == "another"
    )
    path.write_text(json.dumps(json.loads(path.read_text()) | {"store_version": 1}))
    taken = stocked.add("d", layout=third)
    stocked.run(3)
    assert taken.state is LinkState.LIVE


def test_what_is_lost_on_the_way_is_not_there(stocked: Rig) -> None:
    """With damaged, repeated, delayed or lost frames, a page arrives as published or not at all."""
    links = links_of(1, 2, 3, 4, 5, 6)
    stocked.connect("b")
    stocked.set_faults(lose=0.03, damage=0.03, repeat=0.03, delay=0.03)
    whole = 0
    for lookup in range(60):
        stocked.seek("b", lookup, links)
        stocked.publish("b", links_of(lookup, 1), first=2 * lookup)
        stocked.run(4)
        for event in stocked.take("b"):
            if isinstance(event, PageFetched):
                assert event.anchor == anchor_of(links[event.page])
                assert event.residual == residual_of(links[event.page])
                whole += 1
        stocked.clients["b"].cancel(lookup)
    assert 0 < whole < 360
    stocked.set_faults()
    stocked.settle()
    for lookup in range(60, 120):
        links = links_of(lookup - 60, 1)
        stocked.seek("b", lookup, links)
        stocked.run(40 if lookup == 60 else 5)
        told = [event for event in stocked.take("b") if not isinstance(event, PublishEnded)]
        stocked.events["b"] = [e for e in told if getattr(e, "lookup", lookup) == lookup]
        fetched(stocked, "b", links)


def test_a_page_that_is_damaged_on_disk_ends_the_prefix(stocked: Rig) -> None:
    (path,) = stocked.folder.rglob("residuals.data")
    with path.open("r+b") as file:
        file.seek(3 * LAYOUT.residual_page_bytes + 5)
        file.write(b"\1\2\3")
    links = links_of(1, 2, 3, 4, 5, 6)
    stocked.seek("a", 1, links)
    stocked.run()
    num_pages, reason = fetched(stocked, "a", links)
    assert (num_pages, "damaged" in str(reason)) == (3, True)


def test_publishing_keeps_to_its_bandwidth_and_lookups_do_not_wait_for_it(stocked: Rig) -> None:
    rate = 2e6
    bucket = TokenBucket(rate, 1 << 18, stocked.network.clock())
    client = stocked.connect("b", bucket=bucket)
    began_s = stocked.network.clock()
    stocked.publish("b", links_of(*range(10, 20)))
    links = links_of(1, 2, 3, 4, 5, 6)
    stocked.seek("b", 1, links)
    stocked.run(10)
    told = stocked.take("b")
    stocked.events["b"] = [event for event in told if not isinstance(event, PublishEnded)]
    assert fetched(stocked, "b", links) == (6, None)
    ended = [event for event in told if isinstance(event, PublishEnded)]
    assert len(ended) < 5
    for _ in range(200):
        stocked.tick()
        elapsed_s = stocked.network.clock() - began_s
        assert client.published_bytes <= rate * elapsed_s + 2 * (1 << 18)
    ended += stocked.take("b")  # type: ignore[arg-type]
    assert ended == [PublishEnded(i, is_kept=True) for i in range(10)]
    assert client.published_bytes == 10 * PAGE_BYTES


def test_a_page_without_the_one_before_it_is_not_kept(stocked: Rig) -> None:
    stocked.publish("a", links_of(7, 8)[1:], first=90)
    stocked.run()
    assert stocked.take("a") == [PublishEnded(90, is_kept=False)]


def test_unrequested_answers_change_nothing(stocked: Rig) -> None:
    client, network = stocked.clients["a"], stocked.network
    session = client._session
    links = links_of(1, 2, 3)
    stocked.seek("a", 1, links)
    lies = [
        (Gone(session, 1, 2), None),
        (Gone(session, 77, 0), None),
        (Piece(session, 1, Stream.ANCHOR, 0, 5, 10), bytes(10)),
        (Piece(session, 1, Stream.ANCHOR, 99, 0, 10), bytes(10)),
        (Piece(session + 1, 1, Stream.ANCHOR, 0, 0, 10), bytes(10)),
        (Seek(session, 1, *chain_of(links)), None),
    ]
    for frame, payload in lies:
        parts = [STORE_WIRE.encode(frame, payload), *([payload] if payload else [])]
        network.ports[b"a"].inbox.append((b"", parts))
    stocked.run()
    assert fetched(stocked, "a", links) == (3, None)
    dropped = client.counters.dropped
    assert dropped == {Drop.UNKNOWN: 4, Drop.FOREIGN: 2}


def test_a_store_believes_no_other_session(stocked: Rig) -> None:
    client = stocked.clients["a"]
    client._session += 1
    stocked.seek("a", 1, links_of(1))
    stocked.run(4)
    assert stocked.take("a") == [LookupEnded(1, 0, "the prefix server has restarted")]
    assert stocked.server.counters.lookups == 0
    assert stocked.server.link_counters.dropped == {Drop.FOREIGN: 1}
    assert client.state is LinkState.LIVE


def test_an_answer_to_an_older_greeting_is_not_taken(rig: Rig) -> None:
    client = rig.add("a")
    for frame in (Admit(client._nonce + 1, 77), Deny(client._nonce + 1, "no")):
        rig.network.ports[b"a"].inbox.append((b"", [STORE_WIRE.encode(frame)]))
        client.step()
        assert client.state is LinkState.GREETING
    assert client.counters.dropped == {Drop.FOREIGN: 2}


def test_pages_are_published_one_by_one_and_whole(stocked: Rig) -> None:
    """Other pages are dropped without an answer. The answer for the next page shows it."""
    links, client = links_of(8, 9), stocked.clients["a"]
    content = memoryview(anchor_of(links[0]) + residual_of(links[0]))
    two, half = chain_of(links), chain_of(links[:1])._replace(tokens=links[0].tokens[:-8])
    for number, chain in ((10, two), (11, half), (12, chain_of(links[:1]))):
        client.publish(number, chain, content)
    stocked.run()
    kept = [(event.upload, event.is_kept) for event in stocked.take("a")]  # type: ignore[union-attr]
    assert kept == [(10, False), (11, False), (12, True)]
    assert stocked.server.link_counters.dropped[Drop.MISPLACED] == 2
    assert stocked.server.counters.pages_kept == 6 + 1
    client.seek(1, chain_of(links)._replace(tokens=links[0].tokens + b"8 bytes."), [links[0].key])
    stocked.run(2)
    assert stocked.server.link_counters.dropped[Drop.MISPLACED] == 3
    assert stocked.server.counters.lookups == 0


def test_a_server_that_asks_for_too_much_is_not_served(stocked: Rig) -> None:
    peer = stocked.server._peers.items()[0][1]
    pages = ((links_of(1)[0].key, 0),) * 256
    frame = Fetch(peer.session, 1, Stream.ANCHOR, 0, pages)
    for _ in range(16):
        peer.outbox.ask(frame)
    with pytest.raises(FrameError) as caught:
        peer.outbox.ask(frame)
    assert caught.value.drop is Drop.NO_ROOM


def test_what_the_network_does_not_take_waits_in_the_store(stocked: Rig) -> None:
    """The store hands over no more of six pages than the unsent limit, anchors first."""
    stocked.seek("a", 1, links_of(1, 2, 3, 4, 5, 6))
    for _ in range(4):
        stocked.clients["a"].step()
        for message in list(stocked.network.ports[b"a"].outbox):
            stocked.network.ports[SENDER].inbox.append((b"a", [message.head]))
        stocked.network.ports[b"a"].outbox.clear()
        for _ in range(10):
            stocked.server.step()
        found = [m for m in stocked.network.ports[SENDER].outbox if m.payload is None]
        for message in found:
            stocked.network.ports[SENDER].outbox.remove(message)
            stocked.network.ports[b"a"].inbox.append((b"", [message.head]))
    handed = [m for m in stocked.network.ports[SENDER].outbox if m.payload is not None]
    frames = [STORE_WIRE.decode([m.head, bytes(m.payload)])[0] for m in handed]
    unsent = sum(len(m.payload) for m in handed)
    assert MAX_UNSENT_BYTES <= unsent < MAX_UNSENT_BYTES + STORE_PIECE_BYTES
    streams = [frame.stream for frame in frames]  # type: ignore[union-attr]
    assert streams == sorted(streams)
    assert streams.count(Stream.ANCHOR) == 6 * 2
