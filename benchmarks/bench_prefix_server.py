"""Measure how fast a prefix server finds, sends and stores prefixes, and how soon its death shows.

    python benchmarks/bench_prefix_server.py [--pages N] [--rounds N] [--out PATH]

A `python -m sglang_kvspec.transport.prefix_server` runs on loopback. The benchmark connects to it
as servers do. Records have the Llama-3.1-8B shape (32 layers, 8 KV heads of 128, bf16, pages of 64
tokens, uniform4, exact). Every fetched byte is compared with what was published. GB and MB are
10^9 and 10^6. Records are in the page cache of the server's machine, and not read from its disk.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import median

import torch
from acceptance.report import Figure, write_json
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvspec_testkit.servers.prefix_server_process import PrefixServerProcess
from kvspec_testkit.transport.prefix_rig import chain_of
from sglang_kvspec.codecs import make_codec
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.prefix_store import PageLink, StoreIdentity, chain_links
from sglang_kvspec.transport import Stream, TokenBucket, ZmqPort
from sglang_kvspec.transport.prefixes import (
    LookupEnded,
    PageFetched,
    PublishEnded,
    StoreClient,
    StoreEvent,
    StoreLayout,
)
from sglang_kvspec.transport.session import LinkState

OUT = Path(__file__).resolve().parent / "results" / "prefix_server.json"
PAGE_SIZE = 64
NUM_LOOKUPS = 500
BUDGET_GBPS = 0.1
BURST_BYTES = 1 << 20
LIMIT_S = 120.0
console = Console(width=100)


def eight_b() -> StoreIdentity:
    dtype = torch.bfloat16
    codec = make_codec("uniform4", target="exact", dtype=dtype, page_size=PAGE_SIZE, head_dim=128)
    return StoreIdentity.of(codec, KVGeometry(32, 8, 128, PAGE_SIZE, dtype), model="bench")


@dataclass(frozen=True, slots=True)
class Fetched:
    """Seconds from the request until the first page, all anchors, and all pages have arrived."""

    first_page_s: float
    anchors_s: float
    all_s: float


class Link:
    """StoreClient that the calling thread steps until the awaited events have arrived. A lookup and
    a publish do not run at the same time."""

    def __init__(self, address: str, identity: StoreIdentity, budget_gbps: float = 0.0) -> None:
        bucket = None
        if budget_gbps:
            bucket = TokenBucket(budget_gbps * 1e9, BURST_BYTES, time.monotonic())
        port = ZmqPort(address, bind=False)
        self._client = StoreClient(port, StoreLayout(**asdict(identity)), bucket=bucket)
        self._anchor_bytes = identity.anchor_page_bytes
        self._lookup = 0
        deadline_s = time.monotonic() + LIMIT_S
        while self._client.state is not LinkState.LIVE:
            self._client.step(0.05)
            assert time.monotonic() < deadline_s, (
                f"no answer of the prefix server in {LIMIT_S:.0f} s"
            )

    def publish(self, links: Sequence[PageLink], content: memoryview) -> tuple[int, float]:
        """Publish `content` as each of these pages. Return (pages kept, seconds)."""
        begun = time.perf_counter()
        for number, link in enumerate(links):
            self._client.publish(number, chain_of([link]), content)
        ended = list(islice(self._events(), len(links)))
        seconds = time.perf_counter() - begun
        assert all(isinstance(event, PublishEnded) for event in ended)
        return sum(event.is_kept for event in ended if isinstance(event, PublishEnded)), seconds

    def fetch(self, links: Sequence[PageLink], content: memoryview) -> Fetched | None:
        """Fetch pages that were published with `content`, and check every byte. Return None if some
        of them are not on the prefix server's disk yet."""
        anchors = self._client.counters.streams[Stream.ANCHOR]
        until, split = anchors.payload_bytes + len(links) * self._anchor_bytes, self._anchor_bytes
        begun = time.perf_counter()
        times: dict[str, float] = {}

        def note() -> None:
            if anchors.payload_bytes >= until:
                times.setdefault("anchors_s", time.perf_counter() - begun)

        pages: list[PageFetched] = []
        self._seek(links)
        for event in self._events(note):
            if isinstance(event, LookupEnded):
                times["all_s"] = time.perf_counter() - begun
                assert (event.reason, event.num_found) == (None, len(pages)), event
                break
            assert isinstance(event, PageFetched)
            times.setdefault("first_page_s", time.perf_counter() - begun)
            pages.append(event)
        for page in pages:
            assert page.anchor == content[:split], "a fetched anchor differs from the published one"
            assert page.residual == content[split:], (
                "a fetched residual differs from the published one"
            )
        return Fetched(**times) if len(pages) == len(links) else None

    def look_up(self, links: Sequence[PageLink]) -> float:
        """Return the seconds until the prefix server has answered that it has none of these
        pages."""
        begun = time.perf_counter()
        self._seek(links)
        event = next(self._events())
        assert isinstance(event, LookupEnded)
        assert event.num_found == 0
        return time.perf_counter() - begun

    def outlive(self, links: Sequence[PageLink], kill: Callable[[], None]) -> float:
        """Kill the prefix server once the first of these pages has arrived. Return the seconds from
        its death until the lookup has ended."""
        self._seek(links)
        events = self._events()
        assert isinstance(next(events), PageFetched)
        kill()
        begun = time.perf_counter()
        last = next(event for event in events if isinstance(event, LookupEnded))
        assert last.reason is not None, (
            "all pages arrived before the prefix server was dead: raise --pages"
        )
        return time.perf_counter() - begun

    def close(self) -> None:
        self._client.close()

    def _seek(self, links: Sequence[PageLink]) -> None:
        self._lookup += 1
        self._client.seek(self._lookup, chain_of(links), [link.key for link in links])

    def _events(self, after_step: Callable[[], None] = lambda: None) -> Iterator[StoreEvent]:
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            events = self._client.step(0.05)
            after_step()
            yield from events
        raise TimeoutError(f"the prefix server did not send all events within {LIMIT_S:.0f} s")


