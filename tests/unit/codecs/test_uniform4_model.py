"""uniform4 against a scalar model of QuantSpec's formula."""

from __future__ import annotations

import pytest
import torch

from kvspec_kernels.formats import Uniform4Settings, anchor_layout, residual_layout
from kvspec_kernels.reference import fragments, nibbles, uniform4

DIM = 16


def bf16(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).bfloat16().item()


def model_group(xs: list[float]) -> tuple[float, float, list[int], list[int]]:
    """Return (scale, zero, upper codes, lower codes) of values that share scale and zero."""
    zero = bf16(min(xs))
    scale = bf16((max(xs) - zero) / 15)
    upper, lower = [], []
    for x in xs:
        code = min(max(round((x - zero) / scale), 0), 15) if scale else 0
        error = x - (code * scale + zero)
        upper.append(code)
        lower.append(min(max(round(error / (scale / 16)), -8), 7) if scale else 0)
    return scale, zero, upper, lower


def by_token(words, part, page_size):
    """Return codes [N, H, words, 8] in stored order as [N, H, P, D]."""
    words = fragments.by_halves(words)
    if part == "k":
        return fragments.from_words(words, page_size, DIM)
    return fragments.from_words(words, DIM, page_size).transpose(-1, -2)


def stored(codes, part):
    """Return codes [P, D] packed in stored order."""
    return fragments.pack_by_halves(fragments.to_words(codes if part == "k" else codes.T)).flatten()


@pytest.mark.parametrize("page_size", [32, 64, 128])
def test_codes_equal_the_scalar_model(cache_like_pages, page_size):
    pages = cache_like_pages(num=1, page_size=page_size, heads=2, head_dim=DIM, seed=3)
    for part in pages:
        part[..., 4] = 0.75
    settings = Uniform4Settings.for_page(page_size)
    layout = anchor_layout(settings, page_size, DIM)
    lower_layout = residual_layout(settings, "int8", page_size, DIM, torch.float32)
    anchors, residuals = uniform4.encode(*pages, settings, layout, lower_layout)

    def codes(part):
        packed = layout[f"{part}_codes"].view(anchors).unflatten(-1, (-1, 4))
        upper = by_token(nibbles.unpack(packed), part, page_size)
        packed = lower_layout[f"{part}_codes"].view(residuals).unflatten(-1, (-1, 4))
        lower = by_token(nibbles.unpack_signed(packed), part, page_size)
        return upper[0, 1], lower[0, 1]

    def metadata(part):
        fields = [layout[f"{part}_{name}"].view(anchors)[0, 1] for name in ("scale", "zero")]
        return [fragments.LOAD[part](field) for field in fields]

    (upper, lower), (scale, zero) = codes("k"), metadata("k")
    group = settings.k_group
    for row in range(page_size // group):
        tokens = slice(row * group, (row + 1) * group)
        for d in range(DIM):
            want = model_group(pages[0][0, tokens, 1, d].tolist())
            got = (scale[row, d].item(), zero[row, d].item())
            assert (*got, upper[tokens, d].tolist(), lower[tokens, d].tolist()) == want
    (upper, lower), (scale, zero) = codes("v"), metadata("v")
    for t in range(page_size):
        want = model_group(pages[1][0, t, 1].tolist())
        assert (scale[t].item(), zero[t].item(), upper[t].tolist(), lower[t].tolist()) == want


def test_all_256_code_pairs_decode_to_the_formula():
    settings = Uniform4Settings(32)
    layout = anchor_layout(settings, 32, DIM)
    lower_layout = residual_layout(settings, "int8", 32, DIM, torch.float32)
    anchors = layout.empty_records((1, 1), "cpu")
    residuals = lower_layout.empty_records((1, 1), "cpu")
    upper = torch.arange(32)[:, None].expand(32, DIM) % 16
    lower = torch.arange(DIM)[None].expand(32, DIM)
    for part in "kv":
        layout[f"{part}_codes"].view(anchors).copy_(stored(upper, part))
        lower_layout[f"{part}_codes"].view(residuals).copy_(stored(lower, part))
        layout[f"{part}_scale"].view(anchors).fill_(0.375)
        layout[f"{part}_zero"].view(anchors).fill_(-1.25)
    layouts = (layout, lower_layout)
    refined = uniform4.decode_refined(anchors, residuals, settings, *layouts, torch.float32)
    draft = uniform4.decode_anchor(anchors, settings, layout, torch.float32)
    for part in (0, 1):
        for u in range(16):
            assert draft[part][0, u, 0].tolist() == [u * 0.375 - 1.25] * DIM
            for nibble in range(16):
                signed = nibble if nibble < 8 else nibble - 16
                # The product is exact in fp32, as every factor has few bits.
                want = u * 0.375 + signed * 0.375 / 16 - 1.25
                assert refined[part][0, u, 0, nibble].item() == want
