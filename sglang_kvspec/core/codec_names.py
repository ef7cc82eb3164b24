"""Codecs that --kvspec-codec takes, found without importing one."""

from __future__ import annotations

from typing import Any

from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.seams import CODECS


def codec_names() -> tuple[str, ...]:
    """Names that --kvspec-codec takes."""
    return CODECS.names()


def load_codec(name: str) -> Any:
    """Import what the entry point of a codec names: a class below kvspec_kernels.codecs.CodecSpec.

    Raises ConfigError as Registry.load, and for a class of another name.
    """
    spec = CODECS.load(name)
    if getattr(spec, "name", None) != name:
        raise ConfigError(
            f"{CODECS.flag} {name}: the entry point of {CODECS.group} must lead to a codec of this "
            f"name, got {spec!r}"
        )
    return spec
