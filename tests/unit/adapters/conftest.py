"""State machines that use the prefix cache as SGLang's scheduler does, with KV that is not computed
by a model."""

from __future__ import annotations

import shutil
import tempfile
from array import array
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from kvspec_testkit.runtime.rank_exchange import BOTH, ExchangingRanks, RankExchange
from sglang_kvspec.adapters import hit_breakdown, prefix_cache
from sglang_kvspec.adapters.allocator import KVSpecAllocator
from sglang_kvspec.adapters.compat.prefix_keys import prefix_key
from sglang_kvspec.adapters.pool import KVSpecPool
from sglang_kvspec.adapters.prefix_cache import NOTHING, KVSpecRadixCache
from sglang_kvspec.kv.kept_anchors import KeptAnchors
from sglang_kvspec.kv.prefix_store import (
    StoreIdentity,
    StoreLimits,
    chain_links,
    open_memory_store,
    open_store,
)
from sglang_kvspec.kv.prefix_tiers import PrefixTiers

SIZE = 32
NUM_PAGES = 10
NUM_REQUESTS = 3


class Request(SimpleNamespace):
    """A request with the attributes that the prefix cache reads."""

    __hash__ = object.__hash__

    @property
    def kv(self):
        """Since 0.5.19 SGLang keeps its row and lengths in here."""
        return self

    def get_fill_ids(self):
        return self.full_untruncated_fill_ids

    def get_evicted_seqlen(self, component):
        return 0

    def swa_dead_lo(self, page_size):
        return 0


# Since 0.5.22 matches and requests keep lengths in place of slots.
HAS_LENGTHS = "device_prefix_len" in MatchResult._fields


def release(tree, req, is_insert, length):
    """Release the first tokens of a request, as SGLang's release_kv_cache() does."""
    if hasattr(RadixCache, "cache_finished_req"):
        tree.cache_finished_req(req, is_insert, kv_len_to_handle=length)
        return
    # Since 0.5.21.
    assert not tree.claim_kv_row(req)
    if is_insert:
        insert = tree.checkpoint if HAS_LENGTHS else tree.insert_req
        insert(req, up_to=length)
    tree.free_kv_row(req.kv, [(req.cache_protected_len, length)])
    if HAS_LENGTHS:
        tree.unlock(req.lock)
        tree.on_release(req, checkpointed=is_insert)
    else:
        tree.unpin(req)
        tree.on_release(req, inserted=is_insert)


# A salt that SGLang keeps in a field of its own where it has one.
OWN_SALT = "own"
HAS_SALTS = "cache_salt" in RadixKey.__slots__


def salted(salt):
    """Return the fields of a request that keep its prefixes apart."""
    if salt == OWN_SALT and HAS_SALTS:
        return {"extra_key": None, "cache_salt": salt}
    return {"extra_key": salt, "cache_salt": None}


