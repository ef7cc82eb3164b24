"""Implementations of a seam by name, found without importing one.

A package adds an implementation by an entry point in the seam's group. The entry point has the name
that the flag takes and the import path of the implementation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from sglang_kvspec.core.errors import ConfigError

# Names are used in folder names and labels, and are sent over the wire.
_NAME = re.compile(r"[a-z0-9_]{1,32}")


@dataclass(frozen=True)
class Registry:
    """One seam. group: group of its entry points. flag: command-line flag that takes a name.
    built_in: import paths of KVSpec's own implementations by name, because a source checkout on
    PYTHONPATH has no entry points."""

    group: str
    flag: str
    built_in: Mapping[str, str]

    def __hash__(self) -> int:
        return hash(self.group)

    def names(self) -> tuple[str, ...]:
        """Return all names in order."""
        return tuple(_entries(self))

    def load(self, name: str) -> Any:
        """Import the implementation of a name.

        Raises ConfigError for a name without an entry point, with several, or with characters that
        are not allowed, and if the import fails. Several entry points of one name are refused only
        when that name is asked for, so all other names keep working.
        """
        entries = _entries(self)
        if name not in entries:
            raise ConfigError(f"{self.flag} must be one of {', '.join(entries)}, got {name!r}")
        entry, *others = entries[name]
        if others:
            raise ConfigError(
                f"{self.flag} {name} is both {entry.value} and {others[0].value} in the "
                f"entry-point group {self.group}: uninstall or rename one of them"
            )
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{self.flag} {name} ({entry.value}): a name has up to 32 lower-case letters, "
                "digits and underscores"
            )
        try:
            return entry.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{self.flag} {name}: cannot import {entry.value}: {error}"
            ) from error


def forget_entries() -> None:
    """Drop the cached entry points, because the import path has changed."""
    _entries.cache_clear()


@cache
def _entries(registry: Registry) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return the entry points of every name, sorted by name."""
    group = registry.group
    found = {name: [EntryPoint(name, value, group)] for name, value in registry.built_in.items()}
    for entry in entry_points(group=group):
        known = found.setdefault(entry.name, [])
        if entry.value not in [other.value for other in known]:
            known.append(entry)
    return {name: tuple(found[name]) for name in sorted(found)}
