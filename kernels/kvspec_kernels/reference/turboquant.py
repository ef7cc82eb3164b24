"""TurboQuant's anchors (arXiv 2504.19874) in plain torch, in the variant for the mean squared
error: a random rotation, then the best scalar quantiser for each coordinate.

A token's head is divided by its norm, which the record keeps in bf16. The unit vector is rotated:
random signs, then a Hadamard matrix (the paper draws a dense rotation, which costs D^2 instead of
D log D). Every rotated coordinate then has the same known distribution, whatever the data, and its
code is the nearest of the levels of `lloyd_max.py`. A draft reads levels, rotated back and
multiplied with the norm. Nothing is calibrated, and the paper defines no correction to 8 bits.

A head whose size is no power of two is rotated in blocks, and each block has a norm of its own: the
distribution of coordinates is known for blocks only. Norms then cost up to one bit an element.

The paper's second stage, one bit of a Johnson-Lindenstrauss sketch of the error, is left out. It
makes products with queries unbiased and takes one of the bits from the levels. Without it, products
come out smaller on average: by 12 % at 2 bits, 3 % at 3 bits and 1 % at 4 bits.

Decoding rotates back. Kernels read rotated values and rotate query and output instead: see
`hadamard.py`, and rotate and decode_rotated.
"""

from __future__ import annotations

from hashlib import sha256

import torch

from kvspec_kernels.codecs.fields import hadamard_block
from kvspec_kernels.codecs.turboquant import TurboQuantSettings
from kvspec_kernels.formats import RecordLayout
from kvspec_kernels.reference import bit_packing, hadamard, rows
from kvspec_kernels.reference.lloyd_max import levels


def encode(
    k: torch.Tensor,
    v: torch.Tensor,
    settings: TurboQuantSettings,
    anchor_layout: RecordLayout,
    residual_layout: RecordLayout | None = None,
) -> tuple[torch.Tensor, None]:
    """Encode pages k, v [N, P, H, D] into anchor records [N, H, nbytes] uint8."""
    anchors = anchor_layout.empty_records((k.shape[0], k.shape[2]), k.device)
    table = _table(k.shape[-1], settings, k.device)
    edges = _edges(table)
    for part, pages in (("k", k), ("v", v)):
        blocks = _blocks(rows.by_head(pages))
        norm = _norm(blocks)
        # A zero norm means that all values of the block are 0.
        unit = (blocks / torch.where(norm > 0, norm, 1.0)).flatten(3)
        codes = torch.bucketize(rotate(unit, settings), edges, out_int32=True)
        packed = bit_packing.pack(codes, settings.anchor_bits)
        anchor_layout[f"{part}_codes"].view(anchors).copy_(packed)
        anchor_layout[f"{part}_norm"].view(anchors).copy_(norm.squeeze(4))
    return anchors, None


def decode_anchor(
    anchors: torch.Tensor, settings: TurboQuantSettings, layout: RecordLayout, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode anchor records [N, H, nbytes] into pages (k, v) [N, P, H, D] `dtype`."""

    def part(name: str) -> torch.Tensor:
        unit, norm = _unit_and_norm(name, anchors, settings, layout)
        # The norm comes last: a rotation of values near the dtype's maximum would overflow.
        restored = _blocks(rotate_back(unit, settings)) * norm
        return rows.to_pages(restored.flatten(3), dtype)

    return part("k"), part("v")


def decode_rotated(
    anchors: torch.Tensor, settings: TurboQuantSettings, layout: RecordLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode anchor records [N, H, nbytes] into new rotated K and V [N, H, P, D] fp32."""

    def part(name: str) -> torch.Tensor:
        unit, norm = _unit_and_norm(name, anchors, settings, layout)
        return (_blocks(unit) * norm).flatten(3)

    return part("k"), part("v")


def encode_table(settings: TurboQuantSettings, head_dim: int) -> list[float]:
    """Return the edges between levels, then the signs of the rotation."""
    device = torch.device("cpu")
    edges = _edges(_table(head_dim, settings, device))
    return [*edges.tolist(), *_signs(head_dim, settings.seed, device).tolist()]


def code_values(
    settings: TurboQuantSettings, head_dim: int, device: torch.device, *, refined: bool
) -> torch.Tensor:
    """See kvspec_kernels.reference.codec.KernelReference."""
    assert not refined, "the codec has no corrections"
    return torch.cat((_table(head_dim, settings, device), _signs(head_dim, settings.seed, device)))


def rotate(values: torch.Tensor, settings: TurboQuantSettings) -> torch.Tensor:
    """Return values [..., D] fp32, such as queries, rotated as encode rotates K and V."""
    return hadamard.rotate(values * _signs(values.shape[-1], settings.seed, values.device))


def rotate_back(values: torch.Tensor, settings: TurboQuantSettings) -> torch.Tensor:
    """Invert rotate, for sums of rotated V [..., D] fp32."""
    return hadamard.rotate(values) * _signs(values.shape[-1], settings.seed, values.device)


def _signs(head_dim: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return head_dim random signs, fp32: 256 bits of a hash, which are the same on all machines
    and in all versions of torch."""
    drawn = torch.tensor(list(sha256(str(seed).encode()).digest()), dtype=torch.uint8)
    bits = bit_packing.unpack(drawn, 1)[:head_dim]
    return (1 - 2 * bits).to(device, torch.float32)


def _table(head_dim: int, settings: TurboQuantSettings, device: torch.device) -> torch.Tensor:
    """Return the levels [2^bits] fp32 of a unit block's coordinates."""
    found = levels(hadamard_block(head_dim), settings.anchor_bits)
    return torch.tensor(found, dtype=torch.float32, device=device)


def _edges(table: torch.Tensor) -> torch.Tensor:
    """Return the values half-way between levels."""
    return (table[1:] + table[:-1]) / 2


def _blocks(values: torch.Tensor) -> torch.Tensor:
    """Return values [N, H, P, D] as a view [N, H, P, blocks, channels of a block]."""
    return torch.unflatten(values, 3, (-1, hadamard_block(values.shape[3])))


def _norm(blocks: torch.Tensor) -> torch.Tensor:
    """Return the norms of blocks along the last dimension, which is reduced to 1, as stored: bf16
    values in fp32."""
    squares = blocks.double().square()
    # Added in pairs, so that every device adds in the same order.
    while squares.shape[-1] > 1:
        first, second = squares.chunk(2, dim=-1)
        squares = first + second
    limit = torch.finfo(torch.bfloat16).max
    return squares.sqrt().clamp_max(limit).to(torch.bfloat16).float()


def _unit_and_norm(
    name: str, anchors: torch.Tensor, settings: TurboQuantSettings, layout: RecordLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rotated unit vectors [N, H, P, D] fp32 and norms [N, H, P, blocks, 1] fp32."""
    codes = bit_packing.unpack(layout[f"{name}_codes"].view(anchors), settings.anchor_bits)
    unit = _table(codes.shape[-1], settings, anchors.device)[codes]
    return unit, layout[f"{name}_norm"].view(anchors).float()[..., None]
