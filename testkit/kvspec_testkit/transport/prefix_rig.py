"""A prefix server and its clients on an in-memory network, with its own clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kvspec_testkit.transport.network import SENDER, Faults, Network
from sglang_kvspec.kv.prefix_store import PageLink, StoreIdentity, chain_links
from sglang_kvspec.transport.prefix_server.server import PrefixServer
from sglang_kvspec.transport.prefix_server.shelves import Shelves
from sglang_kvspec.transport.prefixes import Chain, StoreClient, StoreEvent, StoreLayout
from sglang_kvspec.transport.session import LinkState
from sglang_kvspec.transport.shaping import TokenBucket

PAGE_SIZE = 4
IDENTITY = StoreIdentity(
    model="toy",
    shard="0/1",
    codec="log4",
    settings="{}",
    target="exact",
    dtype="float32",
    page_size=PAGE_SIZE,
    num_layers=1,
    num_kv_heads=1,
    head_dim=16,
    # Larger than a piece, and no multiple of it.
    anchor_page_bytes=300_001,
    residual_page_bytes=700_003,
)
LAYOUT = StoreLayout(**asdict(IDENTITY))
TICK_S = 0.05


def links_of(*pages: int) -> list[PageLink]:
    """Return the links of a prompt whose page i repeats the token pages[i]."""
    return list(chain_links([page for page in pages for _ in range(PAGE_SIZE)], PAGE_SIZE))


def chain_of(links: Sequence[PageLink]) -> Chain:
    return Chain(links[0].parent, links[0].position, b"".join(link.tokens for link in links))


def anchor_of(link: PageLink) -> bytes:
    return (link.key * (IDENTITY.anchor_page_bytes // 32 + 1))[: IDENTITY.anchor_page_bytes]


def residual_of(link: PageLink) -> bytes:
    key = link.key[::-1]
    return (key * (IDENTITY.residual_page_bytes // 32 + 1))[: IDENTITY.residual_page_bytes]


class Rig:
    """One prefix server and any number of clients, all stepped in turn."""

    def __init__(self, folder: Path) -> None:
        self.network = Network(0)
        self.folder = folder
        self.clients: dict[str, StoreClient] = {}
        self.events: dict[str, list[StoreEvent]] = {}
        self.start()

    def start(self) -> None:
        self.shelves = Shelves(self.folder, disk_bytes=64 << 20, max_models=2)
        port = self.network.port(SENDER)
        self.server = PrefixServer(port, self.shelves, clock=self.network.clock)

    def kill(self) -> None:
        """End the server's process. Published pages have reached its disk."""
        self.shelves.close(5.0)
        self.network.unplug(SENDER)

    def add(
        self, name: str, layout: StoreLayout = LAYOUT, bucket: TokenBucket | None = None
    ) -> StoreClient:
        port = self.network.port(name.encode())
        client = StoreClient(port, layout, bucket=bucket, clock=self.network.clock, address="toy")
        self.clients[name], self.events[name] = client, []
        return client

    def connect(
        self, name: str, layout: StoreLayout = LAYOUT, bucket: TokenBucket | None = None
    ) -> StoreClient:
        client = self.add(name, layout, bucket)
        self.run(3)
        assert client.state is LinkState.LIVE, client.denial
        return client

    def tick(self) -> None:
        for name, client in self.clients.items():
            self.events[name] += client.step()
        self.network.carry()
        if SENDER in self.network.ports:
            self.server.step()
        self.network.carry()
        self.network.clock.now_s += TICK_S

    def run(self, num_ticks: int = 20) -> None:
        for _ in range(num_ticks):
            self.tick()

    def publish(self, name: str, links: list[PageLink], first: int = 0) -> None:
        for i, link in enumerate(links):
            content = memoryview(anchor_of(link) + residual_of(link))
            self.clients[name].publish(first + i, chain_of([link]), content)

    def seek(self, name: str, lookup: int, links: list[PageLink]) -> None:
        keys = [link.key for link in links]
        self.clients[name].seek(lookup, chain_of(links), keys)

    def settle(self) -> None:
        """Run until all published pages are on disk."""
        self.run()
        for store in self.shelves.stores():
            assert store.flush(10.0)

    def take(self, name: str) -> list[StoreEvent]:
        """Return the events of a client since the last call."""
        events, self.events[name] = self.events[name], []
        return events

    def set_faults(self, **faults: float) -> None:
        self.network.faults = Faults(**faults)
