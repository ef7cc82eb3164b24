"""Bytes of encoded pages, from codec declarations. This needs no torch: `sglang-kvspec plan` must
work before anything else is installed."""

from __future__ import annotations

from kvspec_kernels.codecs import CodecSpec, packed_sizes
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
from sglang_kvspec.core.config import ExactResidual, Target
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.planning.capacity import PageBytes
from sglang_kvspec.planning.model_shape import ModelShape

# Packed records of a page for each that may not fit. On real models, less than 1 of 100 does not
# fit (docs/benchmarks/exact-residual.md).
RECORDS_A_SPARE = 20


def spare_rows(num_records: int) -> int:
    """Return for how many records that do not fit a page of num_records packed ones has room."""
    return -(-num_records // RECORDS_A_SPARE)


def stored_page_bytes(num_records: int, record_bytes: int, raw_v_bytes: int) -> int:
    """Return the bytes of a page of num_records packed records in a host store. raw_v_bytes: of V
    of a record that does not fit."""
    return num_records * record_bytes + spare_rows(num_records) * raw_v_bytes


def page_bytes_of(
    shape: ModelShape, codec: str, target: Target, page_size: int, form: ExactResidual = "raw"
) -> PageBytes:
    """Bytes of one page over all layers and KV heads of `shape`, with a codec's default settings.
    form: of residuals in a host store.

    Raises ConfigError for a packed form of other residuals than those of `exact` beside uniform4 in
    16 bits, for sizes that no record layout exists for, and for the target int8 of a
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
    records, num_values = shape.num_layers * shape.num_kv_heads, page_size * shape.head_dim
    packed = None
    if form == "packed":
        if target != "exact" or codec != "uniform4" or shape.kv_dtype_bytes != 2:
            raise ConfigError(
                "--exact-residual packed needs --target exact, --codec uniform4 and a model of 16 "
                "bits"
            )
        each = packed_sizes.record_bytes(num_values, shape.kv_mantissa_bits)
        packed = stored_page_bytes(records, each, num_values * shape.kv_dtype_bytes)
    return PageBytes(
        plain=records * 2 * num_values * shape.kv_dtype_bytes,
        anchor=records * record_bytes(anchor),
        residual=records * record_bytes(residual),
        packed=packed,
    )
