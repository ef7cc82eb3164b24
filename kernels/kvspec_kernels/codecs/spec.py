"""The one declaration of a codec, which everything else asks."""

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

    A codec is a frozen dataclass below this class, of values that JSON can hold. Kernels are cached
    by it; stores and servers compare its fields. The subclass is found by its name through the
    entry-point group `sglang_kvspec.codecs`. `reference` names the module that encodes and decodes;
    see kvspec_kernels.reference.codec for what it holds. Where that is another module than the
    declaration's, plans can be made without torch.

    A codec without kernels serves on a CPU. For a GPU it sets has_kernels and answers triton_*(),
    which name its Triton functions in any module. Where cuda/*.cu cover it, it answers cuda_*().
    """

    name: ClassVar[str]
    reference: ClassVar[str]
    bit_choices: ClassVar[tuple[int, ...]]
    has_kernels: ClassVar[bool] = False

    @property
    @abstractmethod
    def anchor_bits(self) -> int:
        """Bits of an anchor code, metadata left out."""

    @classmethod
    @abstractmethod
    def for_page(cls, page_size: int, anchor_bits: int) -> Self:
        """Default parameters for pages of this many tokens; anchor_bits is one of bit_choices."""

    @abstractmethod
    def anchor_fields(self, page_size: int, head_dim: int) -> tuple[FieldSpec, ...]:
        """Fields of an anchor record. Raises FormatError for pages that cannot be grouped."""

    @abstractmethod
    def correction_fields(self, page_size: int, head_dim: int) -> tuple[FieldSpec, ...]:
        """Fields of the residual record that upgrades an anchor to the target int8."""

    @property
    def fingerprint(self) -> str:
        """Name, anchor bits and a hash of all parameters: two servers' records are alike only if
        these are."""
        parameters = json.dumps(asdict(self), sort_keys=True).encode()
        digest = hashlib.sha256(parameters).hexdigest()[:8]
        return f"{self.name} ({self.anchor_bits}-bit anchors, parameters {digest})"

    def triton_encode(self) -> TritonEncode:
        """Raises FormatError for parameters that the kernel does not take."""
        raise FormatError(f"the codec {self.name} has no Triton kernels")

    def triton_decode(self, page_size: int) -> TritonDecode:
        """Raises FormatError for parameters that the kernels do not take."""
        raise FormatError(f"the codec {self.name} has no Triton kernels")

    def cuda_encode(self, page_size: int) -> CudaEncode | None:
        """None where cuda/encode.cu does not cover these parameters."""
        return None

    def cuda_attention(self) -> CudaAttention | None:
        """None where cuda/draft_attention.cu does not cover these parameters."""
        return None
