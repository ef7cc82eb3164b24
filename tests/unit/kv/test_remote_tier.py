"""A remote tier extends the prefixes of host memory and disk, and receives the pages that it
lacks."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from sglang_kvspec.kv import prefix_tiers
from sglang_kvspec.kv.page_sources import Loaded
from sglang_kvspec.kv.prefix_store import (
    StoreIdentity,
    StoreLimits,
    chain_links,
    open_memory_store,
)
from sglang_kvspec.kv.prefix_tiers import PrefixTiers

SIZE = 32


def links_of(*pages):
    return list(chain_links([page for page in pages for _ in range(SIZE)], SIZE))


def compute(kv, links, pages):
    for page, link in zip(pages, links, strict=True):
        rng = torch.Generator().manual_seed(int.from_bytes(link.key[:6], "little"))
        shape = (2, 1, SIZE, kv.geometry.num_kv_heads, kv.geometry.head_dim)
        k, v = torch.randn(shape, generator=rng).to(kv.geometry.dtype)
        kv.begin_encode([page])
        kv.encode(0, torch.tensor([page]), k, v)
        kv.finish_encode([page])


def target_of(kv, page):
    return torch.stack(kv.read_target(0, torch.tensor([page])))


class Remote:
    """Tier on another machine, without a network. num_taken: pages that it still accepts."""

    def __init__(self, num_taken=1000):
        self.pages, self.num_taken, self.is_stale = {}, num_taken, False

    def num_landed(self, links):
        return next((i for i, link in enumerate(links) if link not in self.pages), len(links))

    def read(self, link, anchor, residual):
        if link not in self.pages:
            return False
        anchor[:], residual[:] = self.pages[link]
        return True

    def first_to_publish(self, links):
        return self.num_landed(links)

    def put(self, link, anchor, residual):
        if self.num_taken == 0:
            return False
        self.num_taken -= 1
        self.pages[link] = (bytes(anchor), bytes(residual))
        return True

    def weights_will_change(self):
        self.is_stale = True

    def report(self):
        return {"landed_pages": len(self.pages)}


@pytest.fixture
def make_host():
    def make(kv, num_pages):
        identity = StoreIdentity.of(kv.codec, kv.geometry, model="toy")
        page_bytes = identity.anchor_page_bytes + identity.residual_page_bytes
        entry_bytes = 1000
        return partial(
            open_memory_store, identity, StoreLimits(num_pages * (page_bytes + entry_bytes))
        )

    return make


def test_what_one_server_spills_another_loads(make_kv):
    here, there, remote = make_kv(num_pages=40), make_kv(num_pages=40), Remote()
    num_pages = prefix_tiers.BATCH_PAGES + 3
    links, pages = links_of(*range(num_pages)), list(range(1, num_pages + 1))
    compute(here, links, pages)
    PrefixTiers(here, remote=remote).spill(links, pages)
    assert len(remote.pages) == num_pages
    tiers = PrefixTiers(there, remote=remote)
    assert not tiers.is_empty
    longer = links_of(*range(num_pages), 99)
    assert tiers.num_loadable(longer) == num_pages
    assert tiers.num_local(longer) == 0
    free = list(range(20, 20 + num_pages + 1))
    assert tiers.load(longer, free) == Loaded(num_pages, 0, num_pages)
    for page, copy in zip(pages, free, strict=False):
        assert torch.equal(target_of(here, page), target_of(there, copy))
    assert not there.is_encoded(free[-1])
    there.check_integrity()


def test_a_remote_tier_extends_a_prefix_of_host_memory(make_kv, make_host):
    kv, remote = make_kv(num_pages=20), Remote()
    tiers = PrefixTiers(kv, make_host(kv, 8), remote=remote)
    links = links_of(1, 2, 3, 4, 5)
    compute(kv, links, [1, 2, 3, 4, 5])
    wanted = [target_of(kv, page) for page in (1, 2, 3, 4, 5)]
    tiers.demote(links[:2], [1, 2])
    remote.pages.clear()
    PrefixTiers(kv, remote=remote).spill(links, [1, 2, 3, 4, 5])
    # Pages in host memory are not asked for, so they have not landed.
    for link in links[:2]:
        del remote.pages[link]
    kv.free_pages([1, 2, 3, 4, 5])
    assert tiers.num_local(links) == 2
    assert tiers.num_loadable(links) == 5
    assert tiers.load(links, [11, 12, 13, 14, 15]) == Loaded(5, 0, 3)
    assert all(map(torch.equal, wanted, (target_of(kv, page) for page in range(11, 16))))
    # With a missing page in the middle, the pages behind it cannot be used.
    del remote.pages[links[3]]
    kv.free_pages([11, 12, 13, 14, 15])
    assert tiers.load(links, [6, 7, 8, 9, 10]) == Loaded(3, 0, 1)
    assert not kv.is_encoded(9)


def test_a_remote_tier_receives_no_more_than_it_accepts_and_no_page_twice(make_kv):
    kv, remote = make_kv(num_pages=20), Remote(num_taken=2)
    tiers = PrefixTiers(kv, remote=remote)
    links = links_of(1, 2, 3, 4)
    compute(kv, links, [1, 2, 3, 4])
    tiers.spill(links, [1, 2, 3, 4])
    assert list(remote.pages) == links[:2]
    remote.num_taken = 2
    tiers.demote(links, [1, 2, 3, 4])
    assert (list(remote.pages), remote.num_taken) == (links, 0)
    assert tiers.report()["remote"] == {"landed_pages": 4}
    tiers.weights_will_change()
    assert remote.is_stale
