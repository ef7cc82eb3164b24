"""Switch of KVSpec in this process, and transport of the configuration to other processes.

The launcher parses the flags and spawns schedulers. The configuration reaches a scheduler twice. As
`ServerArgs._kvspec`, pickled, it is there for all code that has the server arguments. As one
environment variable, it is there for plugins, which load before the server arguments arrive.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib import metadata

from sglang_kvspec.adapters.environment import ENVIRONMENT_NAME
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.errors import ConfigError, UnsupportedError

DEBUG_NAME = "SGLANG_KVSPEC_DEBUG"
ALGORITHM_NAME = "KVSPEC"
SUPPORTED_SGLANG = ("0.5.17",)
_DEBUG_VALUES = {"1": True, "true": True, "0": False, "false": False}


def debug_mode() -> bool:
    """Return whether SGLANG_KVSPEC_DEBUG is on. Raises ConfigError for a value that is no switch.

    Debug mode makes NaN or inf in an encoded page an error. On a CPU it also checks pages of the
    residual store against checksums.
    """
    value = os.environ.get(DEBUG_NAME, "0")
    is_on = _DEBUG_VALUES.get(value.lower())
    if is_on is None:
        raise ConfigError(
            f"{DEBUG_NAME} must be one of {', '.join(_DEBUG_VALUES)}, got {value!r}: set the "
            "variable to 1, or unset it"
        )
    return is_on


# Registers algorithm, backends and hooks in a process that takes requests.
_register: Callable[[], None] | None = None


def when_switched_on(register: Callable[[], None]) -> None:
    """Set the function that switch_on() calls. The composition root calls this first, because no
    adapter may import the composition root."""
    global _register
    _register = register


def switch_on(config: KVSpecConfig) -> None:
    """Make this process and those it spawns serve KVSpec. Raises HookError."""
    assert _register is not None, "the plugin must register its hooks before flags are parsed"
    os.environ[ENVIRONMENT_NAME] = json.dumps(config.to_dict())
    _register()


def switch_off() -> None:
    """Make processes spawned from now on serve plain SGLang. Hooks here pass calls through."""
    os.environ.pop(ENVIRONMENT_NAME, None)


def check_sglang_version(installed: str | None = None) -> None:
    installed = installed or metadata.version("sglang")
    if installed not in SUPPORTED_SGLANG:
        raise UnsupportedError(
            f"--kvspec supports SGLang {', '.join(SUPPORTED_SGLANG)}, but SGLang {installed} is "
            "installed: install a supported version"
        )


def cpu_platform_is_active() -> bool:
    from sglang_kvspec.adapters.compat.active_platform import current_platform
    from sglang_kvspec.adapters.platform import ReferencePlatform

    return isinstance(current_platform, ReferencePlatform)


def config_of(server_args: object) -> KVSpecConfig | None:
    """Return the configuration that a ServerArgs was built with; None for a plain server."""
    return getattr(server_args, "_kvspec", None)
