"""Implementations of a seam by name, found without importing one.

A distribution adds an implementation by an entry point in the seam's group: the name that the flag
takes, and where the implementation is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from sglang_kvspec.core.errors import ConfigError

# Names become names of folders and labels, and go over the wire.
_NAME = re.compile(r"[a-z0-9_]{1,32}")


@dataclass(frozen=True)
class Registry:
    """One seam. group: of entry points. flag: command-line flag that takes a name. built_in: ours
    by name, since a source checkout on PYTHONPATH has no entry points."""

    group: str
    flag: str
    built_in: Mapping[str, str]

    def __hash__(self) -> int:
        return hash(self.group)

    def names(self) -> tuple[str, ...]:
        """Return all names in order."""
        return tuple(_entries(self))

    def load(self, name: str) -> Any:
        """Import what the entry point of a name says.

        Raises ConfigError for a name without an entry point, with several, or of other letters,
        and for an import that fails. A name with several entry points is refused only where it is
        asked for, so that the others still serve.
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
    """Look for entry points again: the path has changed."""
    _entries.cache_clear()


@cache
def _entries(registry: Registry) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return the entry points of every name, in the order of names."""
    group = registry.group
    found = {name: [EntryPoint(name, value, group)] for name, value in registry.built_in.items()}
    for entry in entry_points(group=group):
        known = found.setdefault(entry.name, [])
        if entry.value not in [other.value for other in known]:
            known.append(entry)
    return {name: tuple(found[name]) for name in sorted(found)}
