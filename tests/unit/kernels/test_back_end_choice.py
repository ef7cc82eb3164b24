"""CUDA kernels run on Hopper GPUs only: older and newer ones take Triton."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvspec_kernels.formats import Uniform4Settings
from kvspec_kernels.jit import cuda_encode, cuda_int4_products, cuda_scores, cuda_verify
from kvspec_kernels.jit.cuda_attention import AttentionShape, draft_supported

DEVICE = torch.device("cuda:0")
SETTINGS = Uniform4Settings.for_page(64)
SHAPE = AttentionShape(SETTINGS, 64, 128, 32, 8, torch.bfloat16)
ENCODE_SHAPE = cuda_encode.EncodeShape(SETTINGS, "int8", 64, 128, torch.bfloat16)


def covered() -> dict[str, bool]:
    """Return which operations of an 8B model the CUDA kernels cover."""
    x = SimpleNamespace(device=DEVICE, dtype=torch.bfloat16, shape=(1, 4096))
    return {
        "draft": draft_supported(SHAPE, DEVICE),
        "verify": cuda_verify.verify_supported(SHAPE, DEVICE, 16),
        "scores": cuda_scores.scores_supported(SHAPE, DEVICE),
        # The cache would keep the answer of another device.
        "encode": cuda_encode.supported.__wrapped__(ENCODE_SHAPE, DEVICE),
        "int4": cuda_int4_products.supported(x, 4096),
    }


@pytest.mark.parametrize(
    ("capability", "is_covered"),
    [
        ((8, 0), False),
        ((8, 6), False),
        ((8, 9), False),
        ((9, 0), True),
        ((10, 0), False),
        ((12, 0), False),
    ],
)
def test_only_hopper_takes_the_cuda_kernels(monkeypatch, capability, is_covered):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert set(covered().values()) == {is_covered}
