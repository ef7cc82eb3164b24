"""The CUDA sources compile for Hopper, which needs no GPU, with the definitions of their
launchers."""

from __future__ import annotations

import ctypes
import dataclasses

import pytest
import torch

from kvspec_kernels.formats import Log4Settings, Uniform4Settings
from kvspec_kernels.jit import cuda_verify, nvrtc
from kvspec_kernels.jit.cuda_attention import (
    BLOCK_RESERVED,
    MULTIPROCESSOR_SHARED,
    AttentionShape,
    draft_defines,
    draft_join_defines,
    join_warps,
    occupancy,
    tail_heads,
)
from kvspec_kernels.jit.cuda_encode import EncodeShape, encode_defines
from kvspec_kernels.jit.cuda_int4_products import product_defines
from kvspec_kernels.jit.cuda_scores import score_defines
from kvspec_kernels.jit.cuda_scores import shared_bytes as score_bytes
from kvspec_kernels.jit.cuda_verify import (
    columns_and_blocks,
    join_defines,
    verify_defines,
    verify_kernel,
)
from kvspec_kernels.ops import read_host
from kvspec_kernels.ops.int4_products import CUDA_TILES

ARCHITECTURE = "sm_90a"
CODECS = (Log4Settings, Uniform4Settings)


def shape_of(
    codec, page_size, head_dim, group, dtype, arithmetic="fp16", bits=4, by_head=False, rows=1
):
    settings = codec.for_page(page_size, bits)
    heads = (2 * group, 2)
    return AttentionShape(settings, page_size, head_dim, *heads, dtype, arithmetic, by_head, rows)


def compiled(source, defines):
    return nvrtc.compile_cubin(source, tuple(sorted(defines.items())), ARCHITECTURE)


@pytest.mark.parametrize(
    ("codec", "bits", "arithmetic", "page_size", "head_dim", "group", "dtype"),
    [
        (Log4Settings, 4, "fp16", 64, 128, 4, torch.bfloat16),
        (Log4Settings, 4, "fp16", 32, 96, 1, torch.float16),
        (Uniform4Settings, 4, "fp16", 64, 256, 16, torch.bfloat16),
        (Uniform4Settings, 4, "fp16", 256, 64, 8, torch.float16),
        (Uniform4Settings, 4, "int8", 64, 128, 4, torch.bfloat16),
        (Uniform4Settings, 4, "int8", 32, 96, 1, torch.float16),
        (Uniform4Settings, 2, "int8", 64, 128, 4, torch.bfloat16),
        (Uniform4Settings, 2, "int8", 64, 256, 16, torch.bfloat16),
        (Log4Settings, 2, "int8", 256, 64, 8, torch.bfloat16),
        (Log4Settings, 2, "int8", 32, 96, 1, torch.float16),
        (Log4Settings, 2, "int8", 32, 64, 16, torch.bfloat16),
    ],
)
def test_draft_attention_compiles(codec, bits, arithmetic, page_size, head_dim, group, dtype):
    shape = shape_of(codec, page_size, head_dim, group, dtype, arithmetic, bits)
    assert compiled("draft_attention.cu", draft_defines(shape)).code


@pytest.mark.parametrize(
    ("codec", "bits", "arithmetic", "head_dim", "group"),
    [
        (Log4Settings, 4, "fp16", 128, 4),
        (Uniform4Settings, 4, "int8", 64, 1),
        (Uniform4Settings, 4, "fp16", 256, 16),
        (Log4Settings, 2, "int8", 96, 8),
    ],
)
def test_draft_attention_by_head_compiles(codec, bits, arithmetic, head_dim, group):
    shape = shape_of(codec, 64, head_dim, group, torch.bfloat16, arithmetic, bits, by_head=True)
    assert compiled("draft_attention.cu", draft_defines(shape)).code


