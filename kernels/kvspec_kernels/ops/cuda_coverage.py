"""Operations of a server that have a CUDA kernel which does not cover its sizes."""

from __future__ import annotations

import torch

from kvspec_kernels.codecs.spec import CodecSpec
from kvspec_kernels.formats import Target
from kvspec_kernels.jit import cuda_encode
from kvspec_kernels.jit.cuda_attention import AttentionShape
from kvspec_kernels.jit.cuda_scores import scores_supported
from kvspec_kernels.jit.cuda_verify import verify_supported


def uncovered(
    settings: CodecSpec,
    target: Target,
    page_size: int,
    head_dim: int,
    num_qo_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[str, ...]:
    """Return the operations that back end "cuda" refuses on this device. Operations without a CUDA
    kernel are not among them. num_qo_heads, num_kv_heads: of one rank."""
    shape = AttentionShape(settings, page_size, head_dim, num_qo_heads, num_kv_heads, dtype)
    encode_shape = cuda_encode.EncodeShape(settings, target, page_size, head_dim, dtype)
    covered = {
        # Drafts take whichever arithmetic there is, as scores do.
        "drafts": scores_supported(shape, device),
        # Only records of `int8` have a kernel.
        "verifications": target != "int8" or verify_supported(shape, device, batch=1),
        "encoding": cuda_encode.supported(encode_shape, device),
    }
    return tuple(name for name, is_covered in covered.items() if not is_covered)
