"""Checks of the tensors that a codec is given."""

from __future__ import annotations

from typing import Protocol

import torch

from sglang_kvspec.core.errors import CodecError


class PageShape(Protocol):
    """Sizes and dtype that a codec is bound to."""

    @property
    def page_size(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...


def check_pages(
    codec: PageShape, k_pages: torch.Tensor, v_pages: torch.Tensor, debug: bool
) -> None:
    """Raise CodecError unless both are [N, page_size, num_kv_heads, head_dim] of the codec's dtype,
    with equal N and heads. In debug mode, NaN and inf raise, too, which costs a pass over both."""
    for name, pages in (("K", k_pages), ("V", v_pages)):
        expected = (codec.page_size, codec.head_dim)
        if pages.ndim != 4 or (pages.shape[1], pages.shape[3]) != expected:
            raise CodecError(
                f"{name} pages must be [N, {codec.page_size}, heads, {codec.head_dim}], "
                f"got {tuple(pages.shape)}"
            )
        if pages.dtype != codec.dtype:
            raise CodecError(f"{name} pages must be {codec.dtype}, got {pages.dtype}")
        if debug and not bool(pages.isfinite().all()):
            bad = (~pages.isfinite()).nonzero()[0].tolist()
            raise CodecError(
                f"{name} pages hold {pages[tuple(bad)].item()} at [page, token, head, channel] "
                f"{bad}; a codec represents finite values only"
            )
    if k_pages.shape != v_pages.shape:
        raise CodecError(
            f"K and V pages must have one shape, got {tuple(k_pages.shape)} and "
            f"{tuple(v_pages.shape)}"
        )


def check_records(name: str, records: torch.Tensor, nbytes: int) -> None:
    """Raise CodecError unless records are uint8 [N, num_kv_heads, nbytes]."""
    if records.dtype != torch.uint8 or records.ndim != 3 or records.shape[2] != nbytes:
        raise CodecError(
            f"{name} records must be uint8 [N, heads, {nbytes}], "
            f"got {records.dtype} {tuple(records.shape)}"
        )
