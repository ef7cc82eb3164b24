"""Registration of the hooks of each scope with SGLang, and a check that SGLang applied them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib import metadata

from kvspec_patches.hook import Hook, Scope
from kvspec_patches.hooks import HOOKS
from sglang_kvspec.core.errors import HookError

PLUGIN_NAME, DISTRIBUTION_NAME = "kvspec", "sglang-kvspec"

_registered: set[Scope] = set()


def hooks_of(*scopes: Scope) -> list[Hook]:
    """Return the hooks of these scopes, scope by scope, in the order of the table."""
    return [hook for scope in scopes for hook in HOOKS if hook.scope == scope]


class OwnHooksToDebug(logging.Filter):
    """Log filter that lowers SGLang's INFO line for a symbol to DEBUG if KVSpec alone hooks it."""

    def filter(self, record: logging.LogRecord) -> bool:
        source = f"plugin={PLUGIN_NAME}, dist={DISTRIBUTION_NAME}"
        args = record.args
        if record.levelno == logging.INFO and isinstance(args, tuple) and args[-1:] == (source,):
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
            return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
        return True


def register_scope(scope: Scope) -> None:
    """Register every hook of a scope with SGLang, once. SGLang applies them."""
    from sglang.srt.plugins import hook_registry

    if scope in _registered:
        return
    if not _registered:
        hook_registry.logger.addFilter(OwnHooksToDebug())
    _registered.add(scope)
    source = hook_registry.HookSource(PLUGIN_NAME, DISTRIBUTION_NAME)
    for hook in hooks_of(scope):
        hook_registry.HookRegistry.register(
            hook.target, hook.function, hook_registry.HookType(hook.kind), source=source
        )


def apply_hooks() -> None:
    """Have SGLang apply all registered hooks that are not applied yet."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()


def verify_applied(*scopes: Scope) -> None:
    """Raise HookError naming every symbol of these scopes that is not patched, or whose hook is
    not for the installed SGLang.

    SGLang logs a hook that fails to apply and serves on; a half-patched server would not be safe.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    version, hooks = metadata.version("sglang"), hooks_of(*scopes)
    if missing := [hook for hook in hooks if hook.target not in HookRegistry._patched]:
        raise HookError(_refusal("did not apply to", missing, version))
    if untested := [hook for hook in hooks if version not in hook.releases]:
        raise HookError(_refusal("are not made for", untested, version))


def _refusal(what: str, hooks: Iterable[Hook], version: str) -> str:
    targets = ", ".join(hook.target for hook in hooks)
    return f"--kvspec cannot start: hooks {what} {targets} of SGLang {version}"


def describe(*scopes: Scope) -> str:
    """Return one log line: the number of hooks applied, their plugin, and their names by scope."""
    names = {scope: ", ".join(hook.name for hook in hooks_of(scope)) for scope in scopes}
    return (
        f"{len(hooks_of(*scopes))} hooks applied to SGLang {metadata.version('sglang')} by plugin "
        f"{PLUGIN_NAME} ({DISTRIBUTION_NAME} {metadata.version(DISTRIBUTION_NAME)}): "
        + "; ".join(f"{scope}: {names[scope]}" for scope in scopes)
    )
