"""One hook into SGLang, as a row of the table in hooks.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from sglang_kvspec.core.sglang_releases import SUPPORTED, parse_version

# The first four are SGLang's. An attribute is a class that another class names: SGLang's registry
# would replace such a class wherever it was imported.
Kind = Literal["before", "after", "around", "replace", "attribute"]
# Which process of which server needs a hook:
#   flags         every process of every server
#   cpu           every process where the CPU reference platform runs, also without --kvspec
#   kvspec        every process of a server started with --kvspec
#   front_kvspec  the process of such a server that takes requests and loads SGLang's HTTP modules
#   cpu_kvspec    every process of such a server on the CPU reference platform
#   cuda_kvspec   every process of such a server on a GPU
Scope = Literal["flags", "cpu", "kvspec", "front_kvspec", "cpu_kvspec", "cuda_kvspec"]


@dataclass(frozen=True, slots=True)
class Hook:
    """One hook. target: dotted symbol of SGLang. kind: decides the arguments of `function`, as with
    SGLang's hook types; "attribute" is called like "around". remove_when: completes "remove when
    ...". since, until: the first release of SGLang that needs the row, and the first that does not;
    None for no end."""

    target: str
    kind: Kind
    scope: Scope
    function: Callable[..., Any]
    remove_when: str
    since: str = SUPPORTED[0]
    until: str | None = None

    def is_for(self, release: str) -> bool:
        """Return True if a release of SGLang needs this row."""
        version = parse_version(release)
        is_over = self.until is not None and version >= parse_version(self.until)
        return version >= parse_version(self.since) and not is_over

    @property
    def name(self) -> str:
        """Name of the hook's module."""
        return self.function.__module__.rpartition(".")[2]
