"""The line that SGLang logs for each hook: DEBUG for ours, untouched for other plugins."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from importlib import metadata
from types import ModuleType

import pytest
from sglang.srt.plugins import hook_registry

from kvspec_patches import registration
from kvspec_patches.hook import Hook
from sglang_kvspec import composition
from sglang_kvspec.core.errors import HookError

OTHER = hook_registry.HookSource("other", "sglang-other")


@pytest.fixture
def registry(monkeypatch, empty_registry):
    """SGLang's registry without hooks, and functions `ours`, `others` and `both` that can be
    hooked."""
    toy = ModuleType("kvspec_toy")
    for name in ("ours", "others", "both"):
        setattr(toy, name, lambda: None)
    monkeypatch.setitem(sys.modules, "kvspec_toy", toy)
    monkeypatch.setattr(hook_registry.logger, "filters", [])
    return empty_registry


def toy_hooks(scope, *names):
    def hook(original):
        return original()

    return [Hook(f"kvspec_toy.{name}", "around", scope, hook, "never") for name in names]


def levels_by_target(caplog):
    return {
        record.args[1]: record.levelname
        for record in caplog.records
        if record.msg.startswith("Applied")
    }


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
def test_lines_of_own_hooks_are_debug(registry, monkeypatch, caplog, level):
    hooks = [*toy_hooks("flags", "ours"), *toy_hooks("cpu", "both")]
    monkeypatch.setattr(registration, "HOOKS", hooks)
    caplog.set_level(level, hook_registry.logger.name)
    for hook in hooks:
        registration.register_scope(hook.scope)
    for hook in toy_hooks("flags", "others", "both"):
        registry.register(hook.target, hook.function, source=OTHER)
    registry.apply_hooks()
    levels = {"kvspec_toy.others": "INFO", "kvspec_toy.both": "INFO"}
    if level == "DEBUG":
        levels["kvspec_toy.ours"] = "DEBUG"
    assert levels_by_target(caplog) == levels
    assert len(hook_registry.logger.filters) == 1


def test_hooks_name_the_plugin(registry, monkeypatch):
    monkeypatch.setattr(registration, "HOOKS", toy_hooks("flags", "ours"))
    registration.register_scope("flags")
    ((_, _, source),) = registry._hooks["kvspec_toy.ours"]
    assert source == ("kvspec", "sglang-kvspec")


def test_one_line_a_process_names_the_hooks(caplog):
    caplog.set_level(logging.INFO, composition.logger.name)
    composition._log_hooks.cache_clear()
    for _ in range(2):
        composition._log_hooks("flags", "kvspec")
    count = len(registration.hooks_of("flags", "kvspec"))
    assert count > 20
    (record,) = caplog.records
    line = record.getMessage()
    release = metadata.version("sglang")
    assert line.startswith(f"KVSpec: {count} hooks applied to SGLang {release} by plugin kvspec (")
    assert "flags: add_cli_args, from_cli_args, engine_args; kvspec: mha_kv_pool, " in line
    assert "front_kvspec" not in line


def test_a_hook_that_did_not_apply_is_named(registry, monkeypatch):
    monkeypatch.setattr(registration, "HOOKS", toy_hooks("flags", "ours", "absent"))
    registration.register_scope("flags")
    registration.apply_hooks()
    with pytest.raises(HookError, match=r"hooks did not apply to kvspec_toy\.absent of SGLang 0"):
        registration.verify_applied("flags")
    registration.verify_applied("cpu")


def test_a_hook_for_another_release_is_left_out(registry, monkeypatch):
    (over,), (here,) = toy_hooks("flags", "absent"), toy_hooks("flags", "ours")
    hooks = [replace(over, until=metadata.version("sglang")), here]
    monkeypatch.setattr(registration, "HOOKS", hooks)
    registration.register_scope("flags")
    registration.apply_hooks()
    registration.verify_applied("flags")
    assert registration.hooks_of("flags") == [here]


class Owner:
    """Stands for a class of SGLang that names another class."""

    made_class = dict


def attribute_of(module):
    target = f"{module}.Owner.made_class"

    def hook(original, self, **kwargs):
        return original(ours=type(self), **kwargs)

    return Hook(target, "attribute", "flags", hook, "never")


def test_an_attribute_is_set_once_its_class_is_loaded(registry, monkeypatch):
    hook = attribute_of("kvspec_later")
    monkeypatch.setattr(registration, "HOOKS", [hook])
    monkeypatch.setattr(registration, "_attributes", {})
    registration.register_scope("flags")
    # A process without the class has no use for its attribute.
    registration.verify_applied("flags")
    later = ModuleType("kvspec_later")
    later.Owner = type("Owner", (Owner,), {"made_class": dict})
    monkeypatch.setitem(sys.modules, "kvspec_later", later)
    with pytest.raises(HookError, match=r"did not apply to kvspec_later\.Owner\.made_class"):
        registration.verify_applied("flags")
    for _ in range(2):
        registration.apply_hooks()
    registration.verify_applied("flags")
    assert later.Owner().made_class(a=1) == {"ours": later.Owner, "a": 1}
    # Another plug-in may set it, too.
    later.Owner.made_class = dict
    with pytest.raises(HookError, match="did not apply"):
        registration.verify_applied("flags")
