"""Sizes that kernel paths declare are those that their checks take."""

from __future__ import annotations

import pytest
import torch

from kvspec_kernels.codecs import coverage
from kvspec_kernels.formats import Uniform4Settings
from kvspec_kernels.jit import cuda_encode, nvrtc
from kvspec_kernels.jit.cuda_attention import AttentionShape, draft_supported
from kvspec_kernels.jit.cuda_verify import verify_supported
from kvspec_kernels.ops.deterministic_attention import launch_of

DEVICE, BF16 = torch.device("cuda:0"), torch.bfloat16
# Attention of 8 and of 32 query heads a KV head.
GROUPS = (8, 32)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(nvrtc, "is_hopper", lambda device: True)


def shapes():
    for page_size in coverage.ALL_PAGES:
        for head_dim in coverage.ALL_HEADS:
            for group in GROUPS:
                for dtype in (BF16, torch.float32):
                    yield page_size, head_dim, group, dtype


def declared(path, page_size, head_dim, group, dtype):
    name = str(dtype).removeprefix("torch.")
    return path.takes(head_dim=head_dim, page_size=page_size, group=group, dtype=name)


def test_cuda_attention_takes_what_is_declared():
    taken = {coverage.CUDA_DRAFT: set(), coverage.CUDA_VERIFY: set()}
    for each in shapes():
        page_size, head_dim, group, dtype = each
        settings = Uniform4Settings.for_page(page_size)
        shape = AttentionShape(settings, page_size, head_dim, 2 * group, 2, dtype)
        if draft_supported(shape, DEVICE):
            taken[coverage.CUDA_DRAFT].add(each)
        if verify_supported(shape, DEVICE, 16):
            taken[coverage.CUDA_VERIFY].add(each)
    for path, found in taken.items():
        expected = {each for each in shapes() if declared(path, *each)}
        assert found == expected or path is coverage.CUDA_VERIFY
        # Large pages with large heads do not fit shared memory, either.
        assert found <= expected
        assert {page_size for page_size, *_ in found} == set(path.page_sizes)
        assert {head_dim for _, head_dim, *_ in found} == set(path.head_dims)


def test_cuda_encoding_takes_what_is_declared():
    for page_size, head_dim, group, dtype in shapes():
        settings = Uniform4Settings.for_page(page_size)
        shape = cuda_encode.EncodeShape(settings, "int8", page_size, head_dim, dtype)
        taken = cuda_encode.supported.__wrapped__(shape, DEVICE)
        assert taken == declared(coverage.CUDA_ENCODE, page_size, head_dim, group, dtype)


def test_deterministic_attention_takes_16384_values_of_a_page():
    path = coverage.EXACT_IN_ORDER
    for page_size in path.page_sizes:
        for head_dim in (64, 128, 256):
            assert head_dim in path.head_dims
            if page_size * head_dim > 16384:
                with pytest.raises(ValueError, match="do not fit"):
                    launch_of(page_size, head_dim, BF16, torch.device("cpu"))
            else:
                launch_of(page_size, head_dim, BF16, torch.device("cpu"))
