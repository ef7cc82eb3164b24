"""Reads of a prefix from the tiers below the KV cache. For every page an anchor and the residual
that was encoded with it are read, each from the nearest tier that has it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.kept_anchors import KeptAnchors
from sglang_kvspec.kv.prefix_store import PageLink, PrefixHit, PrefixReader, page_rows
from sglang_kvspec.kv.remote_tier import RemoteTier
from sglang_kvspec.kv.residual_forms import ResidualForm
from sglang_kvspec.kv.stored_pages import StoredPages


class Found(NamedTuple):
    """The longest run of a prefix's whole pages, from the first on. sources: the tier of each
    page's residual. kept_slots: by place in the run, the slot of a page's kept anchors;
    stored.anchors has other bytes there. stamps: by place, known checksums of anchors."""

    stored: StoredPages
    sources: list[PrefixReader | RemoteTier]
    kept_slots: dict[int, int]
    stamps: dict[int, int]

    def __len__(self) -> int:
        return len(self.sources)


def read_prefix(
    kv: PagedKVCache,
    form: ResidualForm,
    links: Sequence[PageLink],
    hits: tuple[PrefixHit, PrefixHit],
    tiers: tuple[PrefixReader | None, PrefixReader | None],
    remote: RemoteTier | None,
    kept: KeptAnchors | None,
) -> Found:
    """Read the longest run of whole pages. tiers: host memory and disk. hits: the pages of `links`
    that each of the two has."""
    stored = StoredPages.empty(kv, form, len(links))
    anchors, residuals = page_rows(stored.anchors), page_rows(stored.residuals)
    sources: dict[int, PrefixReader | RemoteTier] = {}
    kept_slots: dict[int, int] = {}
    stamps: dict[int, int] = {}
    for tier, hit in zip(tiers, hits, strict=True):
        if tier is None:
            continue
        wanted = [i for i in range(hit.num_complete) if i not in sources]
        here = {} if kept is None else kept.find(hit, wanted)
        have = set(here)
        if tier is not tiers[0] and tiers[0] is not None:
            missing = [i for i in wanted if i not in here]
            have |= _read_paired_anchors(tiers[0], hits[0], hit, missing, anchors)
        for i in _read_whole(tier, hit, wanted, anchors, residuals, have):
            sources[i], stamps[i] = tier, hit.pages[i].stamp
            if i in here:
                kept_slots[i] = here[i]
    if remote is not None:
        for i in (i for i in range(len(links)) if i not in sources):
            if not remote.read(links[i], anchors[i], residuals[i]):
                break
            sources[i] = remote
    length = next((i for i in range(len(links)) if i not in sources), len(links))
    return Found(
        stored.first(length),
        [sources[i] for i in range(length)],
        {i: slot for i, slot in kept_slots.items() if i < length},
        {i: stamp for i, stamp in stamps.items() if i < length},
    )


def _read_paired_anchors(
    host: PrefixReader,
    in_host: PrefixHit,
    on_disk: PrefixHit,
    wanted: Sequence[int],
    anchors: Sequence[memoryview],
) -> set[int]:
    """Read anchors of pages from host memory, where it has the very anchors of the page on disk.
    Return the indices of these pages."""
    same = [i for i in wanted if in_host.pages[i : i + 1] == on_disk.pages[i : i + 1]]
    done = host.read_anchors([in_host.pages[i] for i in same], [anchors[i] for i in same])
    return {i for i, good in zip(same, done, strict=True) if good}


def _read_whole(
    tier: PrefixReader,
    hit: PrefixHit,
    wanted: Sequence[int],
    anchors: Sequence[memoryview],
    residuals: Sequence[memoryview],
    have_anchors: Collection[int],
) -> Iterator[int]:
    """Read pages `wanted` of a hit into their rows. Return the indices of the pages whose two parts
    are there and undamaged."""
    missing = [i for i in wanted if i not in have_anchors]
    done = tier.read_anchors([hit.pages[i] for i in missing], [anchors[i] for i in missing])
    good = {*have_anchors, *(i for i, whole in zip(missing, done, strict=True) if whole)}
    both = [i for i in wanted if i in good]
    done = tier.read_residuals([hit.pages[i] for i in both], [residuals[i] for i in both])
    return (i for i, whole in zip(both, done, strict=True) if whole)
