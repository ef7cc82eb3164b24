"""Whether this process serves KVSpec, and how the configuration reaches other processes.

The flags are parsed in the launcher; schedulers are spawned. The configuration travels twice: as
`ServerArgs._kvspec` (pickled with it), for everything that has the server arguments, and as one
environment variable, because plugins load in a spawned scheduler before it has them.
"""

from __future__ import annotations

import json
import os
from importlib import metadata

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.errors import UnsupportedError

ENVIRONMENT_NAME = "SGLANG_KVSPEC"
ALGORITHM_NAME = "KVSPEC"
SUPPORTED_SGLANG = ("0.5.17",)


def is_on() -> bool:
    return ENVIRONMENT_NAME in os.environ


def debug_mode() -> bool:
    """SGLANG_KVSPEC_DEBUG=1: NaN or inf in an encoded page raises instead of being carried, and on
    a CPU pages of the residual store are read with checksums."""
    return os.environ.get("SGLANG_KVSPEC_DEBUG", "0") == "1"


def switch_on(config: KVSpecConfig) -> None:
    """Make this process and those it spawns serve KVSpec. Raises HookError."""
    os.environ[ENVIRONMENT_NAME] = json.dumps(config.to_dict())
    register_everything()


def switch_off() -> None:
    """Make processes spawned from now on serve plain SGLang (hooks here pass calls through)."""
    os.environ.pop(ENVIRONMENT_NAME, None)


def check_sglang_version(installed: str | None = None) -> None:
    installed = installed or metadata.version("sglang")
    if installed not in SUPPORTED_SGLANG:
        raise UnsupportedError(
            f"--kvspec supports SGLang {', '.join(SUPPORTED_SGLANG)}, but {installed} is installed"
        )


def cpu_platform_is_active() -> bool:
    from sglang.srt.platforms import current_platform

    from sglang_kvspec.adapters.platform import ReferencePlatform

    return isinstance(current_platform, ReferencePlatform)


def staggers(config: KVSpecConfig) -> bool:
    """Whether verifications take turns: not whether that was asked for."""
    if config.schedule == "auto":
        return cpu_platform_is_active()
    return config.schedule == "staggered"


def register_everything() -> None:
    """Register algorithm, attention backend and hooks, apply them, and check that all applied."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from kvspec_patches import register_scope
    from sglang_kvspec.adapters import algorithm, attention, prefix_backend
    from sglang_kvspec.adapters.transfer import backend

    algorithm.register()
    attention.register()
    prefix_backend.register()
    backend.register()
    for scope in _scopes():
        register_scope(scope)
    HookRegistry.apply_hooks()
    verify_hooks()


def verify_hooks() -> None:
    """Raise HookError unless every hook this process needs to serve KVSpec has applied."""
    from kvspec_patches import verify_applied

    verify_applied(*_scopes())


def _scopes() -> tuple[str, ...]:
    if cpu_platform_is_active():
        return "flags", "kvspec", "cpu", "cpu_kvspec"
    return "flags", "kvspec", "cuda_kvspec"


def config_of(server_args: object) -> KVSpecConfig | None:
    """The configuration a ServerArgs was built with; None for a plain server."""
    return getattr(server_args, "_kvspec", None)