class PrefixCacheMachine(RuleBasedStateMachine):
    """Admit, cache, finish and drop requests of a few pages and a rest, as SGLang's scheduler does.
    KV of a page is a function of its tokens and all tokens before them."""

    # Each prompt is made of pages with token 0 or 1, and a rest follows.
    prompts = st.lists(st.integers(0, 1), max_size=4).map(tuple)
    salts = st.sampled_from([None, "", "salt", OWN_SALT])

    def __init__(self, make_kv, residual_share=0.4, num_kept=0, ranks=None):
        """num_kept: pages whose anchors may stay in KV memory after an eviction. ranks: exchange
        between this rank and the others, if there are any."""
        super().__init__()
        self.ranks = ranks
        self.num_kept = num_kept
        self.kv = self.make_cache(make_kv)
        self.identity = StoreIdentity.of(self.kv.codec, self.kv.geometry, model="toy")
        page = self.kv.plan.page_bytes
        self.host_limits = StoreLimits(
            disk_bytes=4000 + 6 * (page.anchor + page.residual), residual_share=residual_share
        )
        self.disk_limits = StoreLimits(disk_bytes=4000 + 8 * (page.anchor + page.residual))
        self.folder = Path(tempfile.mkdtemp())
        self.disk = None
        self.hits = {"resident": 0, "host": 0, "disk": 0}
        self.kept_hits = 0
        self.start_process()

    def make_cache(self, make_kv):
        return make_kv(
            num_pages=NUM_PAGES,
            cache_pages=3,
            window_pages=2 * NUM_REQUESTS,
            kept_anchor_pages=self.num_kept,
        )

    def start_process(self):
        self.running: list[Request] = []
        self.kv.free_all()
        if self.disk is not None:
            self.disk.close()
        self.disk = open_store(self.folder, self.identity, self.disk_limits, threaded=False)
        make_host = partial(open_memory_store, self.identity, self.host_limits)
        self.kept = KeptAnchors(self.kv) if self.num_kept else None
        self.tiers = PrefixTiers(self.kv, make_host, self.disk, kept=self.kept)
        pool = KVSpecPool(self.kv, start_layer=0, end_layer=0, device="cpu")
        self.allocator = KVSpecAllocator(
            NUM_PAGES * SIZE, SIZE, torch.float32, "cpu", pool, need_sort=False
        )
        self.req_to_token = torch.zeros((NUM_REQUESTS + 1, NUM_PAGES * SIZE), dtype=torch.int32)
        params = SimpleNamespace(
            disable=False,
            req_to_token_pool=SimpleNamespace(
                req_to_token=self.req_to_token, write=self.req_to_token.__setitem__
            ),
            token_to_kv_pool_allocator=self.allocator,
            page_size=SIZE,
            enable_kv_cache_events=False,
            dynamo_kv_event_format=False,
            kv_event_lora_names=None,
            is_eagle=False,
            disable_finished_insert=False,
            eviction_policy="lru",
            eviction_policy_config=None,
            enable_metrics=False,
            enable_session_radix_cache=False,
        )
        self.tree = KVSpecRadixCache(params, self.kv, self.tiers, ranks=self.ranks)

    def teardown(self):
        self.disk.close()
        shutil.rmtree(self.folder)

    # Actions of the scheduler

    @precondition(lambda self: len(self.running) < NUM_REQUESTS)
    @rule(prompt=prompts, rest=st.integers(1, SIZE), salt=salts)
    def admit(self, prompt, rest, salt):
        tokens = array("q", [page for page in prompt for _ in range(SIZE)] + [7] * rest)
        free_rows = set(range(1, NUM_REQUESTS + 1)) - {r.req_pool_idx for r in self.running}
        req = Request(
            rid=f"{prompt} and {rest} in row {min(free_rows)}",
            full_untruncated_fill_ids=tokens,
            origin_input_ids=tokens,
            output_ids=array("q"),
            **salted(salt),
            req_pool_idx=min(free_rows),
            priority=None,
            positional_embed_overrides=None,
            retracted_stain=False,
            cache_inserted_len=0,
            swa_evict_floor=0,
            extend_end=len(tokens),
            cached_tokens_host=NUM_PAGES * SIZE,
            cached_tokens_storage=NUM_PAGES * SIZE,
        )
        key, parts = prefix_key(tokens, req, limit=len(tokens) - 1), NOTHING
        while True:
            if not self.match(req, key):
                return
            if self.load_back(req):
                break
            parts = parts.plus(self.tree.take_part())
        if parts.num_pages:
            self.tree.count_parts(req, parts)
        prefix = self.prefix_of(req)
        resident = len(prefix) - req.host_hit_length
        self.hits["resident"] += resident
        self.hits["disk"] += req.storage_hit_length
        self.hits["host"] += req.host_hit_length - req.storage_hit_length
        loaded = hit_breakdown.tokens_of(req)
        assert loaded.kept_host <= req.host_hit_length - req.storage_hit_length
        assert loaded.kept_disk <= req.storage_hit_length
        self.kept_hits += loaded.kept_host + loaded.kept_disk
        cached = len(prefix)
        req.cache_protected_len = cached
        self.check_content(req, prefix)
        needed = -(-(len(tokens) - cached) // SIZE) * SIZE
        if needed > self.allocator.available_size():
            self.tree.evict(EvictParams(num_tokens=needed - self.allocator.available_size()))
        new = self.allocator.alloc(needed)
        assert new is not None
        row = torch.cat([prefix, new])[: len(tokens)]
        self.req_to_token[req.req_pool_idx, : len(tokens)] = row.int()
        self.prefill(req, row, cached)
        self.running.append(req)

    def match(self, req, key):
        """Find a request's prefix. Return False if there is no room for the request."""
        with self.tree.in_pass(lambda: [req]):
            match = self.tree.match_prefix(MatchPrefixParams(key=key, req=req))
        room = self.allocator.available_size() + self.tree.evictable_size()
        num_tokens = len(req.full_untruncated_fill_ids)
        num_resident = match.device_prefix_len if HAS_LENGTHS else len(match.device_indices)
        if num_tokens - num_resident + 2 * SIZE > room:
            return False
        req.last_node = match.last_device_node
        if HAS_LENGTHS:
            req.prefix_len = num_resident
        else:
            req.prefix_indices = match.device_indices
        req.best_match_node = match.best_match_node
        req.host_hit_length, req.storage_hit_length = match.host_hit_length, 0
        return True

    def load_back(self, req):
        """Load what match() found in the tiers, and lock the prefix. Return False if the request
        must be matched again."""
        above, promised = req.last_node, req.host_hit_length
        self.tree.inc_lock_ref(above)
        if promised:
            loaded = self.tree.init_load_back(
                InitLoadBackParams(req.best_match_node, promised, req=req)
            )
            if loaded is None:
                self.tree.dec_lock_ref(above)
                return False
            slots, req.last_node = loaded
            num_loaded = slots if HAS_LENGTHS else len(slots)
            assert num_loaded == req.host_hit_length
            assert prefix_cache.takes_parts() or num_loaded in (0, promised)
            if HAS_LENGTHS:
                req.prefix_len += num_loaded
            else:
                req.prefix_indices = torch.cat([req.prefix_indices, slots])
        if HAS_LENGTHS:
            req.lock = self.tree.lock(req.last_node)
        else:
            self.tree.inc_lock_ref(req.last_node)
        self.tree.dec_lock_ref(above)
        return True

    def prefix_of(self, req):
        """Return the slots of a request's prefix: those that the tree has of a request that is
        being admitted, else those in the row of the request."""
        if not HAS_LENGTHS:
            return req.prefix_indices
        if not any(each is req for each in self.running):
            return self.tree.prefix_device_indices(req)
        return self.req_to_token[req.req_pool_idx, : req.prefix_len].long()

    def prefill(self, req, row, cached):
        """Write the KV of new pages. The newest full page and the rest stay in the window."""
        pages = (row[::SIZE] // SIZE).tolist()
        links = self.links(req)
        for i in range(cached // SIZE, len(pages)):
            is_full, is_newest = i < len(links), i >= len(links) - 1
            if not is_full or is_newest:
                self.kv.open_pages([pages[i]])
            if not is_full:
                continue
            k, v = self.content(links[i])
            if is_newest:
                ids = torch.full((SIZE,), pages[i])
                self.kv.window.write(0, ids, torch.arange(SIZE), k, v)
                self.kv.window.mark_committed(pages[i])
            else:
                self.kv.begin_encode([pages[i]])
                self.kv.encode(0, torch.tensor([pages[i]]), k[None], v[None])
                self.kv.finish_encode([pages[i]])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cache_unfinished(self, data):
        self.cache(data.draw(st.sampled_from(self.running)))

    def cache(self, req):
        """Put what a request has computed into the tree."""
        if HAS_LENGTHS:
            self.tree.checkpoint(req, up_to=req.extend_end)
            req.prefix_len = req.extend_end
        else:
            self.tree.cache_unfinished_req(req)
            slots = req.prefix_indices
            self.req_to_token[req.req_pool_idx, : len(slots)] = slots.int()
        self.check_content(req, self.prefix_of(req))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), is_insert=st.booleans(), in_group=st.booleans())
    def finish(self, data, is_insert, in_group):
        req = data.draw(st.sampled_from(self.running))
        self.running.remove(req)
        if in_group:
            self.allocator.free_group_begin()
        length = len(req.full_untruncated_fill_ids)
        release(self.tree, req, is_insert, length)
        if in_group:
            self.allocator.free_group_end()

    @rule(num_pages=st.integers(1, NUM_PAGES))
    def evict(self, num_pages):
        self.tree.evict(EvictParams(num_tokens=num_pages * SIZE))

    @rule()
    def write(self):
        self.disk.write_due()

    @precondition(lambda self: not self.running)
    @rule()
    def flush(self):
        self.tree.reset()
        self.allocator.clear()
        assert self.allocator.available_size() == NUM_PAGES * SIZE

    @rule()
    def die_and_start_again(self):
        self.start_process()

    # What must hold

    def links(self, req):
        salt = b"" if req.extra_key is None else b"=" + req.extra_key.encode()
        if req.cache_salt is not None:
            salt = b"#none==" + req.cache_salt.encode()
        return list(chain_links(req.full_untruncated_fill_ids, SIZE, salt))

    def content(self, link):
        g = self.kv.geometry
        rng = torch.Generator().manual_seed(int.from_bytes(link.key[:6], "little"))
        return torch.randn((2, SIZE, g.num_kv_heads, g.head_dim), generator=rng).to(g.dtype)

    def check_content(self, req, slots):
        """Check the full pages of a request's first slots."""
        pages = (slots[::SIZE] // SIZE)[: len(slots) // SIZE]
        if len(pages):
            k, v = self.kv.read_target(0, pages)
            for i, link in enumerate(self.links(req)[: len(pages)]):
                assert torch.equal(torch.stack((k[i], v[i])), self.content(link)), "foreign KV"

    @invariant()
    def no_page_is_lost(self):
        held = sum(
            -(-len(r.full_untruncated_fill_ids) // SIZE) * SIZE - r.cache_protected_len
            for r in self.running
        )
        known = self.tree.evictable_size() + self.tree.protected_size()
        assert self.allocator.available_size() + known + held == NUM_PAGES * SIZE
        assert known == self.tree.total_size()

    @invariant()
    def pools_are_consistent(self):
        self.kv.check_integrity()
        if self.kept is not None:
            self.kept.check_integrity()
        free = set((self.allocator.free_pages).tolist())
        assert not any(self.kv.is_encoded(page) for page in free)


@pytest.fixture(scope="session")
def prefix_cache_machine() -> type[PrefixCacheMachine]:
    return PrefixCacheMachine


def choosing(rank, which):
    """Return a stand-in for hypothesis's data, which draws a given request."""
    return SimpleNamespace(draw=lambda _: rank.running[which % len(rank.running)])


class TwoRanks(RuleBasedStateMachine):
    prompts = st.lists(st.integers(0, 1), max_size=4).map(tuple)
    salts = st.sampled_from([None, "salt", OWN_SALT])

    def __init__(self, machine, make_kv):
        super().__init__()
        self.rank_exchange = RankExchange()
        # The second rank has less host memory for residuals, and kept anchors in KV memory.
        self.ranks = [
            machine(
                make_kv,
                residual_share=(1.0, 0.4)[rank],
                num_kept=(0, 3)[rank],
                ranks=ExchangingRanks(rank, self.rank_exchange),
            )
            for rank in BOTH
        ]

    def teardown(self):
        self.rank_exchange.close()
        for rank in self.ranks:
            rank.teardown()

    def do(self, act):
        """Do the same on both ranks, at the same time."""
        self.rank_exchange.act(lambda rank: act(self.ranks[rank]))

    # Actions of the scheduler on every rank

    @precondition(lambda self: len(self.ranks[0].running) < NUM_REQUESTS)
    @rule(prompt=prompts, rest=st.integers(1, SIZE), salt=salts)
    def admit(self, prompt, rest, salt):
        self.do(lambda rank: rank.admit(prompt, rest, salt))

    @precondition(lambda self: self.ranks[0].running)
    @rule(which=st.integers(0, NUM_REQUESTS - 1))
    def cache_unfinished(self, which):
        self.do(lambda rank: rank.cache_unfinished(choosing(rank, which)))

    @precondition(lambda self: self.ranks[0].running)
    @rule(which=st.integers(0, NUM_REQUESTS - 1), is_insert=st.booleans())
    def finish(self, which, is_insert):
        self.do(lambda rank: rank.finish(choosing(rank, which), is_insert, False))

    @rule(num_pages=st.integers(1, NUM_PAGES))
    def evict(self, num_pages):
        self.do(lambda rank: rank.evict(num_pages))

    @precondition(lambda self: not self.ranks[0].running)
    @rule()
    def flush(self):
        self.do(lambda rank: rank.flush())

    @rule()
    def die_and_start_again(self):
        self.do(lambda rank: rank.start_process())

    # Events on one rank

    @rule(rank=st.sampled_from(BOTH))
    def write(self, rank):
        self.ranks[rank].write()

    @rule(rank=st.sampled_from(BOTH))
    def refuse(self, rank):
        """Refuse all writes to the rank's disk until the rank starts again."""
        self.ranks[rank].disk.put = lambda *args: False

    @rule(rank=st.sampled_from(BOTH), record=st.integers(0, 7), part=st.integers(0, 1))
    def damage(self, rank, record, part):
        machine = self.ranks[rank]
        page = machine.kv.plan.page_bytes
        name, num_bytes = (("anchors", page.anchor), ("residuals", page.residual))[part]
        path = machine.folder / f"{name}.data"
        if path.stat().st_size < (record + 1) * num_bytes:
            return
        with path.open("r+b") as file:
            file.seek(record * num_bytes)
            (byte,) = file.read(1)
            file.seek(record * num_bytes)
            file.write(bytes([byte ^ 1]))

    # What must hold

    @invariant()
    def sglang_sees_the_same(self):
        first, second = self.ranks
        assert first.allocator.free_pages.tolist() == second.allocator.free_pages.tolist()
        assert first.hits == second.hits
        for one, other in zip(first.running, second.running, strict=True):
            assert first.prefix_of(one).tolist() == second.prefix_of(other).tolist()
            assert one.cache_protected_len == other.cache_protected_len
        assert first.tree.total_size() == second.tree.total_size()

    @invariant()
    def every_rank_is_whole(self):
        for rank in self.ranks:
            rank.no_page_is_lost()
            rank.pools_are_consistent()


@pytest.fixture(scope="session")
def two_ranks() -> type[TwoRanks]:
    return TwoRanks
