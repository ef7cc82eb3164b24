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
def codec_entries() -> Mapping[str, tuple[EntryPoint, ...]]:
    """Entry points of all codecs by name, in the order of names. A name with several entry points
    is refused only where it is asked for, so that other codecs still serve."""
    found = {name: [EntryPoint(name, value, GROUP)] for name, value in BUILT_IN.items()}
    for entry in entry_points(group=GROUP):
        known = found.setdefault(entry.name, [])
        if entry.value not in [other.value for other in known]:
            known.append(entry)
    return MappingProxyType({name: tuple(found[name]) for name in sorted(found)})


def codec_names() -> tuple[str, ...]:
    """Names that --kvspec-codec takes."""
    return tuple(codec_entries())


def load_codec(name: str) -> Any:
    """Import what the entry point of a codec names: a class below kvspec_kernels.codecs.CodecSpec.

    Raises ConfigError for a name without an entry point, with several, or that cannot name a
    folder, and for an import that fails.
    """
    if name not in codec_entries():
        raise ConfigError(f"--kvspec-codec must be one of {', '.join(codec_names())}, got {name!r}")
    entry, *others = codec_entries()[name]
    if others:
        raise ConfigError(
            f"--kvspec-codec {name} is both {entry.value} and {others[0].value} in the entry-point "
            f"group {GROUP}: uninstall or rename one of them"
        )
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--kvspec-codec {name} ({entry.value}): a codec is named by up to 32 lower-case "
            "letters, digits and underscores"
        )
    try:
        spec = entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--kvspec-codec {name}: cannot import {entry.value}: {error}") from error
    if getattr(spec, "name", None) != name:
        raise ConfigError(
            f"--kvspec-codec {name}: {entry.value} must be a codec of this name, got {spec!r}"
        )
    return spec
