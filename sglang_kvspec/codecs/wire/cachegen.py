"""Differences from anchor tokens, quantised by layer and entropy coded (CacheGen, SIGCOMM'24)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from sglang_kvspec.codecs.wire import symbols
from sglang_kvspec.codecs.wire.base import KV, PageGeometry, page_shape
from sglang_kvspec.codecs.wire.checks import (
    check_magnitudes,
    check_page,
    check_pages,
    owned_payload,
)
from sglang_kvspec.codecs.wire.delta_record import Coding, DeltaRecord, DeltaRecordFormat
from sglang_kvspec.codecs.wire.rounding import bf16_at_least
from sglang_kvspec.core.errors import CodecError

ANCHOR_EVERY = 10
# Bin widths of the first, the middle and the last third of the layers, in units of the root mean
# square of a layer's differences. Deeper layers tolerate wider bins. These are the widest bins at
# which answers stay the same about as long as with `int4` (README.md).
BINS = (0.25, 0.5, 0.75)
# Sums of squares of larger differences could overflow fp32.
MAX_MAGNITUDE = 2.0**48


@dataclass(frozen=True)
class CacheGenWireCodec:
    """base.WireCodec after CacheGen.

    The first of every ANCHOR_EVERY tokens is an anchor token, kept as 8-bit integers with a scale
    per head. The other tokens are differences from the decoded anchor token before them, as
    integers in units of a bin width. There is one width per layer and part (K, V). Integers are
    coded with a model per channel (symbols.py), or as bytes where the models save nothing. The
    paper measures its models once for an LLM; here a class per channel travels with the page.

    A bin is at least `bins` times the root mean square of its layer's differences wide. It is at
    least the mean scale of the anchor tokens wide, and 127 bins reach the largest difference. No
    error exceeds half a bin, or half a scale in an anchor token. encode() raises CodecError for
    magnitudes above MAX_MAGNITUDE.
    """

    name: ClassVar[str] = "cachegen"

    geometry: PageGeometry
    bins: tuple[float, float, float] = BINS
    format: DeltaRecordFormat = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Derived once; a frozen dataclass sets its own fields this way.
        record_format = DeltaRecordFormat(self.geometry, ANCHOR_EVERY)
        object.__setattr__(self, "format", record_format)

    @property
    def max_page_bytes(self) -> int:
        return self.format.max_bytes

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        check_page(self.geometry, k, v)
        for part, page in (("K", k), ("V", v)):
            limit = min(MAX_MAGNITUDE, torch.finfo(page.dtype).max)
            check_magnitudes(self.name, part, page, limit)
        x = torch.stack((k, v)).float()
        anchors = x[:, :, ::ANCHOR_EVERY]
        scale = bf16_at_least(anchors.abs().amax(-1, keepdim=True) / 127)
        codes = (anchors / _divisor(scale)).round_().clamp_(-127, 127)
        others = self._other_tokens()
        delta = x[:, :, others] - (codes * scale)[:, :, others // ANCHOR_EVERY]
        step = self._steps(delta, scale)
        delta /= _divisor(step)
        classes = symbols.nearest_classes(delta.square().mean(2).sqrt_().flatten().numpy())
        rounded = delta.round_().clamp_(-symbols.MAX_SYMBOL, symbols.MAX_SYMBOL).to(torch.int8)
        by_channel = rounded.permute(0, 1, 3, 4, 2).reshape(classes.size, -1).numpy()
        coding, body = _shorter(by_channel, classes)
        fixed = {"step": step, "anchor_scale": scale, "anchor_codes": codes.to(torch.int8)}
        return self.format.write(DeltaRecord(**fixed, classes=classes, coding=coding, body=body))

    def decode(self, payload: torch.Tensor) -> KV:
        own = owned_payload(self.name, payload, self.format.min_bytes, self.max_page_bytes)
        record = self.format.read(own)
        others = self._other_tokens()
        by_channel = _symbols_of(record, len(others))
        layers, tokens, heads, channels = page_shape(self.geometry)
        rounded = torch.from_numpy(by_channel).view(2, layers, heads, channels, len(others))
        # Forged scales may exceed fp32, and the sum of two infinities may be NaN.
        most = torch.finfo(torch.float32).max
        anchors = (record.anchor_codes.float() * record.anchor_scale).clamp_(-most, most)
        delta = rounded.permute(0, 1, 4, 2, 3).float() * record.step
        x = anchors[:, :, torch.arange(tokens) // ANCHOR_EVERY]
        x[:, :, others] += delta
        limit = torch.finfo(self.geometry.dtype).max
        k, v = x.clamp_(-limit, limit).to(self.geometry.dtype).unbind()
        return k, v

    def encode_pages(self, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        """Encode pages one by one on the CPU, where the entropy coder runs."""
        check_pages(self.geometry, k, v)
        return [self.encode(*page) for page in zip(k.cpu(), v.cpu(), strict=True)]

    def decode_pages(self, payloads: Sequence[torch.Tensor], device: torch.device) -> KV:
        pairs = map(self.decode, payloads)
        k, v = (torch.stack(part) for part in zip(*pairs, strict=True))
        return _sent(k, device), _sent(v, device)

    def _other_tokens(self) -> torch.Tensor:
        """Return the positions in the page of all but the anchor tokens."""
        tokens = torch.arange(self.geometry.page_size)
        return tokens[tokens % ANCHOR_EVERY != 0]

    def _steps(self, delta: torch.Tensor, anchor_scale: torch.Tensor) -> torch.Tensor:
        """Return the bin widths [2, num_layers, 1, 1, 1] for differences delta [2, num_layers, ...]
        from anchor tokens of scales anchor_scale [2, num_layers, ...]."""
        layers = self.geometry.num_layers
        thirds = torch.arange(layers) * len(self.bins) // layers
        bins = torch.tensor(self.bins)[thirds].view(1, layers, 1, 1, 1)
        rms = delta.square().mean((2, 3, 4), keepdim=True).sqrt_()
        largest = delta.abs().amax((2, 3, 4), keepdim=True)
        step = torch.maximum(bins * rms, largest / symbols.MAX_SYMBOL)
        # Finer bins would only code the rounding errors of the anchor tokens.
        return torch.maximum(step, anchor_scale.mean((2, 3, 4), keepdim=True))


def _sent(pages: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        pages = pages.pin_memory()
    return pages.to(device, non_blocking=True)


def _divisor(step: torch.Tensor) -> torch.Tensor:
    """Return `step`, with 1 in place of 0: all values that a step of 0 divides are 0, too."""
    return torch.where(step > 0, step, 1.0)


def _shorter(by_channel: symbols.Symbols, classes: symbols.Classes) -> tuple[Coding, bytes]:
    words = symbols.encode(by_channel, classes)
    if words.nbytes < by_channel.nbytes:
        return Coding.ENTROPY, words.astype("<u4").tobytes()
    return Coding.BYTES, by_channel.tobytes()


def _symbols_of(record: DeltaRecord, per_channel: int) -> symbols.Symbols:
    """Return the symbols [num_channels, per_channel] of a record. Raises CodecError if the record
    holds another number of symbols."""
    if record.coding is Coding.ENTROPY:
        if len(record.body) % 4:
            raise CodecError(
                f"coded symbols must be whole words of 4 bytes, got {len(record.body)} bytes"
            )
        words = np.frombuffer(record.body, "<u4").astype(np.uint32)
        return symbols.decode(words, record.classes, per_channel)
    expected = record.classes.size * per_channel
    if len(record.body) != expected:
        raise CodecError(f"{expected} symbols must take {expected} bytes, got {len(record.body)}")
    return np.frombuffer(bytearray(record.body), np.int8).reshape(-1, per_channel)
