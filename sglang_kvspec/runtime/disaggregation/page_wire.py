"""Wires of full pages between two servers: split into anchors and residuals, or whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import torch

from sglang_kvspec.codecs.wire import KV, WireCodec, WireCodecName, make_wire_codec
from sglang_kvspec.kv.cache import PagedKVCache
from sglang_kvspec.kv.residual_forms import (
    check_equal_parts,
    joined_heads,
    parts_of_heads,
    residual_form,
)
from sglang_kvspec.transport import Stream

# Most bytes of plain KV that a codec works on at a time, unless one page is larger. Beside them,
# the codec needs CODEC_WORK times as much device memory.
AT_ONCE_BYTES = 32 << 20
CODEC_WORK = 8


class PageWire(Protocol):
    """Wire of one KV cache's pages as bytes. *_bytes: bounds of a page in each stream;
    residual_bytes is 0 without a second stream. A page may go to several receivers, or come from
    several senders, in parts. Each part has an equal share of the KV heads, in their order."""

    anchor_bytes: int
    residual_bytes: int

    def pack(
        self, stream: Stream, pages: Sequence[int], num_parts: int = 1
    ) -> list[list[torch.Tensor]]:
        """Return encoded pages as bytes of an existing stream, each page as a list of its parts:
        1-D uint8 on the CPU. Raises CodecError for pages that the wire cannot carry."""
        ...

    def part_bytes(self, stream: Stream, num_parts: int) -> int:
        """Return the bound of one of num_parts parts of a page."""
        ...

    def check(self, stream: Stream, parts: Sequence[torch.Tensor]) -> None:
        """Check the parts of an arrived page, 1-D uint8. Raises TransportError for parts that are
        none."""
        ...

    def land(
        self, stream: Stream, pages: Sequence[int], payloads: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        """Write arrived pages into the KV cache. payloads: the parts of each page, as many for
        every page. ANCHOR comes first, into free pages, which drafts may read from then on.
        RESIDUAL makes them complete. Raises TransportError for payloads that are not pages."""
        ...


class SplitWire:
    """Wire of anchors as they are, with residuals behind them (Lynx section 4.2), in the form that
    the codec gives residuals outside of a KV cache."""

    def __init__(self, kv: PagedKVCache) -> None:
        self._kv, geometry = kv, kv.geometry
        self._form = residual_form(kv.codec, geometry)
        self._anchor_shape = (geometry.num_layers, geometry.num_kv_heads, kv.codec.anchor_bytes)
        self.anchor_bytes = math.prod(self._anchor_shape)
        self.residual_bytes = self._form.part_bytes(1)

    def pack(
        self, stream: Stream, pages: Sequence[int], num_parts: int = 1
    ) -> list[list[torch.Tensor]]:
        assert all(map(self._kv.is_encoded, pages)), "only an encoded page has records"
        if stream is Stream.ANCHOR:
            return parts_of_heads(self._kv.records.read_anchors(pages), num_parts)
        return self._form.read_parts(self._kv.records, pages, num_parts)

    def part_bytes(self, stream: Stream, num_parts: int) -> int:
        assert self._anchor_shape[1] % num_parts == 0, (
            "the parts of a transfer must divide the KV heads"
        )
        if stream is Stream.ANCHOR:
            return self.anchor_bytes // num_parts
        return self._form.part_bytes(num_parts)

    def check(self, stream: Stream, parts: Sequence[torch.Tensor]) -> None:
        if stream is Stream.ANCHOR:
            check_equal_parts(parts, self.part_bytes(stream, len(parts)))
        else:
            self._form.check(parts)

    def land(
        self, stream: Stream, pages: Sequence[int], payloads: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        kv = self._kv
        for parts in payloads:
            self.check(stream, parts)
        if stream is Stream.ANCHOR:
            records = joined_heads(payloads, self._anchor_shape, kv.records.is_on_gpu)
            kv.begin_landing(pages)
            kv.records.write_anchors(pages, records)
            kv.finish_anchors(pages)
        else:
            self._form.write_parts(kv.records, pages, payloads)
            kv.residuals.finish(pages)


class WholeWire:
    """Wire of pages in one piece, as the baselines send them. Arrived pages are encoded again, so
    that the target precision is what the wire's codec gives back. Without drafts, anchors are not
    read and not written."""

    residual_bytes = 0

    def __init__(self, kv: PagedKVCache, codec: WireCodec, *, drafts: bool) -> None:
        assert kv.codec.target == "exact", "only target exact adds no loss to that of the wire"
        self._kv, self._codec, self._drafts = kv, codec, drafts
        self._part_codecs = {1: codec}
        self.anchor_bytes = codec.max_page_bytes
        self._pages_at_once = max(1, AT_ONCE_BYTES // kv.geometry.plain_page_bytes)

    def pack(
        self, stream: Stream, pages: Sequence[int], num_parts: int = 1
    ) -> list[list[torch.Tensor]]:
        assert stream is Stream.ANCHOR, "a page in one piece has no residual stream"
        codec = self._codec_of(num_parts)
        payloads: list[list[torch.Tensor]] = []
        for portion in self._portions(len(pages)):
            shares = (
                x.chunk(num_parts, dim=-2) for x in self._kv.records.read_whole(pages[portion])
            )
            parts = [codec.encode_pages(k, v) for k, v in zip(*shares, strict=True)]
            payloads += map(list, zip(*parts, strict=True))
        return payloads

    def part_bytes(self, stream: Stream, num_parts: int) -> int:
        return self._codec_of(num_parts).max_page_bytes if stream is Stream.ANCHOR else 0

    def check(self, stream: Stream, parts: Sequence[torch.Tensor]) -> None:
        """Accept all parts: their sizes vary with the coded values, and decoding finds errors."""

    def land(
        self, stream: Stream, pages: Sequence[int], payloads: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        assert stream is Stream.ANCHOR, "a page in one piece has no residual stream"
        for part in self._portions(len(pages)):
            k, v = self._decode(payloads[part])
            self._kv.write_whole(pages[part], k, v, anchors=self._drafts)

    def _decode(self, payloads: Sequence[Sequence[torch.Tensor]]) -> KV:
        codec, device = self._codec_of(len(payloads[0])), self._kv.device
        parts = [codec.decode_pages(of_pages, device) for of_pages in zip(*payloads, strict=True)]
        if len(parts) == 1:
            return parts[0]
        k, v = (torch.cat(heads, dim=-2) for heads in zip(*parts, strict=True))
        return k, v

    def _codec_of(self, num_parts: int) -> WireCodec:
        """Return the codec of one of num_parts parts of a page."""
        if num_parts not in self._part_codecs:
            name = cast("WireCodecName", self._codec.name)
            geometry = self._kv.geometry.part(num_parts)
            self._part_codecs[num_parts] = make_wire_codec(name, geometry)
        return self._part_codecs[num_parts]

    def _portions(self, num_pages: int) -> Iterator[slice]:
        for first in range(0, num_pages, self._pages_at_once):
            yield slice(first, first + self._pages_at_once)
