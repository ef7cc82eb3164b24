"""SGLang's registry without hooks, for tests that register their own."""

from __future__ import annotations

from collections import defaultdict

import pytest
from sglang.srt.plugins import hook_registry

from kvspec_patches import registration


@pytest.fixture
def empty_registry(monkeypatch):
    """SGLang's registry without hooks, and no scope of ours registered."""
    monkeypatch.setattr(hook_registry.HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(hook_registry.HookRegistry, "_patched", set())
    monkeypatch.setattr(registration, "_registered", set())
    return hook_registry.HookRegistry
