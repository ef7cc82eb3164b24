"""Handover of a request to a decode server: its first token and its last page."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Sequence

import msgspec
import torch

from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.kv.geometry import KVGeometry

# Bound of a header's bytes beside SGLang's fields and their lengths.
_HEADER_SLACK_BYTES = 1024
_LENGTH_BYTES = 4
_DIGEST_BYTES = 16
# Dimension of a tail along which its KV heads lie.
HEADS_OF_TAIL = 3


def digest_of(token_ids: Sequence[int]) -> bytes:
    """Return 16 bytes by which two servers check that they were given the same prompt."""
    ids = array("q", token_ids).tobytes()
    return hashlib.blake2b(ids, digest_size=_DIGEST_BYTES).digest()


class Handover(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Header of a handover. fields: SGLang's state of the request after its first token, one entry
    a buffer. prompt: digest of the token ids that were computed. prefill_ended_at: seconds since
    the epoch, by the prefill server's clock. num_tail_tokens: tokens on the request's last page,
    which goes in full precision even if it is full. is_encoded: the page's records go instead,
    because it was encoded already and full precision is lost."""

    fields: tuple[bytes, ...]
    prompt: bytes
    prefill_ended_at: float
    num_tail_tokens: int
    is_encoded: bool = False


class HandoverFormat:
    """Byte format of one server's handovers: length of the header, header (msgpack), tail. The tail
    is K and V, [num_layers, 2, num_tail_tokens, num_kv_heads, head_dim] in the KV dtype, or the
    page's records as uint8."""

    def __init__(
        self, geometry: KVGeometry, field_bytes: tuple[int, ...], record_bytes: int
    ) -> None:
        """field_bytes: size of each of SGLang's fields. record_bytes: size of one page's
        records."""
        self.geometry, self._field_bytes = geometry, field_bytes
        self._record_bytes = record_bytes
        heads_bytes = geometry.num_kv_heads * geometry.head_dim * geometry.dtype.itemsize
        self._token_bytes = 2 * geometry.num_layers * heads_bytes
        self._decoder = msgspec.msgpack.Decoder(Handover)

    def of_part(self, num_parts: int) -> HandoverFormat:
        """Return the format of one of num_parts ranks that share these KV heads equally."""
        geometry = self.geometry.part(num_parts)
        return HandoverFormat(geometry, self._field_bytes, self._record_bytes // num_parts)

    @property
    def max_bytes(self) -> int:
        header = sum(self._field_bytes) + 8 * len(self._field_bytes) + _HEADER_SLACK_BYTES
        tail = max(self.geometry.page_size * self._token_bytes, self._record_bytes)
        return _LENGTH_BYTES + header + tail

    def encode(self, handover: Handover, tail: torch.Tensor) -> torch.Tensor:
        """Return a handover as 1-D uint8 on the CPU. tail: as in the class's docstring, of this
        server's KV heads or some of them."""
        header = msgspec.msgpack.encode(handover)
        start = len(header).to_bytes(_LENGTH_BYTES, "little") + header
        payload = tail.contiguous().view(-1).view(torch.uint8)
        return torch.cat([torch.frombuffer(bytearray(start), dtype=torch.uint8), payload])

    def decode(self, data: torch.Tensor) -> tuple[Handover, torch.Tensor]:
        """Return the header, and a copy of the tail. data: 1-D uint8. Raises TransportError if
        `data` is not a handover of this server's format."""
        raw = data.numpy().tobytes()
        length = int.from_bytes(raw[:_LENGTH_BYTES], "little")
        end = _LENGTH_BYTES + length
        try:
            handover = self._decoder.decode(raw[_LENGTH_BYTES:end])
        except msgspec.DecodeError as error:
            raise TransportError(f"the handover cannot be decoded: {error}") from None
        sizes = tuple(map(len, handover.fields))
        if sizes != self._field_bytes:
            raise TransportError(
                f"the fields of the handover have {sizes} bytes, expected {self._field_bytes}"
            )
        tokens = handover.num_tail_tokens
        if not 1 <= tokens <= self.geometry.page_size or not math.isfinite(
            handover.prefill_ended_at
        ):
            raise TransportError(
                f"the handover has {tokens} tokens in its tail (allowed: 1 to "
                f"{self.geometry.page_size}) and prefill_ended_at {handover.prefill_ended_at} "
                "(allowed: finite)"
            )
        expected = self._record_bytes if handover.is_encoded else tokens * self._token_bytes
        if len(raw) - end != expected or handover.is_encoded > (tokens == self.geometry.page_size):
            raise TransportError(
                f"the tail of the handover has {len(raw) - end} bytes for {tokens} tokens, "
                f"expected {expected} (encoded: {handover.is_encoded}, True only for a full page)"
            )
        tail = torch.frombuffer(bytearray(raw[end:]), dtype=torch.uint8)
        if handover.is_encoded:
            return handover, tail
        shape = (
            self.geometry.num_layers,
            2,
            tokens,
            self.geometry.num_kv_heads,
            self.geometry.head_dim,
        )
        return handover, tail.view(self.geometry.dtype).view(shape)


def common_handover(handovers: Sequence[Handover]) -> Handover:
    """Return the first rank's handover, with the latest prefill_ended_at, if all ranks of the
    prefill server mean the same. Raises TransportError if they do not. First token, room and prompt
    must be equal; a log-probability may differ in its last bits."""
    first = handovers[0]
    for other in handovers[1:]:
        if _meaning(other) != _meaning(first):
            raise TransportError(
                "the ranks of the prefill server sent handovers of different requests"
            )
    return msgspec.structs.replace(
        first, prefill_ended_at=max(each.prefill_ended_at for each in handovers)
    )


def _meaning(handover: Handover) -> tuple[object, ...]:
    return (
        handover.fields[0],
        handover.fields[-1],
        handover.prompt,
        handover.num_tail_tokens,
        handover.is_encoded,
    )
