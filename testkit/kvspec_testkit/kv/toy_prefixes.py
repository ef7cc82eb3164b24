"""Toy prefixes, whose pages repeat one token each, and toy KV and records for their pages."""

from __future__ import annotations

import torch

from sglang_kvspec.codecs.base import Codec
from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.page_records import PageRecords
from sglang_kvspec.kv.prefix_store import PageLink, StoreIdentity, StoreLimits, chain_links
from sglang_kvspec.kv.prefix_store.entries import HEADER_BYTES, EntryFormat
from sglang_kvspec.kv.reference_cache import ReferenceKVCache

PAGE_SIZE = 32


def empty_records(geometry: KVGeometry, codec: Codec, num_pages: int) -> PageRecords:
    """Return uninitialised records of pages."""
    shape = (num_pages, geometry.num_layers, geometry.num_kv_heads)
    sizes = (codec.anchor_bytes, codec.residual_bytes)
    return PageRecords(*(torch.empty((*shape, size), dtype=torch.uint8) for size in sizes))


def tokens_of(*pages: int) -> list[int]:
    """Return a prompt whose page i repeats the token pages[i]."""
    return [page for page in pages for _ in range(PAGE_SIZE)]


def links_of(*pages: int) -> list[PageLink]:
    return list(chain_links(tokens_of(*pages), PAGE_SIZE))


def kv_of(kv: PagedKVCache, link: PageLink, version: int = 0) -> torch.Tensor:
    """Return the model's KV of a page: [2, num_layers, page_size, heads, head_dim]. Versions differ
    as KV from different batches does, but enough to give different anchors."""
    g = kv.geometry
    seed = int.from_bytes(link.key[:6], "little")
    rng = torch.Generator().manual_seed(seed)
    shape = (2, g.num_layers, g.page_size, g.num_kv_heads, g.head_dim)
    return torch.randn(shape, generator=rng).to(g.dtype) * (1 + version / 64)


def compute(kv: ReferenceKVCache, link: PageLink, page: int, version: int = 0) -> None:
    """Encode the KV of `link` into a free page."""
    content = kv_of(kv, link, version)
    kv.begin_encode([page])
    for layer in range(kv.geometry.num_layers):
        k, v = content[:, layer][:, None]
        kv.encode(layer, torch.tensor([page]), k, v)
    kv.finish_encode([page])


def target_of(kv: ReferenceKVCache, page: int) -> torch.Tensor:
    """Return a page as the target reads it: [2, num_layers, page_size, heads, head_dim]."""
    layers = range(kv.geometry.num_layers)
    read = [torch.stack(kv.read_target(i, torch.tensor([page]))) for i in layers]
    return torch.stack(read, dim=1)[:, :, 0]


def draft_of(kv: ReferenceKVCache, page: int) -> torch.Tensor:
    """Return a page as drafts read it: [2, num_layers, page_size, heads, head_dim]."""
    layers = range(kv.geometry.num_layers)
    read = [torch.stack(kv.read_draft(i, torch.tensor([page]))) for i in layers]
    return torch.stack(read, dim=1)[:, :, 0]


def holds(kv: ReferenceKVCache, page: int, link: PageLink, version: int = 0) -> bool:
    """Return True if target and drafts read exactly the encoded KV of `link` from a page."""
    k, v = kv_of(kv, link, version)
    record = kv.codec.encode(k, v)
    anchor = torch.stack(kv.codec.decode_anchor(record.anchor))
    target = torch.stack(kv.codec.decode_target(record.anchor, record.residual))
    return torch.equal(target_of(kv, page), target) and torch.equal(draft_of(kv, page), anchor)


def room(identity: StoreIdentity, num_anchors: int, num_residuals: int) -> StoreLimits:
    """Return the limits of a store for num_anchors anchors and num_residuals residuals."""
    anchors, residuals = EntryFormat.of_anchors(identity), EntryFormat.of_residuals(identity)
    anchor_bytes = anchors.record_bytes + anchors.nbytes
    residual_bytes = residuals.record_bytes + residuals.nbytes
    total = 2 * HEADER_BYTES + num_anchors * anchor_bytes + num_residuals * residual_bytes
    # Slightly more than the share, or rounding would take away the last slot.
    share = min(1.0, (num_residuals + 0.01) / num_anchors)
    return StoreLimits(disk_bytes=total + residual_bytes // 50, residual_share=share)
