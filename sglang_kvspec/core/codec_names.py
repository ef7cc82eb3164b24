"""Codecs that --kvspec-codec takes, found without importing one."""

from __future__ import annotations

from typing import Any

from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.seams import CODECS

# Codecs with kernels, of which no GPU server has run one.
UNTRIED_ON_GPU = frozenset({"turboquant"})


def codec_names() -> tuple[str, ...]:
    """Return the names that --kvspec-codec takes."""
    return CODECS.names()


def load_codec(name: str) -> Any:
    """Import a codec's class, a subclass of kvspec_kernels.codecs.CodecSpec, by its entry point.

    Raises ConfigError as Registry.load does, and if the class has another name.
    """
    spec = CODECS.load(name)
    if getattr(spec, "name", None) != name:
        raise ConfigError(
            f"{CODECS.flag} {name}: the entry point of {CODECS.group} must lead to a codec of this "
            f"name, got {spec!r}"
        )
    return spec
