"""One hook into SGLang, as a row of the table in hooks.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["before", "after", "around", "replace"]
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
    """One hook. target: dotted symbol of SGLang. kind: SGLang's hook type, which decides the
    arguments of `function`. remove_when: completes "remove when ...". releases: releases of SGLang
    in which `target` was read and the hook tested."""

    target: str
    kind: Kind
    scope: Scope
    function: Callable[..., Any]
    remove_when: str
    releases: tuple[str, ...] = ("0.5.17",)

    @property
    def name(self) -> str:
        """Name of the hook's module."""
        return self.function.__module__.rpartition(".")[2]
