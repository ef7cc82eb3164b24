"""Frames of the prefix server survive encoding, and both ends refuse anything else."""

from __future__ import annotations

from pathlib import Path
from random import Random

import msgspec
import pytest
from msgspec.msgpack import encode as pack

from kvspec_testkit.transport.fuzz import noise_value
from kvspec_testkit.transport.network import SENDER
from kvspec_testkit.transport.prefix_rig import IDENTITY, LAYOUT, Rig, chain_of, links_of
from sglang_kvspec.kv.prefix_store import StoreIdentity
from sglang_kvspec.transport.frames import Stream
from sglang_kvspec.transport.prefixes.frames import (
    STORE_PROTOCOL,
    STORE_WIRE,
    Admit,
    AnyStoreFrame,
    Deny,
    Fetch,
    Found,
    Gone,
    Greet,
    Kept,
    Part,
    Piece,
    Probe,
    Publish,
    Seek,
    StoreLayout,
    Unknown,
)
from sglang_kvspec.transport.session import LinkState
from sglang_kvspec.transport.wire import Drop, FrameError

CHAIN = chain_of(links_of(1, 2))
KEY = bytes(range(32))
PAYLOAD = bytes(range(100))
SAMPLES: tuple[tuple[AnyStoreFrame, bytes | None], ...] = (
    (Greet(1, LAYOUT), None),
    (Admit(1, 2), None),
    (Deny(1, "no"), None),
    (Unknown(2), None),
    (Probe(2), None),
    (Seek(2, 7, *CHAIN), None),
    (Found(2, 7, ((1 << 64) - 1, 0), 1), None),
    (Fetch(2, 7, Stream.RESIDUAL, 3, ((KEY, 9), (KEY, (1 << 64) - 1))), None),
    (Piece(2, 7, Stream.ANCHOR, 3, 40, 100), PAYLOAD),
    (Gone(2, 7, 3), None),
    (Publish(2, 8, *CHAIN), None),
    (Part(2, 8, 40, 100), PAYLOAD),
    (Kept(2, 8, True), None),
)
NAMES = [type(frame).__name__ for frame, _ in SAMPLES]


def message(frame: AnyStoreFrame, payload: bytes | None) -> list[bytes]:
    return [STORE_WIRE.encode(frame, payload), *([payload] if payload else [])]


@pytest.mark.parametrize(("frame", "payload"), SAMPLES, ids=NAMES)
def test_a_frame_comes_back(frame: AnyStoreFrame, payload: bytes | None) -> None:
    assert STORE_WIRE.decode(message(frame, payload)) == (frame, payload)


@pytest.mark.parametrize(("frame", "payload"), SAMPLES, ids=NAMES)
def test_every_flipped_bit_is_found(frame: AnyStoreFrame, payload: bytes | None) -> None:
    parts = message(frame, payload)
    for place, part in enumerate(parts):
        for bit in range(8 * len(part)):
            damaged = bytearray(part)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(FrameError):
                STORE_WIRE.decode([*parts[:place], bytes(damaged), *parts[place + 1 :]])


@pytest.mark.parametrize(
    "frame",
    [
        msgspec.structs.replace(SAMPLES[5][0], parent=KEY[:-1]),
        msgspec.structs.replace(SAMPLES[5][0], tokens=bytes((1 << 16) * 8 + 8)),
        msgspec.structs.replace(SAMPLES[7][0], pages=()),
        msgspec.structs.replace(SAMPLES[7][0], pages=((KEY, 0),) * 257),
        msgspec.structs.replace(SAMPLES[6][0], num_complete=-1),
        Greet(1, msgspec.structs.replace(LAYOUT, codec="../../tmp")),
        Greet(1, msgspec.structs.replace(LAYOUT, shard="../../2")),
        Greet(1, msgspec.structs.replace(LAYOUT, shard="1")),
        Greet(1, msgspec.structs.replace(LAYOUT, shard="0/1\n")),
        Greet(1, msgspec.structs.replace(LAYOUT, target="exact\n")),
        Greet(1, msgspec.structs.replace(LAYOUT, page_size=0)),
        Greet(1, msgspec.structs.replace(LAYOUT, anchor_page_bytes=1 << 40)),
    ],
)
def test_what_is_out_of_bounds_is_no_frame(frame: AnyStoreFrame) -> None:
    with pytest.raises(FrameError) as caught:
        STORE_WIRE.decode(message(frame, None))
    assert caught.value.drop is Drop.MALFORMED


def test_a_layout_has_the_fields_of_an_identity() -> None:
    assert StoreLayout.__struct_fields__ == tuple(StoreIdentity.__dataclass_fields__)
    assert msgspec.structs.asdict(LAYOUT) == {
        name: getattr(IDENTITY, name) for name in StoreLayout.__struct_fields__
    }


def forged(random: Random) -> list[bytes]:
    """Return a message with a right checksum whose body is noise or nearly that of a frame."""
    frame, payload = random.choice(SAMPLES)
    kind = [type(sample) for sample, _ in SAMPLES].index(type(frame))
    body = [getattr(frame, name) for name in frame.__struct_fields__]
    for _ in range(random.choice((0, 1, 1, 2))):
        body[random.randrange(len(body))] = noise_value(random, 0)
    if random.random() < 0.1:
        payload = random.randbytes(random.randrange(1, 300))
    head = STORE_WIRE.seal(STORE_PROTOCOL, kind, pack(body), payload)
    return [head, *([payload] if payload else [])]


def test_neither_end_minds_what_strangers_send(tmp_path: Path) -> None:
    rig, random = Rig(tmp_path / "prefixes"), Random(3)
    client = rig.connect("a")
    rig.publish("a", links_of(1, 2))
    rig.settle()
    peer = rig.server._peers.items()[0][1]
    peer.session = client._session = 2
    peer.outbox._session = 2
    for _ in range(3000):
        for port, origin in ((SENDER, b"a"), (b"a", b"")):
            rig.network.ports[port].inbox.append((origin, forged(random)))
        client.step()
        rig.server.step()
        # Undo the effect of a forged greeting or farewell.
        if client.state is not LinkState.LIVE or client._session != 2:
            client.state, client._session = LinkState.LIVE, 2
        rig.network.ports[b"a"].outbox.clear()
        rig.network.ports[SENDER].outbox.clear()
    assert client.counters.dropped[Drop.MALFORMED] > 100
    assert rig.server.link_counters.dropped[Drop.MALFORMED] > 100
    assert len(list((tmp_path / "prefixes").glob("*/identity.json"))) <= 2
    assert not list(tmp_path.glob("tmp*"))
    rig.shelves.close(5.0)
