"""Registers the hooks of each scope with SGLang, and checks that SGLang applied them."""

from __future__ import annotations

import logging
from importlib import import_module
from types import ModuleType

from sglang_kvspec.core.errors import HookError

PLUGIN_NAME, DISTRIBUTION_NAME = "kvspec", "sglang-kvspec"

MANIFEST = (
    "add_cli_args",
    "from_cli_args",
    "server_args_init",
    "support_triton",
    "threads_binding",
    "parallel_group",
    "vocab_mask",
    "xgrammar_bitmask",
    "xgrammar_apply_mask",
    "assign_req_to_token",
    "last_loc",
    "oot_mha_kv_pool",
    "mha_kv_pool",
    "paged_release",
    "paged_clear",
    "kv_release",
    "fused_kv_write",
    "pool_configurator",
    "draft_kv_pool",
    "drafts_histogram",
    "spec_tokens",
    "finish_state",
    "stream_output",
    "batch_output",
    "penalty_tokens",
    "worker_info",
    "prefill_room",
    "prefill_queue",
    "preemption",
    "retract_decode",
    "retraction_order",
    "kv_class",
    "abort_reason",
    "idle_wait",
    "weight_load",
    "internal_state",
    "http_app",
    "request_gate",
    "request_check",
    "pool_size",
    "spec_meta_info",
    "cached_tokens",
    "response_usage",
    "streaming_usage",
)

_registered: set[str] = set()


def _modules(scope: str) -> list[ModuleType]:
    modules = [import_module(f"kvspec_patches.{name}") for name in MANIFEST]
    return [module for module in modules if scope == module.SCOPE]


class OwnHooksToDebug(logging.Filter):
    """Lower SGLang's INFO line for each hooked symbol to DEBUG where all its hooks are ours."""

    def filter(self, record: logging.LogRecord) -> bool:
        source = f"plugin={PLUGIN_NAME}, dist={DISTRIBUTION_NAME}"
        args = record.args
        if record.levelno == logging.INFO and isinstance(args, tuple) and args[-1:] == (source,):
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
            return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
        return True


def register_scope(scope: str) -> None:
    """Register every hook of a scope with SGLang, once. SGLang applies them."""
    from sglang.srt.plugins import hook_registry

    if scope in _registered:
        return
    if not _registered:
        hook_registry.logger.addFilter(OwnHooksToDebug())
    _registered.add(scope)
    source = hook_registry.HookSource(PLUGIN_NAME, DISTRIBUTION_NAME)
    for module in _modules(scope):
        hook_registry.HookRegistry.register(
            module.TARGET, module.hook, hook_registry.HookType(module.KIND), source=source
        )


def num_hooks(*scopes: str) -> int:
    """Return how many hooks these scopes have."""
    return sum(len(_modules(scope)) for scope in scopes)


def apply_hooks() -> None:
    """Have SGLang apply all registered hooks that are not applied yet."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()


def verify_applied(*scopes: str) -> None:
    """Raise HookError naming every symbol of these scopes that is not patched.

    SGLang logs a hook that fails to apply and serves on; a half-patched server would not be safe.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [
        module.TARGET
        for scope in scopes
        for module in _modules(scope)
        if module.TARGET not in HookRegistry._patched
    ]
    if missing:
        import sglang

        raise HookError(
            f"--kvspec cannot start: hooks did not apply to {', '.join(missing)} "
            f"of SGLang {sglang.__version__}"
        )
