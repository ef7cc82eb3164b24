"""Constants of a codec for which Triton and CUDA kernels are compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# Number format of a draft's products. fp16: codes become fp16 numbers. int8: codes stay
# integers, and the other operand of products is rounded to integers (HACK, section 4).
Arithmetic = Literal["fp16", "int8"]
# Tokens that share the metadata of a channel of K, and of V.
Chunks = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TritonEncode:
    """Codec-specific part of jit/encode.py.

    encode_k, encode_v: @triton.jit functions that write the K part and the V part of a page's
    records, as "module:function". They take the arguments of log4_k and log4_v in jit/records.py.
    metadata: names of the fields besides the codes, without k_ or v_, in the order of FIELDS.
    law: LAW of jit/encode_log4.py, else empty. thread_elements: values that a thread holds.
    """

    encode_k: str
    encode_v: str
    metadata: tuple[str, ...]
    chunks: Chunks
    law: tuple[float, ...]
    thread_elements: int


@dataclass(frozen=True, slots=True)
class TritonDecode:
    """Codec-specific part of jit/pages.py.

    function: @triton.jit function that decodes tokens of a record, as "module:function", with the
    arguments and results of decode_log4 in jit/log4.py. offset, scale: names of the fields whose
    places OFFSET and SCALE give it, without k_ or v_. rotates: True if it returns values that
    jit/hadamard.py has rotated; the table then ends in the signs of channels. is_affine: True if
    codes of 4-bit anchors, in the order of formats.py, are values in units of a bf16 scale, from a
    bf16 offset on, with one of each for a channel of a chunk of K and for a token of V
    (jit/word_attention.py). With corrections, 16 * code + correction are values in units of a 16th
    of the scale. With anchors of 2 bits, the rest of the codes follows the corrections
    (jit/refined_attention.py). Kernels then decode 4-bit drafts and 8-bit values on their own,
    without the function, where they cover them.
    """

    function: str
    offset: str
    chunks: Chunks
    scale: str = "scale"
    rotates: bool = False
    is_affine: bool = False


@dataclass(frozen=True, slots=True)
class CudaEncode:
    """Constants of cuda/encode.cu.

    defines: the codec's own. first_metadata: name of the field after the codes, without k_ or v_.
    entry_bytes: bytes of shared memory for each channel or token with its own metadata.
    per_token: True if V's metadata belongs to tokens.
    """

    defines: Mapping[str, int]
    first_metadata: str
    chunks: Chunks
    entry_bytes: int
    per_token: bool


@dataclass(frozen=True, slots=True)
class CudaAttention:
    """Constants of cuda/draft_attention.cu and cuda/verify_attention.cu.

    defines: the codec's own. arithmetics: number formats for drafts, fp16 before int8.
    verifies: True if verify_attention.cu restores the codec's 8-bit values.
    """

    defines: Mapping[str, int]
    arithmetics: tuple[Arithmetic, ...]
    verifies: bool
