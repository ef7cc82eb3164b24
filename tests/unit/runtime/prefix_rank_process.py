"""One of several ranks whose tiers hold different pages, for test_common_prefixes.py.

    python prefix_rank_process.py RANK SIZE RENDEZVOUS

Prints the results of all cases as JSON. Each rank computes its own KV of a page.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvspec_testkit.kv.toy_prefixes import PAGE_SIZE, compute, holds, links_of, room
from kvspec_testkit.runtime.rank_group import refusal, this_rank
from sglang_kvspec.codecs import make_codec
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.prefix_store import (
    PageLink,
    StoreIdentity,
    open_memory_store,
    open_store,
)
from sglang_kvspec.kv.prefix_tiers import PrefixTiers
from sglang_kvspec.kv.reference_cache import ReferenceKVCache
from sglang_kvspec.planning.capacity import CapacityPlan, PageBytes
from sglang_kvspec.runtime.common_prefixes import CommonPrefixes
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.remote_prefixes import WaitingRequests

NUM_PAGES = 24
# More pages than one batch of copies.
MANY = 18


class CountingRanks(Ranks):
    num_messages = 0

    def least(self, mine: Sequence[int], about: object) -> list[int]:
        self.num_messages += 1
        return super().least(mine, about)


class Rank:
    """A KV cache with tiers in host memory and on disk below it."""

    def __init__(self, ranks: CountingRanks, folder: Path, host: int = MANY) -> None:
        """host: number of pages whose residuals host memory has room for."""
        geometry = KVGeometry(1, 2, 16, PAGE_SIZE, torch.float32)
        codec = make_codec(
            "uniform4", target="exact", page_size=PAGE_SIZE, head_dim=16, dtype=torch.float32
        )
        page_bytes = PageBytes(
            geometry.plain_page_bytes, 2 * codec.anchor_bytes, 2 * codec.residual_bytes
        )
        plan = CapacityPlan(NUM_PAGES, 4, NUM_PAGES, NUM_PAGES, page_bytes, "KV memory")
        shard = f"{ranks.rank}/{ranks.size}"
        identity = StoreIdentity.of(codec, geometry, model="toy", shard=shard)
        self.ranks, self.folder = ranks, folder / identity.folder_name
        self.kv = ReferenceKVCache(geometry, codec, plan, torch.device("cpu"))
        self.disk = open_store(self.folder, identity, room(identity, MANY, MANY), threaded=False)
        make_host = partial(open_memory_store, identity, room(identity, MANY, host))
        self.tiers = PrefixTiers(self.kv, make_host, self.disk)
        self.common = CommonPrefixes(self.tiers, ranks)

    def demote(self, links: Sequence[PageLink]) -> None:
        pages = list(range(1, len(links) + 1))
        for page, link in zip(pages, links, strict=True):
            compute(self.kv, link, page, version=self.ranks.rank)
        self.tiers.demote(links, pages)
        self.kv.free_pages(pages)
        self.disk.write_due()

    def spoil(self, page: int) -> None:
        """Flip a bit of this page's residual on disk."""
        num_bytes = self.kv.plan.page_bytes.residual
        with (self.folder / "residuals.data").open("r+b") as file:
            file.seek(page * num_bytes)
            (byte,) = file.read(1)
            file.seek(page * num_bytes)
            file.write(bytes([byte ^ 1]))

    def load(self, links: Sequence[PageLink]) -> dict[str, Any]:
        """Load pages. Return what was loaded, whether these pages are right, and how many others
        are free."""
        pages = list(range(NUM_PAGES, NUM_PAGES - len(links), -1))
        loaded = self.common.load(links, pages)
        num = loaded.num_pages
        self.kv.check_integrity()
        version = self.ranks.rank
        result = {
            "loaded": list(loaded),
            "are_right": all(
                holds(self.kv, page, link, version)
                for page, link in zip(pages[:num], links[:num], strict=True)
            ),
            "free": sum(not self.kv.is_encoded(page) for page in pages[num:]),
        }
        self.kv.free_pages(pages)
        return result


def lookups(ranks: CountingRanks, folder: Path) -> dict[str, Any]:
    """The second rank has fewer pages of the long prefix, and the first rank of the other one."""
    rank = Rank(ranks, folder)
    long, other, unknown = links_of(1, 2, 3, 4, 5), links_of(6, 7, 8), links_of(9)
    rank.demote(long[: (5, 3)[ranks.rank]])
    rank.demote(other[: (2, 3)[ranks.rank]])
    before = ranks.num_messages
    nums = rank.common.num_loadable([long, [], other, unknown, long[1:]])
    messages = ranks.num_messages - before
    nothing = rank.common.num_loadable([[], []])
    return {
        "nums": nums,
        "messages": [messages, ranks.num_messages - before - messages],
        "nothing": nothing,
        # The whole prefix, of which no rank has all pages.
        "long": rank.load(long),
        "other": rank.load(other[:2]),
        "unknown": rank.load(unknown),
    }


