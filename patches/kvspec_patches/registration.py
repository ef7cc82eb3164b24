"""Registration of the hooks of each scope with SGLang, and a check that calls of SGLang's symbols
reach them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from importlib import metadata
from pkgutil import resolve_name
from typing import Any

from kvspec_patches.hook import Hook, Scope
from kvspec_patches.hooks import HOOKS
from sglang_kvspec.core.errors import HookError

PLUGIN_NAME, DISTRIBUTION_NAME = "kvspec", "sglang-kvspec"

_registered: set[Scope] = set()
# Attributes that were set, by target.
_attributes: dict[str, Callable[..., Any]] = {}
# True while this thread asks whether a call of a symbol reaches our hook.
_is_probing: ContextVar[bool] = ContextVar("_is_probing", default=False)


class Reached(BaseException):
    """Raised by a hook that a probe has reached, in place of any work. Not an Exception, so that no
    hook of another plugin takes it for an error."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function


def hooks_of(*scopes: Scope) -> list[Hook]:
    """Return the hooks of these scopes for the installed SGLang, scope by scope, in the order of
    the table."""
    release = metadata.version("sglang")
    return [
        hook for scope in scopes for hook in HOOKS if hook.scope == scope and hook.is_for(release)
    ]


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
        if hook.kind != "attribute":
            function, kind = _guarded(hook)
            hook_registry.HookRegistry.register(
                hook.target, function, hook_registry.HookType(kind), source=source
            )
    _set_attributes()


def _guarded(hook: Hook) -> tuple[Callable[..., Any], str]:
    """Return the function to register, and SGLang's name for its kind. A probe ends it before
    anything is done. A hook that comes after the original becomes one around it, since SGLang would
    run the original before the guard."""
    function, kind = hook.function, hook.kind
    if kind == "after":
        function, kind = _around_for_after(function), "around"

    @wraps(hook.function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if _is_probing.get():
            raise Reached(hook.function)
        return function(*args, **kwargs)

    return guarded, kind


def _around_for_after(function: Callable[..., Any]) -> Callable[..., Any]:
    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        # As SGLang has it: None leaves the result as it is.
        changed = function(result, *args, **kwargs)
        return result if changed is None else changed

    return around


def _set_attributes() -> None:
    """Set attributes of registered scopes, where their classes are loaded. A process that never
    loads a class has no use for its attribute."""
    for hook in hooks_of(*_registered):
        if hook.kind != "attribute" or hook.target in _attributes:
            continue
        if (owner := _loaded_owner(hook)) is not None:
            name = hook.target.rpartition(".")[2]
            hooked = _around(_guarded(hook)[0], getattr(owner, name))
            setattr(owner, name, hooked)
            _attributes[hook.target] = hooked


def _around(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return hooked


def _loaded_owner(hook: Hook) -> Any:
    """Return the class of an attribute; None if its module is not loaded."""
    path, _, name = hook.target.rpartition(".")[0].rpartition(".")
    module = sys.modules.get(path)
    return None if module is None else getattr(module, name)


def _is_applied(hook: Hook) -> bool:
    from sglang.srt.plugins.hook_registry import HookRegistry

    if hook.kind != "attribute":
        return hook.target in HookRegistry._patched
    owner, hooked = _loaded_owner(hook), _attributes.get(hook.target)
    if owner is None or hooked is None:
        return owner is None
    return owner.__dict__.get(hook.target.rpartition(".")[2]) is hooked


def apply_hooks() -> None:
    """Have SGLang apply all registered hooks that are not applied yet."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()
    # A hook may have loaded the class of an attribute.
    _set_attributes()


def _is_reached(hook: Hook) -> bool:
    """Call a patched symbol, as SGLang would, and return True if our function is what runs first.
    The guard of the function ends the call."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    if hook.kind == "attribute" and _loaded_owner(hook) is None:
        return True
    if len(HookRegistry._hooks.get(hook.target, ())) > 1:
        # A hook of another plugin may run first, and would not know a call without arguments.
        return True
    token = _is_probing.set(True)
    try:
        resolve_name(hook.target)()
    except Reached as reached:
        return reached.function is hook.function
    except Exception:
        # Whatever took our place needs arguments.
        return False
    finally:
        _is_probing.reset(token)
    return False


def verify_applied(*scopes: Scope) -> None:
    """Raise HookError naming every symbol of these scopes that is not patched, and every one whose
    calls do not reach our hook, because something else was put in its place.

    SGLang logs a hook that fails to apply and serves on; a half-patched server would not be safe.
    """
    hooks = hooks_of(*scopes)
    if missing := [hook.target for hook in hooks if not _is_applied(hook)]:
        raise HookError(
            f"--kvspec cannot start: hooks did not apply to {', '.join(missing)} of SGLang "
            f"{metadata.version('sglang')}"
        )
    if lost := [hook.target for hook in hooks if not _is_reached(hook)]:
        raise HookError(
            f"--kvspec cannot start: calls of {', '.join(lost)} of SGLang "
            f"{metadata.version('sglang')} do not reach KVSpec's hooks"
        )


def describe(*scopes: Scope) -> str:
    """Return one log line: the number of hooks applied, their plugin, and their names by scope."""
    names = {scope: ", ".join(hook.name for hook in hooks_of(scope)) for scope in scopes}
    return (
        f"{len(hooks_of(*scopes))} hooks applied to SGLang {metadata.version('sglang')} by plugin "
        f"{PLUGIN_NAME} ({DISTRIBUTION_NAME} {metadata.version(DISTRIBUTION_NAME)}): "
        + "; ".join(f"{scope}: {names[scope]}" for scope in scopes)
    )
