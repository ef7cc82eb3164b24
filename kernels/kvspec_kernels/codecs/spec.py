"""Base class of codec declarations: the only source of a codec's parameters and layouts."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import ClassVar, Self

from kvspec_kernels.codecs.fields import FieldSpec, FormatError
from kvspec_kernels.codecs.kernels import CudaAttention, CudaEncode, TritonDecode, TritonEncode


@dataclass(frozen=True, slots=True)
class CodecSpec(ABC):
    """Parameters of a codec, and what follows from them: layouts, byte counts and kernel constants.

    A codec is a frozen dataclass that derives from this class and holds JSON values only. Kernels
    are cached by its instances; stores and servers compare its fields. The subclass is found by its
    name through the entry-point group `sglang_kvspec.codecs`. `reference` names the module that
    encodes and decodes, described in kvspec_kernels.reference.codec. If that module is not the
    declaration's own, plans can be made without torch.

    A codec without kernels serves on a CPU. A codec for GPUs sets has_kernels and overrides
    triton_*(), which name its Triton functions in any module. It overrides cuda_*() if cuda/*.cu
    cover it.
    """

    name: ClassVar[str]
    reference: ClassVar[str]
    bit_choices: ClassVar[tuple[int, ...]]
    has_kernels: ClassVar[bool] = False

    @property
    @abstractmethod
    def anchor_bits(self) -> int:
        """Bits of an anchor code, without metadata."""

    @classmethod
    @abstractmethod
    def for_page(cls, page_size: int, anchor_bits: int) -> Self:
        """Return default parameters for pages of `page_size` tokens. anchor_bits: one of
        bit_choices."""

    @abstractmethod
    def anchor_fields(self, page_size: int, head_dim: int) -> tuple[FieldSpec, ...]:
        """Return the fields of an anchor record. Raises FormatError for pages that cannot be
        grouped."""

    def correction_fields(self, page_size: int, head_dim: int) -> tuple[FieldSpec, ...]:
        """Return the fields of the residual record that upgrades an anchor to the target int8.
        Raises FormatError if the codec defines none."""
        raise FormatError(
            f"the codec {self.name} has no int8 target (allowed: --kvspec-target exact)"
        )

    @property
    def fingerprint(self) -> str:
        """Name, anchor bits and a hash of all parameters. Two servers' records are compatible only
        if their fingerprints are equal."""
        parameters = json.dumps(asdict(self), sort_keys=True).encode()
        digest = hashlib.sha256(parameters).hexdigest()[:8]
        return f"{self.name} ({self.anchor_bits}-bit anchors, parameters {digest})"

    def triton_encode(self) -> TritonEncode:
        """Return the constants of jit/encode.py. Raises FormatError for parameters that the kernel
        does not take."""
        raise FormatError(f"the codec {self.name} has no Triton kernels")

    def triton_decode(self, page_size: int) -> TritonDecode:
        """Return the constants of jit/pages.py. Raises FormatError for parameters that the kernels
        do not take."""
        raise FormatError(f"the codec {self.name} has no Triton kernels")

    def cuda_encode(self, page_size: int) -> CudaEncode | None:
        """Return constants of cuda/encode.cu, or None if it does not cover these parameters."""
        return None

    def cuda_attention(self) -> CudaAttention | None:
        """Return constants of the CUDA attention kernels, or None if cuda/draft_attention.cu does
        not cover these parameters."""
        return None