@pytest.mark.parametrize("rows", [2, 4, 16])
@pytest.mark.parametrize(
    ("codec", "bits", "arithmetic", "head_dim", "group", "by_head"),
    [
        (Log4Settings, 4, "fp16", 128, 4, False),
        (Uniform4Settings, 4, "fp16", 128, 8, True),
        (Uniform4Settings, 4, "fp16", 64, 3, False),
        (Uniform4Settings, 4, "int8", 128, 4, False),
        (Uniform4Settings, 2, "int8", 256, 16, False),
        (Log4Settings, 2, "int8", 96, 1, True),
    ],
)
def test_draft_attention_of_several_rows_compiles(
    codec, bits, arithmetic, head_dim, group, by_head, rows
):
    options = {"bits": bits, "by_head": by_head, "rows": rows}
    shape = shape_of(codec, 64, head_dim, group, torch.bfloat16, arithmetic, **options)
    assert compiled("draft_attention.cu", draft_defines(shape)).code
    assert compiled("draft_join.cu", draft_join_defines(shape, 4)).code


@pytest.mark.parametrize(
    ("head_dim", "group", "rows", "split"),
    [
        (128, 4, 4, 1),
        (128, 4, 16, 4),
        (64, 3, 4, 1),
        (128, 8, 4, 2),
        (128, 2, 8, 1),
        (64, 1, 16, 1),
    ],
)
def test_pages_are_read_once_for_as_many_rows_as_registers_hold(head_dim, group, rows, split):
    shape = shape_of(Uniform4Settings, 64, head_dim, group, torch.bfloat16, rows=rows)
    assert shape.head_split == split
    assert shape.group * split == rows * group


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize(
    ("page_size", "head_dim", "group", "queries"),
    [(64, 128, 4, 8), (64, 64, 1, 8), (64, 256, 16, 8), (32, 96, 3, 5), (256, 64, 8, 8)],
)
def test_page_scores_compile(codec, bits, page_size, head_dim, group, queries):
    shape = shape_of(codec, page_size, head_dim, group, torch.bfloat16, bits=bits)
    defines = score_defines(shape, queries)
    assert defines["GROUP"] * defines["PASSES"] >= queries * group
    blocks = defines["BLOCKS"] * (score_bytes(defines) + BLOCK_RESERVED)
    assert blocks <= MULTIPROCESSOR_SHARED
    assert compiled("page_scores.cu", defines).code


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("bits", "arithmetic"), [(4, "fp16"), (2, "int8")], ids=["4 bits", "2 bits"]
)
@pytest.mark.parametrize("page_size", [32, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("group", range(1, 17))
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_drafting_block_has_room_for_its_warps_states(
    codec, bits, arithmetic, page_size, head_dim, group, rows
):
    options = {"bits": bits, "rows": rows}
    shape = shape_of(codec, page_size, head_dim, group, torch.bfloat16, arithmetic, **options)
    plan = occupancy(shape)
    heads_at_once = 4 if arithmetic == "int8" else 8
    query = -(-shape.group // heads_at_once) * head_dim // 16 * 512
    barriers = plan.warps * plan.halves * 8
    states = plan.warps * shape.group * (head_dim + 2) * 4
    assert query + states + barriers <= plan.shared_bytes
    # For the tail, the states also use the query's place.
    assert 1 <= tail_heads(shape) <= shape.group


@pytest.mark.parametrize(("head_dim", "group"), [(64, 8), (96, 1), (128, 4), (256, 16)])
@pytest.mark.parametrize("join_warps", [1, 8])
def test_draft_join_compiles(head_dim, group, join_warps):
    shape = shape_of(Uniform4Settings, 64, head_dim, group, torch.float16)
    assert compiled("draft_join.cu", draft_join_defines(shape, join_warps)).code


@pytest.mark.parametrize(
    ("parts", "warps"), [(0.5, 1), (8, 1), (9, 2), (16.5, 4), (66, 8), (500, 8)]
)
def test_warps_follow_the_parts_that_they_join(parts, warps):
    assert join_warps(parts) == warps


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("bits", "columns", "page_size", "head_dim", "dtype"),
    [
        (4, 1, 64, 128, torch.bfloat16),
        (4, 8, 64, 128, torch.float16),
        (4, 4, 64, 256, torch.bfloat16),
        (2, 1, 64, 128, torch.bfloat16),
        (2, 8, 64, 64, torch.float16),
        (2, 4, 128, 256, torch.bfloat16),
        (4, 16, 64, 128, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("joins_separately", [False, True])
def test_verify_attention_compiles(
    codec, bits, columns, page_size, head_dim, dtype, joins_separately
):
    shape = shape_of(codec, page_size, head_dim, 4, dtype, bits=bits)
    sizes = columns_and_blocks(shape, queries=8 * columns)
    assert sizes[0] == columns
    found = compiled(
        "verify_attention.cu", verify_defines(shape, *sizes, joins_separately=joins_separately)
    )
    assert found.code
    # With too few registers every product waits for the one before, which doubles the time.
    assert "serialized" not in found.log


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("head_dim", "tiles"), [(64, {8, 16}), (128, {8, 16}), (256, {4})])
def test_deterministic_verify_attention_compiles(codec, head_dim, tiles):
    shape = shape_of(codec, 64, head_dim, 4, torch.bfloat16)
    found = {columns_and_blocks(shape, n, is_deterministic=True) for n in (1, 64, 65, 256)}
    assert {columns for columns, _ in found} == tiles
    for sizes in found:
        defines = verify_defines(shape, *sizes, joins_separately=True, chunk_pages=64)
        attention = compiled("verify_attention.cu", defines)
        assert attention.code
        assert "serialized" not in attention.log
        assert compiled("verify_join.cu", join_defines(shape, sizes[0], 2, chunk_pages=64)).code


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_verify_join_compiles(head_dim, dtype):
    shape = shape_of(Uniform4Settings, 64, head_dim, 4, dtype)
    for columns in (1, 4, 16):
        assert compiled("verify_join.cu", join_defines(shape, columns, join_warps=8)).code


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("page_size", "head_dim", "target", "dtype"),
    [
        (64, 128, "int8", torch.bfloat16),
        (64, 128, "exact", torch.bfloat16),
        (32, 32, "int8", torch.float16),
        (96, 160, "exact", torch.float16),
        (256, 256, "int8", torch.bfloat16),
    ],
)
def test_encoding_compiles(codec, page_size, head_dim, target, dtype):
    shape = EncodeShape(codec.for_page(page_size), target, page_size, head_dim, dtype)
    assert compiled("encode.cu", encode_defines(shape)).code


def test_a_source_that_does_not_compile_says_why():
    with pytest.raises(nvrtc.CudaError, match=r"(?s)draft_attention.cu did not compile.*HEAD_DIM"):
        nvrtc.compile_cubin("draft_attention.cu", (), ARCHITECTURE)


@pytest.mark.parametrize("tile", CUDA_TILES, ids=str)
def test_products_in_4_bits_compile(tile):
    assert compiled("int4_product.cu", product_defines(tile)).code
    assert tile.programs * (tile.shared_bytes + 2048 + BLOCK_RESERVED) <= MULTIPROCESSOR_SHARED


def test_reading_of_host_memory_compiles():
    """The log is one byte, as the compiler has no message."""
    found = compiled("read_host.cu", read_host.DEFINES)
    assert found.code
    assert found.log == ""


def test_shared_bytes_objects_are_not_written_into():
    def write(memory):
        ctypes.memset(ctypes.c_char_p(memory), 7, len(memory))
        return (0,)

    assert nvrtc._read(1, write) == b""
    assert nvrtc._read(3, write) == b"\x07\x07\x07"
    assert [bytes([value])[0] for value in range(256)] == list(range(256))


@pytest.mark.parametrize(
    ("batch", "max_qo_len", "group", "warps"),
    [
        # 264 blocks. Rows have 8 parts for each of three requests of 36 tokens, but only 2 for each
        # of 16.
        (3, 36, 4, 1),
        (16, 36, 4, 0),
        (1, 36, 4, 4),
        # Narrow requests have few rows. Their last block joins these, unless there are many parts.
        (16, 4, 4, 0),
        (3, 8, 4, 4),
        # Each request is computed by a single block.
        (64, 64, 8, 0),
    ],
)
def test_the_join_of_parts_follows_the_expected_requests(
    batch, max_qo_len, group, warps, monkeypatch
):
    device = torch.device("cuda")
    monkeypatch.setattr(cuda_verify, "num_blocks", lambda blocks, device: 132 * blocks)
    monkeypatch.setattr(cuda_verify, "_verify_kernel", lambda *arguments: arguments[-1])
    shape = shape_of(Uniform4Settings, 64, 128, group, torch.bfloat16)
    shape = dataclasses.replace(shape, num_qo_heads=8 * group, num_kv_heads=8)
    sizes = (max_qo_len, batch, device)
    assert verify_kernel(shape, *sizes, may_join_separately=True) == warps
    assert verify_kernel(shape, *sizes, may_join_separately=False) == 0
