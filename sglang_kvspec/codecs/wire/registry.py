"""Wire codecs by the names that --kvspec-transfer takes, except `split`, which is no wire codec."""

from __future__ import annotations

from typing import Literal, get_args

from kvspec_kernels.formats import EXACT_DTYPES
from sglang_kvspec.codecs.registry import check_page_size
from sglang_kvspec.codecs.wire.base import PageGeometry, WireCodec
from sglang_kvspec.codecs.wire.cachegen import CacheGenWireCodec
from sglang_kvspec.codecs.wire.full import FullWireCodec
from sglang_kvspec.codecs.wire.uniform import UniformWireCodec
from sglang_kvspec.core.errors import ConfigError

WireCodecName = Literal["full", "int8", "int4", "cachegen"]


def make_wire_codec(name: WireCodecName, geometry: PageGeometry) -> WireCodec:
    """Make the wire codec `name` for pages of `geometry`.

    Raises ConfigError naming the flag or model property, its value and what is allowed.
    """
    _check_geometry(geometry)
    match name:
        case "full":
            return FullWireCodec(geometry)
        case "int8":
            return UniformWireCodec(geometry, 8)
        case "int4":
            return UniformWireCodec(geometry, 4)
        case "cachegen":
            return CacheGenWireCodec(geometry)
    raise ConfigError(
        f"--kvspec-transfer of whole pages must be one of {', '.join(get_args(WireCodecName))}, "
        f"got {name!r}"
    )


def _check_geometry(geometry: PageGeometry) -> None:
    check_page_size(geometry.page_size)
    counts = {"layers": geometry.num_layers, "KV heads of a rank": geometry.num_kv_heads}
    for what, count in counts.items():
        if count < 1:
            raise ConfigError(f"the number of {what} must be at least 1, got {count}")
    # Two codes of a token share a byte.
    if geometry.head_dim < 2 or geometry.head_dim % 2:
        raise ConfigError(f"the model's head size must be even, got {geometry.head_dim}")
    if geometry.dtype not in EXACT_DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in EXACT_DTYPES)
        raise ConfigError(f"the KV cache dtype must be one of {allowed}, got {geometry.dtype}")