def damages(ranks: CountingRanks, folder: Path) -> dict[str, Any]:
    """The second rank's residuals are on disk, and the sixth is damaged."""
    rank = Rank(ranks, folder, host=(MANY, 1)[ranks.rank])
    links = links_of(*range(MANY))
    rank.demote(links)
    if ranks.rank == 1:
        rank.spoil(5)
    promised = rank.common.num_loadable([links])
    first = rank.load(links)
    again = rank.common.num_loadable([links])
    damaged = rank.disk.counters.damaged_residuals
    # The damaged page is in the second batch of copies, which one rank does not reach.
    rank.demote(links)
    if ranks.rank == 0:
        rank.tiers.forget_memory()
        rank.spoil(MANY - 1)
    second = rank.load(links)
    return {
        "promised": [*promised, *again],
        "first": first,
        "second": second,
        "damaged": ranks.least([damaged, -damaged], about="damaged"),
    }


class Remote:
    """Stand-in for RemotePrefixes, in which each rank waits for requests of its own."""

    def __init__(self, would_ask: bool, awaited: set[str]) -> None:
        self.would_ask, self.still = would_ask, awaited
        self.asked: dict[str, Any] = {}

    def ask(
        self,
        rid: str,
        links: Sequence[PageLink],
        others_ask: bool = True,
        anchors_first: bool = False,
    ) -> None:
        self.asked[rid] = [len(links), others_ask]

    def is_awaited(self, rid: str) -> bool:
        return rid in self.still

    def is_anchored(self, rid: str, besides: Sequence[str]) -> bool:
        return rid in self.still and rid not in besides

    def retain(self, rids: set[str]) -> None:
        self.asked = {rid: asked for rid, asked in self.asked.items() if rid in rids}


def waits(ranks: CountingRanks, folder: Path) -> dict[str, Any]:
    rank = Rank(ranks, folder)
    links = links_of(1, 2, 3, 4, 5)
    rank.demote(links[: (4, 2)[ranks.rank]])
    remote = Remote(would_ask=True, awaited=({"a", "b"}, {"b", "c"})[ranks.rank])
    waiting = WaitingRequests(remote, rank.common, ranks)  # type: ignore[arg-type]
    before = ranks.num_messages
    waiting.ask({"a": links, "b": links[:2], "none": [], "c": links[3:], "d": links})
    asked = dict(remote.asked)
    first = sorted(waiting.awaited(["a", "b", "none", "c", "d"]))
    remote.still = set() if ranks.rank else {"c"}
    second = sorted(waiting.awaited(["a", "b", "c", "d"]))
    remote.still = set()
    third = sorted(waiting.awaited(["a", "b", "c", "d"]))
    messages = ranks.num_messages - before
    # No request is left about which ranks could differ.
    waiting.awaited(["a", "none", "d"])
    waiting.ask({"none too": []})
    silent = ranks.num_messages - before - messages
    waiting.retain({"a"})
    remote.would_ask = ranks.rank == 0
    waiting.ask({"e": links})
    return {
        "asked": asked,
        "awaited": [first, second, third],
        "messages": [messages, silent],
        "distrusted": remote.asked["e"],
    }


def anchors(ranks: CountingRanks, folder: Path) -> dict[str, Any]:
    """All anchors of "a" and "b" have arrived on the first rank, and of "b" and "c" on the
    second."""
    rank = Rank(ranks, folder)
    remote = Remote(would_ask=True, awaited=({"a", "b"}, {"b", "c"})[ranks.rank])
    waiting = WaitingRequests(remote, rank.common, ranks)  # type: ignore[arg-type]
    before = ranks.num_messages
    first = sorted(waiting.anchored(["a", "b", "c"], besides=set()))
    started = sorted(waiting.anchored(["a", "b", "c"], besides={"b"}))
    waiting.await_whole_pages("b")
    useless = sorted(waiting.anchored(["a", "b", "c"], besides=set()))
    messages = ranks.num_messages - before
    # There is no request to agree on.
    waiting.anchored(["b"], besides=set())
    silent = ranks.num_messages - before - messages
    return {"anchored": [first, started, useless], "messages": [messages, silent]}


def out_of_step(ranks: CountingRanks, folder: Path) -> list[str]:
    """Return the refusals of ranks that look up different prefixes."""
    rank = Rank(ranks, folder)
    links = links_of(ranks.rank, 2)
    return [
        refusal(lambda: rank.common.num_loadable([links])),
        refusal(lambda: rank.common.load(links, [1, 2])),
    ]


def main() -> None:
    results = {}
    with this_rank(CountingRanks) as ranks:
        for case in (lookups, damages, waits, anchors, out_of_step):
            with tempfile.TemporaryDirectory() as folder:
                results[case.__name__] = case(ranks, Path(folder))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
