"""What every wire codec checks about the tensors it is handed."""

from __future__ import annotations

import torch

from sglang_kvspec.codecs.wire.base import PageGeometry, page_shape
from sglang_kvspec.core.errors import CodecError

CPU = torch.device("cpu")


def check_page(geometry: PageGeometry, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise CodecError unless both are pages of the geometry, on the CPU."""
    for part, page in (("K", k), ("V", v)):
        if tuple(page.shape) != page_shape(geometry):
            raise CodecError(
                f"{part} of a page must be {list(page_shape(geometry))}, got {list(page.shape)}"
            )
        if page.dtype != geometry.dtype or page.device != CPU:
            raise CodecError(
                f"{part} of a page must be {geometry.dtype} on the CPU, "
                f"got {page.dtype} on {page.device}"
            )


def check_magnitudes(codec: str, part: str, page: torch.Tensor, limit: float) -> None:
    """Raise CodecError for NaN and for magnitudes above `limit`, which may be the dtype's own."""
    # A NaN is not below anything.
    bad = ~(page.abs() <= limit)
    if bool(bad.any()):
        where = bad.nonzero()[0].tolist()
        raise CodecError(
            f"{part} holds {page[tuple(where)].item()} at [layer, token, head, channel] {where}; "
            f"{codec} carries finite numbers up to {limit:.3g}"
        )


def owned_payload(codec: str, payload: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """A contiguous copy of `payload`, whose memory may start anywhere and be written to again.
    Raises CodecError unless it is uint8 [nbytes] on the CPU and of at least `least`, at most `most`
    bytes."""
    if payload.dtype != torch.uint8 or payload.ndim != 1 or payload.device != CPU:
        raise CodecError(
            f"a payload must be uint8 [nbytes] on the CPU, "
            f"got {payload.dtype} {list(payload.shape)} on {payload.device}"
        )
    if not least <= payload.numel() <= most:
        allowed = f"{least}" if least == most else f"from {least} to {most}"
        raise CodecError(f"a page of {codec} has {allowed} bytes, got {payload.numel()}")
    return payload.clone(memory_format=torch.contiguous_format)
