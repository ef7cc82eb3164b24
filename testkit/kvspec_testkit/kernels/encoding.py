"""Pages to encode, and comparisons of the kernels' records with those of the references."""

from __future__ import annotations

import torch

from kvspec_kernels.codecs.spec import CodecSpec
from kvspec_kernels.formats import Target, anchor_layout, residual_layout
from kvspec_kernels.ops.attention_plan import Backend
from kvspec_kernels.ops.encode import encode_pages
from kvspec_kernels.reference import exact
from kvspec_kernels.reference.codec import reference_of

Pages = tuple[torch.Tensor, torch.Tensor]

POISON = 0xA5


def encode_by_reference(
    k: torch.Tensor, v: torch.Tensor, settings: CodecSpec, target: Target
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode pages k, v [N, P, H, D] into anchor and residual records [N, H, nbytes] uint8 on the
    CPU."""
    k, v = k.cpu(), v.cpu()
    _, page_size, _, head_dim = k.shape
    anchor = anchor_layout(settings, page_size, head_dim)
    residual = residual_layout(settings, target, page_size, head_dim, k.dtype)
    corrections = residual if target == "int8" else None
    anchors, residuals = reference_of(settings).encode(k, v, settings, anchor, corrections)
    return anchors, exact.encode(k, v, residual) if residuals is None else residuals


def make_pages(
    num: int, page_size: int, heads: int, head_dim: int, dtype: torch.dtype, seed: int = 0
) -> Pages:
    """Return K and V [num, P, H, D] with channel means far from zero, large channels in K and an
    extreme token in V."""
    rng = torch.Generator().manual_seed(seed)
    shape = (num, page_size, heads, head_dim)
    k = torch.randn(shape, generator=rng)
    k = k * torch.where(torch.arange(head_dim) % 13 == 5, 10.0, 1.0)
    k = k + 4 * torch.randn((1, 1, heads, head_dim), generator=rng)
    v = torch.randn(shape, generator=rng)
    v[:, page_size // 3] *= 8
    return k.to(dtype), v.to(dtype)


def poisoned(slots: int, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a pool of records with the shape of those of `like`, every byte POISON."""
    return torch.full((slots, *like.shape[1:]), POISON, dtype=torch.uint8, device=device)


def encode(
    k: torch.Tensor,
    v: torch.Tensor,
    settings: CodecSpec,
    target: Target,
    device: torch.device,
    source: list[int] | None = None,
    index_dtype: torch.dtype = torch.int32,
    backend: Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor, Pages]:
    """Encode pages `source` into pools with one spare slot. Returns anchor and residual records in
    the order of `source`, and the spare slots' bytes."""
    want = encode_by_reference(k[:1], v[:1], settings, target)
    source = list(range(len(k))) if source is None else source
    count = len(source)
    pools = [poisoned(count + 1, records, device) for records in want]
    anchor_slots, residual_slots = list(range(count, 0, -1)), list(range(1, count + 1))
    indices = [
        torch.tensor(index, dtype=index_dtype, device=device)
        for index in (source, anchor_slots, residual_slots)
    ]
    args = (indices[0], pools[0], indices[1], pools[1], indices[2], settings, target, backend)
    encode_pages(k.to(device), v.to(device), *args)
    anchors, residuals = pools[0].cpu(), pools[1].cpu()
    return anchors[anchor_slots], residuals[residual_slots], (anchors[0], residuals[0])


def assert_same_records(
    k: torch.Tensor,
    v: torch.Tensor,
    settings: CodecSpec,
    target: Target,
    device: torch.device,
    backend: Backend = "auto",
) -> None:
    """Assert that the kernel writes the reference's records of pages k, v [N, P, H, D], and writes
    nothing else."""
    anchors, residuals, spare = encode(k, v, settings, target, device, backend=backend)
    want_anchors, want_residuals = encode_by_reference(k, v, settings, target)
    layout = anchor_layout(settings, k.shape[1], k.shape[3])
    for field in layout.fields:
        got, want = (
            records[..., field.offset : field.offset + field.nbytes]
            for records in (anchors, want_anchors)
        )
        assert torch.equal(got, want), field.name
    assert torch.equal(anchors, want_anchors)
    assert torch.equal(residuals, want_residuals)
    assert all((slot == POISON).all() for slot in spare)
