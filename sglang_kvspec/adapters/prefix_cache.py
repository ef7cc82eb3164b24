"""SGLang's prefix cache with tiers below it, from which evicted prefixes can be loaded."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from sglang_kvspec.adapters import hit_breakdown
from sglang_kvspec.adapters.common_hits import CommonHits, PrefixLookup
from sglang_kvspec.adapters.compat.free_groups import holds_frees
from sglang_kvspec.adapters.compat.load_back import takes_parts
from sglang_kvspec.adapters.compat.matched_prefix import (
    cache_prefix,
    load_result,
    matched_len,
    matched_slots,
    prefix_len,
    prefix_slots,
)
from sglang_kvspec.adapters.compat.prefix_cache import (
    EvictParams,
    EvictResult,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
    RadixCache,
    RadixKey,
    TreeNode,
)
from sglang_kvspec.adapters.compat.prefix_keys import prefix_key, salt_of
from sglang_kvspec.adapters.compat.request_kv import kv_of
from sglang_kvspec.adapters.ending_requests import EndingRequests
from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.page_sources import Loaded
from sglang_kvspec.kv.prefix_store import PageLink, chain_links
from sglang_kvspec.kv.prefix_tiers import PrefixTiers
from sglang_kvspec.runtime.common_prefixes import CommonPrefixes
from sglang_kvspec.runtime.ranks import Ranks
from sglang_kvspec.runtime.remote_prefixes import EarlyStarts, RemotePrefixes, WaitingRequests

NOTHING = Loaded(0, 0)
# Seconds that a server waits, when it ends, for pages on their way to disk.
CLOSE_TIMEOUT_S = 3.0


class KVSpecRadixCache(EndingRequests, RadixCache):  # type: ignore[misc]
    """SGLang's radix tree of the KV cache, with SGLang's order of eviction and locks.

    Nodes are copied to the tiers before they are evicted, finished prefixes at once to disk.
    Anchors may stay in GPU memory. Pages found in the tiers count as SGLang's "host hit".
    """

    # Requests on anchors; the one being admitted; its tokens in the tree, and its other slots.
    early: EarlyStarts | None = None
    _starting: Any = None
    _detached: tuple[int, torch.Tensor] | None = None
    # The newest load. The part of a promised hit that is in the tree, where SGLang takes none.
    _loaded = NOTHING
    _part: Loaded | None = None

    def __init__(
        self,
        params: Any,
        kv: PagedKVCache,
        tiers: PrefixTiers,
        remote: RemotePrefixes | None = None,
        ranks: Ranks | None = None,
        early: EarlyStarts | None = None,
    ) -> None:
        """remote: the remote tier of `tiers`. early: requests that start on anchors from it."""
        assert not params.is_eagle, "keys must be tokens, not pairs of tokens"
        ranks = ranks or Ranks()
        self._kv = kv
        self._tiers = tiers
        self.early = early
        self._common = CommonPrefixes(tiers, ranks)
        self._common_hits = CommonHits(self._common, self._look_up) if ranks.size > 1 else None
        self.waiting = None if remote is None else WaitingRequests(remote, self._common, ranks)
        super().__init__(params)

    def reset(self) -> None:
        super().reset()
        self._tiers.forget_memory()

    def in_pass(self, queue: Callable[[], Sequence[Any]]) -> AbstractContextManager[None]:
        """Enclose a pass of the scheduler. Several ranks find nothing in tiers outside of it."""
        if self._common_hits is None or self._tiers.is_empty:
            return nullcontext()
        return self._common_hits.in_pass(queue)

    # Coming back

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        result = super().match_prefix(params)
        # A lookup without a request is SGLang's own, after an insertion.
        if params.req is None or self._tiers.is_empty:
            return result
        num_resident = matched_len(result)
        is_starting = self._starting is params.req
        links: list[PageLink] = []
        if is_starting or self._common_hits is None:
            links = self._links(params.key, skip=num_resident)
        if is_starting and self.could_start(links):
            num_pages = len(links)
        elif self._common_hits is None:
            (num_pages,) = self._common.num_loadable([links])
        else:
            # The key may be shorter than the prefix that ranks agreed on, and the tree has changed.
            num_full = len(params.key) // self.page_size
            end = min(self._common_hits.end_of(params.req), num_full)
            num_pages = max(0, end - num_resident // self.page_size)
        return result._replace(host_hit_length=num_pages * self.page_size)

    def look_up(self, req: Any) -> PrefixLookup:
        """Return what the tree has of a waiting request's prompt, and the links of its pages."""
        return self._look_up(req) if self._common_hits is None else self._common_hits.look_up(req)

    def _look_up(self, req: Any, known: Sequence[PageLink] = ()) -> PrefixLookup:
        """Look a request up. known: its links from another lookup; tokens are only ever added."""
        tokens = array("q", req.origin_input_ids) + array("q", req.output_ids)
        # SGLang computes at least the last token.
        key = prefix_key(tokens, req, limit=len(tokens) - 1)
        num_resident = matched_len(super().match_prefix(MatchPrefixParams(key=key)))
        # With overridden embeddings, KV does not follow from tokens.
        if req.positional_embed_overrides is not None:
            return PrefixLookup(0, [])
        links = list(known) if len(known) == len(key) // self.page_size else self._links(key)
        return PrefixLookup(num_resident // self.page_size, links)

    def init_load_back(self, params: InitLoadBackParams) -> tuple[Any, TreeNode] | None:
        """Load what match_prefix() found in tiers, up to the first page that is gone or damaged.
        SGLang calls this with the node above locked and room in its budget of tokens.

        Returns (slots or their number, node of the whole prefix). SGLang computes what is not
        loaded. Returns None if SGLang must match the request again: see take_part().
        """
        req = params.req
        assert req is not None, "SGLang must pass the request"
        start = prefix_len(req)
        end = start + params.host_hit_length
        key = prefix_key(req.full_untruncated_fill_ids, req, limit=end)
        slots = self._take_slots(params.host_hit_length)
        links, pages = self._links(key, skip=start), self._pages(slots)
        loaded = self._common.load(links, pages)
        if self._starting is req and len(pages) == len(links):
            num_missing = self._begin_early(req, links, pages, loaded.num_pages)
            loaded = loaded.and_from_remote(num_missing)
            self._detached = (start, slots) if num_missing else None
        num_tokens = loaded.num_pages * self.page_size
        self._give_back(slots[num_tokens:])
        slots = slots[:num_tokens]
        is_taken = num_tokens in (0, params.host_hit_length) or takes_parts()
        if is_taken:
            self._loaded = loaded
            self._count_hits(req, loaded)
        node = params.best_match_node
        # Other requests cannot use anchors alone: such a prefix stays out of the tree.
        if num_tokens and not self._has_pending_residuals(req):
            inserted = self.insert(
                InsertParams(
                    key=key[: start + num_tokens],
                    value=torch.cat([prefix_slots(self, req), slots]),
                    priority=getattr(req, "priority", 0) or 0,
                )
            )
            assert inserted.prefix_len == start, "the tree changed during a lookup"
            node = inserted.last_device_node
        if is_taken:
            return load_result(slots), node
        self._part = loaded
        return None

    def take_part(self) -> Loaded | None:
        """Return the part of a hit for which init_load_back() has returned None, once."""
        part, self._part = self._part, None
        return part

    def count_parts(self, req: Any, parts: Loaded) -> None:
        """Count parts of hits of an admitted request, which found them in the tree."""
        self._count_hits(req, parts.plus(self._loaded) if req.host_hit_length else parts)
        req.host_loaded_length = req.host_hit_length

    def _count_hits(self, req: Any, loaded: Loaded) -> None:
        """Let SGLang report these hits of a request by tier."""
        req.host_hit_length = loaded.num_pages * self.page_size
        num_stored = loaded.num_from_disk + loaded.num_from_remote
        req.storage_hit_length = num_stored * self.page_size
        hit_breakdown.note(req, loaded, self.page_size)

    # Starting on anchors

    @contextmanager
    def starting(self, req: Any) -> Iterator[None]:
        """Let SGLang admit this request alone, on anchors. It owns its pages until adopt()."""
        self._starting = req
        try:
            yield
        finally:
            self._starting = None

    def could_start(self, links: Sequence[PageLink]) -> bool:
        """Return True if every rank can get all anchors of these pages, which a prompt lacks."""
        if self.early is None or not links:
            return False
        (num_pages,) = self._common.num_loadable([links])
        return self.early.may_begin(links[num_pages:])

    def _begin_early(
        self, req: Any, links: Sequence[PageLink], pages: Sequence[int], num_whole: int
    ) -> int:
        """Start a request on anchors; its first num_whole pages are loaded. Return the number of
        other pages, of which the request reads anchors only; 0 if it cannot start on anchors."""
        missing = links[num_whole:]
        if self.early is None or not missing or not self.early.may_begin(missing):
            return 0
        self.early.begin(req.rid, missing, pages[num_whole:])
        return len(missing)

    def detach(self, req: Any) -> None:
        """Let an admitted request own its loaded pages, which SGLang thinks are in the tree."""
        if self._detached is not None:
            kv_of(req).cache_protected_len, _ = self._detached
        self._detached = None

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        """Return the slots of the prefix of a request that is being admitted. The loaded pages of
        an early start are not in the tree. SGLang asks for them since 0.5.22."""
        if self._detached is None or self._starting is not req:
            slots: torch.Tensor = super().prefix_device_indices(req)
            return slots
        start, own = self._detached
        return torch.cat([self.path_device_indices(req.last_node)[:start], own])

    def cancel_start(self) -> bool:
        """Undo an early start that was not admitted. Return True if pages had been allocated; they
        are released."""
        if self._detached is None:
            return False
        _, slots = self._detached
        self._detached = None
        self._give_back(slots)
        return True

    def _has_pending_residuals(self, req: Any) -> bool:
        return self.early is not None and self.early.has_pending_residuals(req.rid)

    def adopt(self, req: Any) -> None:
        """Put the prefix of an early start into the tree, now that its residuals are here."""
        cache_prefix(self, req)

    def _take_slots(self, num_tokens: int) -> torch.Tensor:
        """Allocate slots of whole pages for up to num_tokens; evict other prefixes if necessary."""
        allocator = self.token_to_kv_pool_allocator
        missing = num_tokens - allocator.available_size()
        if missing > 0:
            self.evict(EvictParams(num_tokens=missing))
        size = self.page_size
        slots = allocator.alloc(min(num_tokens, allocator.available_size()) // size * size)
        assert slots is not None, "the allocator has fewer pages than available_size()"
        return slots

    def _give_back(self, slots: torch.Tensor) -> None:
        if len(slots):
            self.token_to_kv_pool_allocator.free(slots)

    # Leaving

    def may_insert(self, req: Any) -> bool:
        return not self._has_pending_residuals(req)

    def note_dropped(self, req: Any, length: int) -> None:
        """Copy the first tokens of a request, which the tree does not take, to the tiers. As a rule
        the request was retracted: it will resume, and the tree has no room for its prefix."""
        if not self._may_store(req):
            return
        key = self._key_of(req, length)
        slots = self.req_to_token_pool.req_to_token[kv_of(req).req_pool_idx, : len(key)]
        num_staying = kv_of(req).cache_protected_len // self.page_size
        self._tiers.demote(*self._encoded(key, slots), num_staying)

    def note_inserted(self, req: Any, length: int) -> None:
        """Copy the first tokens of a request, which the tree has taken, to disk."""
        if not self._may_store(req):
            return
        key = self._key_of(req, length)
        slots = matched_slots(self, super().match_prefix(MatchPrefixParams(key=key)))
        self._tiers.spill(*self._encoded(key, slots))

    def _may_store(self, req: Any) -> bool:
        """Return True if tiers may take the KV of a request. It must follow from the tokens, which
        it does not with overridden embeddings."""
        is_plain = req.positional_embed_overrides is None
        return not self._tiers.is_empty and is_plain and not self._has_pending_residuals(req)

    def _key_of(self, req: Any, length: int) -> RadixKey:
        """Return the key of the full pages in a request's first tokens."""
        tokens = (req.origin_input_ids + req.output_ids)[:length]
        return prefix_key(tokens, req).page_aligned(self.page_size)

    def evict(self, params: EvictParams) -> EvictResult:
        allocator = self.token_to_kv_pool_allocator
        if self._tiers.is_empty or holds_frees(allocator):
            return super().evict(params)
        # SGLang frees a node's slots before it deletes the node. In a group they keep their KV.
        allocator.free_group_begin()
        try:
            return super().evict(params)
        finally:
            allocator.free_group_end()

    def _delete_leaf(self, node: TreeNode) -> None:
        if not self._tiers.is_empty:
            self._demote(node)
        super()._delete_leaf(node)

    def _demote(self, node: TreeNode) -> None:
        """Copy a node to the tiers, and the nodes above it, which stay in the tree: a prefix in the
        tiers begins at the root."""
        path = [node]
        while path[0].parent is not self.root_node:
            path.insert(0, path[0].parent)
        tokens = array("q")
        for each in path:
            tokens.extend(each.key.raw_token_ids())
        key = prefix_key(tokens, node.key)
        num_staying = (len(tokens) - len(node.value)) // self.page_size
        slots = torch.cat([each.value for each in path])
        self._tiers.demote(*self._encoded(key, slots), num_staying)

    def _encoded(self, key: RadixKey, slots: torch.Tensor) -> tuple[Sequence[PageLink], list[int]]:
        """Return links and pages of a prefix, up to the first page not encoded, or corrupt."""
        pages = self._pages(slots)
        self._kv.encode_committed(pages)
        length = next((i for i, p in enumerate(pages) if not self._kv.is_encoded(p)), len(pages))
        checks = self._kv.residuals.corrupt
        if checks is not None and (corrupt := checks.find(pages[:length])):
            length = pages.index(corrupt[0])
        return self._links(key)[:length], pages[:length]

    def release_host_resources(self) -> None:
        self._tiers.close(CLOSE_TIMEOUT_S)

    def _pages(self, slots: torch.Tensor) -> list[int]:
        pages: list[int] = (slots[:: self.page_size] // self.page_size).tolist()
        return pages

    def _links(self, key: RadixKey, skip: int = 0) -> list[PageLink]:
        """Return the links of a key's full pages, without those of its first `skip` tokens."""
        links = list(chain_links(key.raw_token_ids(), self.page_size, namespace_of(key)))
        return links[skip // self.page_size :]


def namespace_of(key: RadixKey) -> bytes:
    """Return what keeps the pages of a key apart from equal tokens of others in the tiers. No two
    pairs of extra_key and salt have the same."""
    extra, salt = key.extra_key, salt_of(key)
    if salt is None:
        return b"" if extra is None else b"=" + extra.encode()
    length = "none" if extra is None else str(len(extra.encode()))
    return f"#{length}={extra or ''}={salt}".encode()