def links_of(prompt: int, num_pages: int) -> list[PageLink]:
    """Return the page links of a prompt that shares no page with other prompts."""
    return list(chain_links([prompt] * (num_pages * PAGE_SIZE), PAGE_SIZE))


def around(name: str, samples: Sequence[float], unit: str, baseline: float | None = None) -> Figure:
    """Return the median, with half the range as spread."""
    return Figure(name, median(samples), unit, (max(samples) - min(samples)) / 2, baseline)


def measure_transfers(address: str, num_pages: int, rounds: int) -> list[Figure]:
    identity = eight_b()
    content = memoryview(os.urandom(identity.anchor_page_bytes + identity.residual_page_bytes))
    num_bytes = num_pages * len(content)
    link = Link(address, identity)
    published: list[float] = []
    fetched: list[Fetched] = []
    for prompt in track(range(rounds), "publishing and fetching", console=console):
        links = links_of(prompt, num_pages)
        num_kept, seconds = link.publish(links, content)
        published.append(num_bytes / seconds / 1e9)
        deadline_s = time.monotonic() + LIMIT_S
        while num_kept < num_pages or (times := link.fetch(links, content)) is None:
            # The prefix server's disk queue was full and pages were dropped, or some pages are
            # still in that queue.
            num_kept, _ = link.publish(links, content)
            assert time.monotonic() < deadline_s, (
                f"the prefix server did not keep all {num_pages} pages within {LIMIT_S:.0f} s"
            )
        fetched.append(times)
    link.close()
    return [
        around("prefix_server.publish_gbps", published, "GB/s"),
        around("prefix_server.fetch_gbps", [num_bytes / f.all_s / 1e9 for f in fetched], "GB/s"),
        around("prefix_server.first_page_ms", [f.first_page_s * 1e3 for f in fetched], "ms"),
        around(
            "prefix_server.anchors_share",
            [f.anchors_s / f.all_s for f in fetched],
            "of the fetch time, until all anchors have arrived",
            identity.anchor_page_bytes / len(content),
        ),
    ]


def measure_budget(address: str) -> list[Figure]:
    """Measure the rate of publishing with a budget of BUDGET_GBPS, for about four seconds."""
    identity = eight_b()
    content = memoryview(os.urandom(identity.anchor_page_bytes + identity.residual_page_bytes))
    links = links_of(-1, max(2, round(4 * BUDGET_GBPS * 1e9 / len(content))))
    link = Link(address, identity, BUDGET_GBPS)
    _, seconds = link.publish(links, content)
    link.close()
    rate = len(links) * len(content) / seconds / 1e9
    return [Figure("prefix_server.budgeted_gbps", rate, "GB/s", None, BUDGET_GBPS)]


def measure_lookups(address: str) -> list[Figure]:
    """Time lookups of a prompt of 32K tokens that the prefix server does not have. The server
    hashes the tokens of the prompt."""
    link, links = Link(address, eight_b()), links_of(-2, 32768 // PAGE_SIZE)
    times = sorted(link.look_up(links) * 1e3 for _ in range(NUM_LOOKUPS))
    link.close()
    return [
        Figure("prefix_server.miss_ms", median(times), "ms"),
        Figure("prefix_server.miss_p99_ms", times[int(0.99 * NUM_LOOKUPS)], "ms"),
    ]


def measure_death(server: PrefixServerProcess, num_pages: int) -> list[Figure]:
    link = Link(server.address, eight_b())
    seconds = link.outlive(links_of(0, num_pages), server.kill)
    link.close()
    return [Figure("prefix_server.death_noticed_s", seconds, "s")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--pages", type=int, default=32, help="pages of each prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="number of prompts (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    load_before, *_ = os.getloadavg()
    identity, pages, rounds = eight_b(), arguments.pages, arguments.rounds
    page_bytes = identity.anchor_page_bytes + identity.residual_page_bytes
    gb = 1.2 * (pages * rounds + 100) * page_bytes / 2**30
    with (
        tempfile.TemporaryDirectory() as folder,
        PrefixServerProcess(Path(folder), gb=gb) as server,
    ):
        figures = [
            *measure_transfers(server.address, pages, rounds),
            *measure_budget(server.address),
            *measure_lookups(server.address),
            *measure_death(server, pages),
        ]
    table = Table("figure", "median", "+-", "unit", "compared with")
    for figure in figures:
        numbers = (figure.value, figure.spread, figure.baseline)
        value, spread, baseline = ("" if n is None else f"{n:,.3f}" for n in numbers)
        table.add_row(figure.name, value, spread, figure.unit, baseline)
    console.print(table)
    settings = {
        "rounds": rounds,
        "pages": pages,
        "tokens": pages * PAGE_SIZE,
        "anchor_page_bytes": identity.anchor_page_bytes,
        "residual_page_bytes": identity.residual_page_bytes,
        "cores": os.cpu_count(),
        "load_of_others": round(load_before, 1),
        "spread": "half the range over the rounds",
    }
    write_json(arguments.out, "bench_prefix_server", torch.device("cpu"), settings, figures)


if __name__ == "__main__":
    main()
