"""Bytes of encoded pages, from codec declarations. This needs no torch: `sglang-kvspec plan` must
work before anything else is installed."""

from __future__ import annotations

from kvspec_kernels.codecs import CodecSpec
from kvspec_kernels.codecs.fields import (
    HEAD_DIM_STEP,
    MAX_HEAD_DIM,
    MAX_PAGE_SIZE,
    PAGE_STEP,
    FormatError,
    exact_fields,
    record_bytes,
)
from sglang_kvspec.core.codec_names import load_codec
from sglang_kvspec.core.config import Target
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.planning.capacity import PageBytes
from sglang_kvspec.planning.model_shape import ModelShape


def page_bytes_of(shape: ModelShape, codec: str, target: Target, page_size: int) -> PageBytes:
    """Bytes of one page over all layers and KV heads of `shape`, with a codec's default settings.

    Raises ConfigError for sizes that no record layout exists for, and for the target int8 of a
    codec that defines none.
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
    declared: type[CodecSpec] = load_codec(codec)
    settings = declared.for_page(page_size, declared.bit_choices[0])
    sizes = (page_size, shape.head_dim)
    try:
        anchor = settings.anchor_fields(*sizes)
        if target == "int8":
            residual = settings.correction_fields(*sizes)
        else:
            residual = exact_fields(*sizes, "float32" if shape.kv_dtype_bytes == 4 else "bfloat16")
    except FormatError as error:
        raise ConfigError(f"--kvspec-codec {codec}: {error}") from error
    records = shape.num_layers * shape.num_kv_heads
    return PageBytes(
        plain=records * 2 * page_size * shape.head_dim * shape.kv_dtype_bytes,
        anchor=records * record_bytes(anchor),
        residual=records * record_bytes(residual),
    )
