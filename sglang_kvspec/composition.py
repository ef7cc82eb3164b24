"""Composition root: the only module that imports both the adapters and the hooks.

Adapters never import the hooks. Functions that an adapter needs from this module are passed in.
Imports are late, so that a server without --kvspec loads flags and hooks only.
"""

from __future__ import annotations

import logging
from functools import cache

from kvspec_patches.hook import Scope
from kvspec_patches.registration import (
    apply_hooks,
    describe,
    hooks_of,
    register_scope,
    verify_applied,
)
from sglang_kvspec.adapters.activation import cpu_platform_is_active, when_switched_on

logger = logging.getLogger(__name__)

# Hooks of a process that takes requests.
FRONT: tuple[Scope, ...] = ("front_kvspec",)


def register_flags() -> None:
    """Register what every server needs: the flags, and the hooks of the CPU platform if it runs."""
    from sglang_kvspec.adapters.transfer_flags import register_choice

    when_switched_on(_register_front)
    register_scope("flags")
    register_choice()
    if cpu_platform_is_active():
        register_scope("cpu")


def _register_front() -> None:
    register_everything(takes_requests=True)


def register_everything(*, takes_requests: bool = False) -> None:
    """Register algorithm, attention backend and hooks, apply the hooks and check that all applied.

    takes_requests: this process serves HTTP, or is the program that uses sglang.Engine.
    Raises HookError.
    """
    from sglang_kvspec.adapters import algorithm, attention, prefix_backend
    from sglang_kvspec.adapters.transfer import backend

    algorithm.register(verify_hooks)
    attention.register()
    prefix_backend.register()
    backend.register()
    scopes = (*_scopes(), *(FRONT if takes_requests else ()))
    for scope in scopes:
        register_scope(scope)
    apply_hooks()
    verify_applied(*scopes)
    _log_hooks(*scopes)


@cache
def _log_hooks(*scopes: Scope) -> None:
    """Log one line for all hooks, once a process."""
    logger.info("KVSpec: %s", describe(*scopes))


def num_hooks() -> int:
    """Return how many hooks register_everything() applies in a process that takes requests."""
    return len(hooks_of(*_scopes(), *FRONT))


def verify_hooks() -> None:
    """Raise HookError unless every hook that a scheduler needs has applied."""
    verify_applied(*_scopes())


def _scopes() -> tuple[Scope, ...]:
    if cpu_platform_is_active():
        return "flags", "kvspec", "cpu", "cpu_kvspec"
    return "flags", "kvspec", "cuda_kvspec"
