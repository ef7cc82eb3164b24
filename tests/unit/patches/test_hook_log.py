"""The line that SGLang logs for each hook: DEBUG for ours, untouched for other plugins."""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from types import ModuleType, SimpleNamespace

import pytest
from sglang.srt.plugins import hook_registry

from kvspec_patches import registration
from sglang_kvspec import composition

OTHER = hook_registry.HookSource("other", "sglang-other")


@pytest.fixture
def registry(monkeypatch):
    """SGLang's registry without hooks, and functions `ours`, `others` and `both` to hook."""
    toy = ModuleType("kvspec_toy")
    for name in ("ours", "others", "both"):
        setattr(toy, name, lambda: None)
    monkeypatch.setitem(sys.modules, "kvspec_toy", toy)
    monkeypatch.setattr(hook_registry.HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(hook_registry.HookRegistry, "_patched", set())
    monkeypatch.setattr(registration, "_registered", set())
    monkeypatch.setattr(hook_registry.logger, "filters", [])
    return hook_registry.HookRegistry


def toy_hooks(*names):
    def hook(original):
        return original()

    return [
        SimpleNamespace(TARGET=f"kvspec_toy.{name}", KIND="around", hook=hook) for name in names
    ]


def levels_by_target(caplog):
    return {
        record.args[1]: record.levelname
        for record in caplog.records
        if record.msg.startswith("Applied")
    }


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
def test_lines_of_own_hooks_are_debug(registry, monkeypatch, caplog, level):
    hooks = {"flags": toy_hooks("ours"), "cpu": toy_hooks("both")}
    monkeypatch.setattr(registration, "_modules", hooks.__getitem__)
    caplog.set_level(level, hook_registry.logger.name)
    for scope in hooks:
        registration.register_scope(scope)
    for module in toy_hooks("others", "both"):
        registry.register(module.TARGET, module.hook, source=OTHER)
    registry.apply_hooks()
    levels = {"kvspec_toy.others": "INFO", "kvspec_toy.both": "INFO"}
    if level == "DEBUG":
        levels["kvspec_toy.ours"] = "DEBUG"
    assert levels_by_target(caplog) == levels
    assert len(hook_registry.logger.filters) == 1


def test_hooks_name_the_plugin(registry, monkeypatch):
    monkeypatch.setattr(registration, "_modules", lambda scope: toy_hooks("ours"))
    registration.register_scope("flags")
    ((_, _, source),) = registry._hooks["kvspec_toy.ours"]
    assert source == ("kvspec", "sglang-kvspec")


def test_one_line_a_process_counts_the_hooks(caplog):
    caplog.set_level(logging.INFO, composition.logger.name)
    composition._log_hooks.cache_clear()
    for _ in range(2):
        composition._log_hooks("flags", "kvspec")
    count = registration.num_hooks("flags", "kvspec")
    assert count > 20
    assert [record.getMessage() for record in caplog.records] == [
        f"KVSpec: {count} hooks applied to SGLang 0.5.17"
    ]
