"""Codecs that --kvspec-codec takes, found without importing one.

A distribution adds a codec by an entry point in the group `sglang_kvspec.codecs`: the codec's name,
and where its kvspec_kernels.codecs.CodecSpec is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from sglang_kvspec.core.errors import ConfigError

GROUP = "sglang_kvspec.codecs"
# A source checkout on PYTHONPATH, as GPU machines run it, has no entry points.
BUILT_IN = {
    "log4": "kvspec_kernels.codecs.log4:Log4Settings",
    "uniform4": "kvspec_kernels.codecs.uniform4:Uniform4Settings",
}

# Names of codecs become names of folders and go over the wire.
_NAME = re.compile(r"[a-z0-9_]{1,32}")


@functools.cache
def codec_entries() -> Mapping[str, EntryPoint]:
    """Entry points of all codecs by name, in the order of names. Raises ConfigError for a name
    that cannot be a folder's, and where two distributions name different codecs alike."""
    found = {name: EntryPoint(name, value, GROUP) for name, value in BUILT_IN.items()}
    for entry in entry_points(group=GROUP):
        if not _NAME.fullmatch(entry.name):
            raise ConfigError(
                f"the codec {entry.name!r} ({entry.value}) must be named by up to 32 lower-case "
                f"letters, digits and underscores in the entry-point group {GROUP}"
            )
        known = found.setdefault(entry.name, entry)
        if known.value != entry.value:
            raise ConfigError(
                f"the codec {entry.name!r} is both {known.value} and {entry.value} in the "
                f"entry-point group {GROUP}: uninstall or rename one of them"
            )
    return MappingProxyType(dict(sorted(found.items())))


def codec_names() -> tuple[str, ...]:
    """Names that --kvspec-codec takes."""
    return tuple(codec_entries())


def load_codec(name: str) -> Any:
    """Import what the entry point of a codec names: a class below kvspec_kernels.codecs.CodecSpec.

    Raises ConfigError for a name without an entry point, and for an import that fails.
    """
    entry = codec_entries().get(name)
    if entry is None:
        raise ConfigError(f"--kvspec-codec must be one of {', '.join(codec_names())}, got {name!r}")
    try:
        spec = entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--kvspec-codec {name}: cannot import {entry.value}: {error}") from error
    if getattr(spec, "name", None) != name:
        raise ConfigError(
            f"--kvspec-codec {name}: {entry.value} must be a codec of this name, got {spec!r}"
        )
    return spec
