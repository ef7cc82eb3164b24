"""Variants to measure: named ways to encode a cache, with their cost in bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from acceptance.drafting import PageMap, through_anchor, through_target
from kvspec_kernels.formats import Log4Settings
from kvspec_kernels.reference import companding
from sglang_kvspec.codecs import make_codec
from sglang_kvspec.codecs.record_codec import RecordCodec

PAGE_SIZE = 64
MAX_ANCHOR_BITS = 4.6


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to encode pages.

    name: the name in reports. bits: bits per element of K or V, metadata included. page_map: maps
    exact pages to decoded ones.
    """

    name: str
    bits: float
    page_map: PageMap


def shipped(head_dim: int) -> list[Variant]:
    """Return both codecs with default settings, as a draft and an int8 verification read them."""
    variants = []
    for name in ("log4", "uniform4"):
        codec = make_codec(
            name, target="int8", page_size=PAGE_SIZE, head_dim=head_dim, dtype=torch.float32
        )
        bits = codec.anchor_bits_per_element
        variants.append(Variant(name, bits, through_anchor(codec)))
        variants.append(Variant(f"{name}_int8", bits + 4, through_target(codec)))
    return variants


def grid(head_dim: int) -> list[Variant]:
    """Return the variants of the sweep, log4's default first, uniform4 last.

    Most variants change one parameter, of linear levels or of levels by table. Two take the choices
    of the Lynx paper.
    """
    linear = Log4Settings()
    base = replace(linear, alpha=0.25, top=120, levels="interval")
    lynx = Log4Settings(64, 64, alpha=8.0, centre="mean", levels="corner")
    settings = [linear, base]
    settings += [replace(linear, top=top) for top in (114, 116, 120)]
    settings += [replace(base, alpha=a) for a in (0.05, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0)]
    settings += [replace(base, last_level=at) for at in (0.5, 0.6, 0.65, 0.75, 0.8)]
    settings += [replace(base, alpha=0.5, last_level=at) for at in (0.65, 0.75)]
    settings += [replace(base, top=top) for top in (112, 116, 118)]
    settings += [replace(base, k_chunk=64), replace(base, v_chunk=32)]
    settings += [replace(base, centre="mean"), replace(base, centre="mean", alpha=2.0)]
    settings += [replace(base, levels="corner"), lynx, replace(lynx, k_chunk=32, v_chunk=32)]
    variants = [_log4(s, head_dim) for s in settings]
    # The difference to `base` is the cost of rounded metadata: centres and scales stay in fp32.
    variants.append(_with_fp32_metadata(base))
    return [*variants, *(v for v in shipped(head_dim) if v.name == "uniform4")]


def _log4(settings: Log4Settings, head_dim: int) -> Variant:
    codec = RecordCodec(settings, "int8", PAGE_SIZE, head_dim, torch.float32)
    return Variant(describe(settings), codec.anchor_bits_per_element, through_anchor(codec))


def describe(settings: Log4Settings) -> str:
    levels = settings.levels
    level = f"last {settings.last_level}" if levels == "interval" else levels
    return (
        f"chunks {settings.k_chunk}/{settings.v_chunk}, a {settings.alpha}, top {settings.top}, "
        f"{settings.centre}, {level}"
    )


def _with_fp32_metadata(settings: Log4Settings) -> Variant:
    bits = 4 + (64 / settings.k_chunk + 64 / settings.v_chunk) / 2

    def page_map(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return part(settings.k_chunk)(k), part(settings.v_chunk)(v)

    def part(chunk: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda pages: _unrounded(pages, chunk, settings)

    return Variant(f"{describe(settings)}, fp32 metadata", bits, page_map)


def _unrounded(pages: torch.Tensor, chunk: int, settings: Log4Settings) -> torch.Tensor:
    """Return pages [N, P, H, D] decoded from anchor codes with fp32 centres and scales."""
    law = companding.tables(settings, pages.device)
    levels = torch.tensor(companding.magnitude_levels(settings), device=pages.device)
    chunks = pages.unflatten(1, (-1, chunk))
    low, high = chunks.amin(2, keepdim=True), chunks.amax(2, keepdim=True)
    centred = chunks - (low + high) / 2
    scale = ((high - low) / 2).clamp_min(torch.finfo(torch.float32).tiny)
    code = torch.bucketize(centred.abs() / scale, law.magnitude_edges, right=True)
    signed = torch.where(centred < 0, -levels[code], levels[code])
    return ((low + high) / 2 + signed * scale).flatten(1, 2)
