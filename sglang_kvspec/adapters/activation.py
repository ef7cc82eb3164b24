"""Whether this process serves KVSpec, and how the configuration reaches other processes.

The flags are parsed in the launcher; schedulers are spawned. The configuration travels twice: as
`ServerArgs._kvspec` (pickled with it), for everything that has the server arguments, and as one
environment variable, because plugins load in a spawned scheduler before it has them.
"""

from __future__ import annotations

import json
import logging
import os
from functools import cache
from importlib import metadata

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.errors import ConfigError, UnsupportedError

logger = logging.getLogger(__name__)

ENVIRONMENT_NAME = "SGLANG_KVSPEC"
DEBUG_NAME = "SGLANG_KVSPEC_DEBUG"
ALGORITHM_NAME = "KVSPEC"
SUPPORTED_SGLANG = ("0.5.17",)
_DEBUG_VALUES = {"1": True, "true": True, "0": False, "false": False}


def is_on() -> bool:
    return ENVIRONMENT_NAME in os.environ


def debug_mode() -> bool:
    """Return whether SGLANG_KVSPEC_DEBUG is on. Raises ConfigError for a value that is no switch.

    Debug mode makes NaN or inf in an encoded page an error. On a CPU it also checks pages of the
    residual store against checksums.
    """
    value = os.environ.get(DEBUG_NAME, "0")
    is_on = _DEBUG_VALUES.get(value.lower())
    if is_on is None:
        raise ConfigError(
            f"{DEBUG_NAME} must be one of {', '.join(_DEBUG_VALUES)}, got {value!r}: set it to 1 "
            "or unset it"
        )
    return is_on


def switch_on(config: KVSpecConfig) -> None:
    """Make this process and those it spawns serve KVSpec. Raises HookError."""
    os.environ[ENVIRONMENT_NAME] = json.dumps(config.to_dict())
    register_everything(takes_requests=True)


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


def register_everything(*, takes_requests: bool = False) -> None:
    """Register algorithm, attention backend and hooks, apply them, and check that all applied.

    takes_requests: this process serves HTTP, or is the program that uses sglang.Engine.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    from kvspec_patches import register_scope
    from sglang_kvspec.adapters import algorithm, attention, prefix_backend
    from sglang_kvspec.adapters.transfer import backend

    algorithm.register()
    attention.register()
    prefix_backend.register()
    backend.register()
    scopes = (*_scopes(), *(("front_kvspec",) if takes_requests else ()))
    for scope in scopes:
        register_scope(scope)
    HookRegistry.apply_hooks()
    verify_hooks(*scopes)
    _log_hooks(*scopes)


@cache
def _log_hooks(*scopes: str) -> None:
    """Log one line for all hooks, once a process."""
    from kvspec_patches import num_hooks

    version = metadata.version("sglang")
    logger.info("KVSpec: %d hooks applied to SGLang %s", num_hooks(*scopes), version)


def verify_hooks(*scopes: str) -> None:
    """Raise HookError unless every hook of these scopes has applied, by default of those that a
    scheduler needs."""
    from kvspec_patches import verify_applied

    verify_applied(*(scopes or _scopes()))


def _scopes() -> tuple[str, ...]:
    if cpu_platform_is_active():
        return "flags", "kvspec", "cpu", "cpu_kvspec"
    return "flags", "kvspec", "cuda_kvspec"


def config_of(server_args: object) -> KVSpecConfig | None:
    """The configuration a ServerArgs was built with; None for a plain server."""
    return getattr(server_args, "_kvspec", None)
