"""Switch of KVSpec in this process, and transport of the configuration to other processes.

The launcher parses the flags and spawns schedulers. The configuration reaches a scheduler twice. As
`ServerArgs._kvspec`, pickled, it is there for all code that has the server arguments. As one
environment variable, it is there for plugins, which load before the server arguments arrive.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from importlib import metadata

from sglang_kvspec.adapters.environment import ENVIRONMENT_NAME
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.errors import ConfigError, UnsupportedError
from sglang_kvspec.core.sglang_releases import UNTESTED_NAME, refusal

logger = logging.getLogger(__name__)

DEBUG_NAME = "SGLANG_KVSPEC_DEBUG"
ALGORITHM_NAME = "KVSPEC"
_SWITCH_VALUES = {"1": True, "true": True, "0": False, "false": False}


def debug_mode() -> bool:
    """Return whether SGLANG_KVSPEC_DEBUG is on. Raises ConfigError for a value that is no switch.

    Debug mode makes NaN or inf in an encoded page an error. On a CPU it also checks pages of the
    residual store against checksums.
    """
    return _switch(DEBUG_NAME)


def _switch(name: str) -> bool:
    """Return whether an environment variable is on. Raises ConfigError if its value is no
    switch."""
    value = os.environ.get(name, "0")
    is_on = _SWITCH_VALUES.get(value.lower())
    if is_on is None:
        raise ConfigError(
            f"{name} must be one of {', '.join(_SWITCH_VALUES)}, got {value!r}: set the variable "
            "to 1, or unset it"
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


def follow(server_args: object) -> None:
    """Make this process and those it spawns serve what server_args were built for."""
    config = config_of(server_args)
    if config is None:
        switch_off()
    else:
        switch_on(config)


def check_sglang_version(*, on_gpu: bool) -> None:
    """Raise UnsupportedError for a release of SGLang that is not supported. With UNTESTED_NAME, log
    a warning instead."""
    installed = metadata.version("sglang")
    sentence = refusal(installed, on_gpu=on_gpu)
    if sentence is None:
        return
    _refuse_untested(sentence, f"SGLang {installed} was not tested with --kvspec here")


def check_untested(flag: str, allowed: str) -> None:
    """Raise UnsupportedError for a flag with which no GPU server has run. With UNTESTED_NAME,
    log a warning instead. allowed: what to use there."""
    _refuse_untested(
        f"no GPU server has run {flag} (allowed on a GPU: {allowed}): use that, or set "
        f"{UNTESTED_NAME}=1 to try this one",
        f"no GPU server has run {flag}",
    )


def _refuse_untested(sentence: str, warning: str) -> None:
    if not _switch(UNTESTED_NAME):
        raise UnsupportedError(sentence)
    logger.warning("KVSpec: %s is set: %s", UNTESTED_NAME, warning)


def cpu_platform_is_active() -> bool:
    from sglang_kvspec.adapters.compat.active_platform import current_platform
    from sglang_kvspec.adapters.platform import ReferencePlatform

    return isinstance(current_platform, ReferencePlatform)


def config_of(server_args: object) -> KVSpecConfig | None:
    """Return the configuration that a ServerArgs was built with; None for a plain server."""
    return getattr(server_args, "_kvspec", None)
