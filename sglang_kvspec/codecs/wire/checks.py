"""Checks of the tensors that a wire codec is given."""

from __future__ import annotations

from collections.abc import Sequence

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


def check_pages(geometry: PageGeometry, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise CodecError unless k and v are equally many pages of the geometry, on one device."""
    for part, pages in (("K", k), ("V", v)):
        if tuple(pages.shape) != (len(k), *page_shape(geometry)):
            raise CodecError(
                f"{part} of {len(k)} pages must be {[len(k), *page_shape(geometry)]}, "
                f"got {list(pages.shape)}"
            )
        if pages.dtype != geometry.dtype or pages.device != k.device:
            raise CodecError(
                f"{part} of pages must be {geometry.dtype} on {k.device}, "
                f"got {pages.dtype} on {pages.device}"
            )


def check_magnitudes(codec: str, part: str, page: torch.Tensor, limit: float) -> None:
    """Raise CodecError for NaN and for magnitudes above `limit`, in one page or several. limit: may
    be the largest number of the dtype."""
    # `<=` is False for NaN.
    bad = ~(page.abs() <= limit)
    if bool(bad.any()):
        where = bad.nonzero()[0].tolist()
        raise CodecError(
            f"{part} holds {page[tuple(where)].item()} at [layer, token, head, channel] "
            f"{where[-4:]}; {codec} carries finite numbers up to {limit:.3g}"
        )


def owned_payload(codec: str, payload: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """Return a contiguous copy of `payload`, whose own memory may be unaligned and may be
    overwritten. Raises CodecError unless `payload` is uint8 [nbytes] on the CPU, of `least` to
    `most` bytes."""
    _check_payload(codec, payload, least, most)
    return payload.clone(memory_format=torch.contiguous_format)


def owned_payloads(
    codec: str, payloads: Sequence[torch.Tensor], nbytes: int, device: torch.device
) -> torch.Tensor:
    """Return a copy [N, nbytes] of payloads of nbytes each, pinned if `device` is a GPU. Raises
    CodecError as owned_payload() does."""
    for payload in payloads:
        _check_payload(codec, payload, nbytes, nbytes)
    is_pinned = device.type == "cuda"
    own = torch.empty((len(payloads), nbytes), dtype=torch.uint8, pin_memory=is_pinned)
    return torch.stack(list(payloads), out=own)


def _check_payload(codec: str, payload: torch.Tensor, least: int, most: int) -> None:
    if payload.dtype != torch.uint8 or payload.ndim != 1 or payload.device != CPU:
        raise CodecError(
            f"a payload must be uint8 [nbytes] on the CPU, "
            f"got {payload.dtype} {list(payload.shape)} on {payload.device}"
        )
    if not least <= payload.numel() <= most:
        allowed = f"{least}" if least == most else f"from {least} to {most}"
        raise CodecError(f"a page of {codec} must have {allowed} bytes, got {payload.numel()}")
