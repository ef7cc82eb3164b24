"""KVQuant's anchors (arXiv 2401.18079) in plain torch: non-uniform levels, and outliers apart.

K is normalised per channel of a page and V per token, to -1..1 around the middle of the range. The
values of a record share 2^bits levels for K and as many for V, in fp16. About 1 % of the values of
each part are outliers: the record has their place and their value in bf16, and they count for no
range and no level. The number of outliers is fixed, so all records have one size. The paper defines
no correction to 8 bits.

Deviations from the paper:
- The paper fits levels once for a layer, by k-means over a calibration set, weighted with Fisher
  information. No calibration is needed here: `page_levels.py` fits them to each record by k-means
  with equal weights, for 0.02 to 0.06 bits an element.
- The paper takes the range of a channel of K from the calibration set. Here it is that of the page.
- Outliers are the values of a record that lie furthest from the median of their channel or token,
  in units of the median distance. The paper takes a quantile of each channel, and of each token,
  but a page has too few values of each for one in a hundred.
- The first token of a request has no more bits than others, because an encoder knows no positions.
- **K is encoded behind the rotary embedding.** The paper encodes it in front, where channels are
  more alike over time. An encoder knows neither positions nor the model's rotary table: pages are
  named by their id only. In a study it cost little (docs/benchmarks/compressors.md).
"""

from __future__ import annotations

import torch

from kvspec_kernels.codecs.kvquant import KVQuantSettings
from kvspec_kernels.formats import RecordLayout
from kvspec_kernels.reference import bit_packing, page_levels, rows

# Dimension of values [N, H, P, D] along which a vector lies: a channel of K, a token of V.
VECTOR_DIM = {"k": 2, "v": 3}
LARGEST = torch.finfo(torch.bfloat16).max


def encode(
    k: torch.Tensor,
    v: torch.Tensor,
    settings: KVQuantSettings,
    anchor_layout: RecordLayout,
    residual_layout: RecordLayout | None = None,
) -> tuple[torch.Tensor, None]:
    """Encode pages k, v [N, P, H, D] into anchor records [N, H, nbytes] uint8."""
    anchors = anchor_layout.empty_records((k.shape[0], k.shape[2]), k.device)
    bits = settings.anchor_bits
    for index, (part, pages) in enumerate((("k", k), ("v", v))):
        values, dim = rows.by_head(pages), VECTOR_DIM[part]
        places = _outliers(values, dim, anchor_layout[f"{part}_places"].shape[0])
        is_outlier = torch.zeros(values.shape, dtype=torch.bool, device=k.device).flatten(2)
        is_outlier.scatter_(2, places, True)
        centre, reach = _range(values, is_outlier.view(values.shape), dim)
        unit = (values - centre) / torch.where(reach > 0, reach, 1.0)
        unit = unit.clamp(-1, 1).nan_to_num(0.0).flatten(2)
        levels = page_levels.fit(unit, ~is_outlier, bits)
        codes = page_levels.nearest(unit, levels).view(values.shape)
        outliers = values.flatten(2).gather(2, places).clamp(-LARGEST, LARGEST)
        anchor_layout["levels"].view(anchors)[..., index, :] = levels
        for name, stored in (
            ("codes", bit_packing.pack(codes, bits)),
            ("centre", centre.squeeze(dim)),
            ("reach", reach.squeeze(dim)),
            ("outliers", outliers),
            # Places from 2^15 on become negative: the 16 bits count.
            ("places", places.to(torch.int16)),
        ):
            anchor_layout[f"{part}_{name}"].view(anchors).copy_(stored)
    return anchors, None


def decode_anchor(
    anchors: torch.Tensor, settings: KVQuantSettings, layout: RecordLayout, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode anchor records [N, H, nbytes] into pages (k, v) [N, P, H, D] `dtype`."""

    def part(index: int, name: str) -> torch.Tensor:
        def stored(field: str) -> torch.Tensor:
            return layout[f"{name}_{field}"].view(anchors)

        codes = bit_packing.unpack(stored("codes"), settings.anchor_bits)
        levels = layout["levels"].view(anchors)[..., index, :].float()
        values = levels.gather(-1, codes.flatten(2).long()).view(codes.shape)
        centre, reach = (
            stored(field).float().unsqueeze(VECTOR_DIM[name]) for field in ("centre", "reach")
        )
        values.mul_(reach).add_(centre)
        places = stored("places").long() & 0xFFFF
        values.flatten(2).scatter_(2, places, stored("outliers").float())
        return rows.to_pages(values, dtype)

    return part(0, "k"), part(1, "v")


def _outliers(values: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """Return the places [N, H, count] of the outliers of values [N, H, P, D], in P * D, in order.
    dim: along which a vector lies."""
    distance = (values - values.median(dim, keepdim=True).values).abs()
    usual = distance.median(dim, keepdim=True).values
    # Infinite where most values of a vector are equal.
    score = torch.where(distance > 0, distance / usual, 0.0).nan_to_num(0.0, posinf=torch.inf)
    # Bits of positive floats are in the order of their values. Of equal scores the first places
    # win, on every device.
    ranks = score.flatten(2).contiguous().view(torch.int32).long() << 32
    ranks -= torch.arange(ranks.shape[2], device=values.device)
    return ranks.topk(count, dim=2).indices.sort(dim=2).values


def _range(
    values: torch.Tensor, is_outlier: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return middle and half of the range of each vector without its outliers, as stored: bf16
    values in fp32, with `dim` reduced to 1."""
    low = values.masked_fill(is_outlier, torch.inf).amin(dim, keepdim=True)
    high = values.masked_fill(is_outlier, -torch.inf).amax(dim, keepdim=True)
    # A vector of outliers alone has no range.
    has_range = low <= high
    low, high = torch.where(has_range, low, 0.0), torch.where(has_range, high, 0.0)
    centre = (low / 2 + high / 2).clamp(-LARGEST, LARGEST).bfloat16().float() + 0.0
    reach = torch.maximum(high - centre, centre - low).clamp_max(LARGEST)
    return centre, reach.bfloat16().float() + 0.0
