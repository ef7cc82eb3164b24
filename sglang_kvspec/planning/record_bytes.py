"""Bytes of encoded pages, without torch.

The layouts are those of kvspec_kernels/formats.py, which describes them with torch dtypes; a plan
made before anything is installed cannot wait for torch, so that their sizes are counted here once
more and a test holds both against each other.
"""

from __future__ import annotations

from sglang_kvspec.core.config import CodecName, Target
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.planning.capacity import PageBytes
from sglang_kvspec.planning.model_shape import ModelShape

RECORD_ALIGNMENT = 16
PAGE_STEP, MAX_PAGE_SIZE = 32, 256
HEAD_DIM_STEP, MAX_HEAD_DIM = 16, 256
BF16_BYTES = 2
LOG4_K_CHUNK = 32


def page_bytes_of(shape: ModelShape, codec: CodecName, target: Target, page_size: int) -> PageBytes:
    """Bytes of one page over all layers and KV heads of `shape`, with a codec's default settings.

    Raises ConfigError for sizes that no record layout exists for.
    """
    if not (PAGE_STEP <= page_size <= MAX_PAGE_SIZE and page_size % PAGE_STEP == 0):
        raise ConfigError(
            f"--page-size must be a multiple of {PAGE_STEP} from {PAGE_STEP} to {MAX_PAGE_SIZE}, "
            f"got {page_size}"
        )
    if shape.head_dim > MAX_HEAD_DIM or shape.head_dim % HEAD_DIM_STEP:
        raise ConfigError(
            f"KVSpec needs head sizes that are multiples of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}, "
            f"the model has {shape.head_dim}"
        )
    elements = 2 * page_size * shape.head_dim
    records = shape.num_layers * shape.num_kv_heads
    plain = elements * shape.kv_dtype_bytes
    anchor = elements // 2 + _metadata_bytes(codec, page_size, shape.head_dim)
    return PageBytes(
        plain=records * plain,
        anchor=records * _aligned(anchor),
        residual=records * _aligned(plain if target == "exact" else elements // 2),
    )


def _metadata_bytes(codec: CodecName, page_size: int, head_dim: int) -> int:
    group = 64 if page_size % 64 == 0 else 32
    if codec == "uniform4":
        # A scale and a zero: of K for each channel and group, of V for each token.
        return 2 * BF16_BYTES * (page_size // group * head_dim + page_size)
    # A centre and one byte of scale for each channel and chunk; bases and padding take 16 bytes.
    chunks = page_size // LOG4_K_CHUNK + page_size // group
    return RECORD_ALIGNMENT + chunks * head_dim * (BF16_BYTES + 1)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
