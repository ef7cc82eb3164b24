"""Keys and values of a request's earlier tokens on a GPU, for a scorer that is shown a prefill."""

from __future__ import annotations

import math

import torch

from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.gpu_cache import GpuKVCache
from sglang_kvspec.scorers.attention import BLOCK_ELEMENTS

# Pages that are decoded at once, which bounds the memory of codes in 32 bits. To decode some takes
# about 50 kernels a layer, and two waits for the device.
PAGES_AT_ONCE = 256
# Bytes that decoding takes for each element of K, besides its results.
DECODING_BYTES = 16


def nbytes_of(geometry: KVGeometry, most_pages: int) -> int:
    """Return about how many bytes a scorer takes on a GPU in a prefill of most_pages pages: keys
    and values of a layer, then either what decodes them, or the keys in fp32 and attention before
    and behind its softmax. What a scorer keeps from chunk to chunk comes on top."""
    elements, fp32 = math.prod(geometry.page_shape), torch.float32.itemsize
    decoding = min(PAGES_AT_ONCE, most_pages) * elements * DECODING_BYTES
    scoring = most_pages * elements * fp32 + 2 * BLOCK_ELEMENTS * fp32
    return most_pages * elements * 2 * geometry.dtype.itemsize + max(decoding, scoring)


class EarlierTokens:
    """Keys and values of the first tokens of a request: pages of the recent window in full
    precision, and before it what residuals hold where the target is `exact`, else anchors.

    Residuals are in the cache, as the prefill itself attends to them.
    """

    def __init__(self, kv: GpuKVCache, pages: torch.Tensor, num_tokens: int) -> None:
        """pages: the request's page ids on the CPU. Which of them are in the window is looked up
        now."""
        self._kv, self._num_tokens = kv, num_tokens
        ids = pages[: -(-num_tokens // kv.geometry.page_size)].tolist()
        window = kv.window.slots
        recent = [place for place, page in enumerate(ids) if page in window]
        encoded = [place for place, page in enumerate(ids) if page not in window]
        self._num_pages = len(ids)
        self._recent = self._on_device(recent)
        self._slots = self._on_device([window.slot_of(ids[place]) for place in recent])
        self._encoded = self._on_device(encoded)
        self._ids = self._on_device([ids[place] for place in encoded])

    def followed_by(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return new (k, v) of a layer, each [num_tokens + n, num_kv_heads, head_dim]: the earlier
        tokens, then the given ones [n, num_kv_heads, head_dim]. Raises torch.OutOfMemoryError
        where a GPU has no room for them."""
        kv, geometry = self._kv, self._kv.geometry
        page_size, heads = geometry.page_size, geometry.page_shape[1:]
        # The last page may have room for some of the given tokens.
        num_read, end = self._num_pages * page_size, self._num_tokens + len(k)
        shape = (2, max(num_read, end), *heads)
        both = torch.empty(shape, dtype=geometry.dtype, device=kv.device)
        pages = torch.unflatten(both[:, :num_read], 1, (self._num_pages, page_size))
        for part, window in zip(pages, kv.window.layer(layer), strict=True):
            part[self._recent] = window[self._slots]
        for first in range(0, len(self._encoded), PAGES_AT_ONCE):
            some = slice(first, first + PAGES_AT_ONCE)
            places = self._encoded[some]
            pages[0, places], pages[1, places] = self._read(layer, self._ids[some])
        for part, new in zip(both, (k, v), strict=True):
            part[self._num_tokens : end] = new
        return both[0, :end], both[1, :end]

    def _read(self, layer: int, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (k, v) of encoded pages, each [N, page_size, num_kv_heads, head_dim]."""
        kv = self._kv
        if kv.codec.target != "exact":
            return kv.codec.decode_anchor(kv.anchors.layer(layer)[ids])
        slots = kv.residual_slots[ids].long()
        k, v = (part[slots].transpose(1, 2) for part in kv.exact_pages(layer))
        return k, v

    def _on_device(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._kv.device)
