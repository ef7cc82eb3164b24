"""A start calls every hooked symbol, and finds those whose calls do not reach our hook."""

from __future__ import annotations

import asyncio
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
from sglang.srt.plugins import hook_registry

from kvspec_patches import registration
from kvspec_patches.hook import Hook
from sglang_kvspec.core.errors import HookError


def make_toy(calls):
    """Return a module of functions, a method and a class method that note their calls."""
    toy = ModuleType("kvspec_toy")

    def noting(name):
        def function(*args):
            calls.append(name)
            return name

        return function

    for name in ("before", "after", "around", "replace"):
        setattr(toy, name, noting(name))

    async def later():
        calls.append("later")
        return "later"

    toy.later = later
    toy.Owner = type(
        "Owner",
        (),
        {"method": noting("method"), "of_class": classmethod(noting("of_class"))},
    )
    return toy


def hooks_on_toy():
    def before():
        return None

    def after(result):
        return f"{result}, hooked"

    def nothing_after(result, *args):
        return None

    def around(original, *args):
        return f"{original(*args)}, hooked"

    def replace():
        return "ours"

    def pass_on(original):
        return original()

    rows = [
        ("before", "before", before),
        ("after", "after", after),
        ("around", "around", around),
        ("replace", "replace", replace),
        ("later", "around", pass_on),
        ("Owner.method", "after", nothing_after),
        ("Owner.of_class", "around", around),
    ]
    return [Hook(f"kvspec_toy.{name}", kind, "flags", hook, "never") for name, kind, hook in rows]


@pytest.fixture
def toy(monkeypatch, empty_registry):
    """A hooked module. calls: originals that ran."""
    calls = []
    module = make_toy(calls)
    monkeypatch.setitem(sys.modules, "kvspec_toy", module)
    monkeypatch.setattr(registration, "HOOKS", hooks_on_toy())
    registration.register_scope("flags")
    registration.apply_hooks()
    return SimpleNamespace(module=module, calls=calls)


def test_a_probe_reaches_every_hook_and_runs_no_original(toy):
    registration.verify_applied("flags")
    assert toy.calls == []


def test_hooks_do_what_they_did(toy):
    module = toy.module
    assert module.before() == "before"
    assert module.after() == "after, hooked"
    assert module.around() == "around, hooked"
    assert module.replace() == "ours"
    assert asyncio.run(module.later()) == "later"
    # None after the original leaves its result.
    assert module.Owner().method() == "method"
    assert module.Owner.of_class() == "of_class, hooked"
    assert toy.calls == ["before", "after", "around", "later", "method", "of_class"]


@pytest.mark.parametrize("name", ["before", "after", "around", "replace", "later"])
@pytest.mark.parametrize("taker", [lambda: None, lambda a, b: None], ids=["", "with arguments"])
def test_what_takes_the_place_of_a_hook_is_found(toy, name, taker):
    setattr(toy.module, name, taker)
    with pytest.raises(HookError, match=rf"calls of kvspec_toy\.{name} of SGLang 0.* do not reach"):
        registration.verify_applied("flags")


def test_a_method_that_is_set_again_is_found(toy):
    toy.module.Owner.method = lambda self: None
    with pytest.raises(HookError, match=r"calls of kvspec_toy\.Owner\.method of SGLang"):
        registration.verify_applied("flags")


def test_a_hook_around_ours_by_another_plugin_is_no_error(monkeypatch, toy):
    def other(original, needed):
        return original(needed)

    registry = hook_registry.HookRegistry
    registry._patched.clear()
    source = hook_registry.HookSource("other", "other")
    registry.register("kvspec_toy.around", other, hook_registry.HookType.AROUND, source=source)
    registry.apply_hooks()
    registration.verify_applied("flags")


def test_other_threads_are_served_during_a_probe(monkeypatch, toy):
    """The probe of this thread must not end a call of another."""
    served = []

    def serve():
        served.append(toy.module.around())

    def resolve(target):
        thread = threading.Thread(target=serve)
        thread.start()
        thread.join()
        return toy.module.around

    monkeypatch.setattr(registration, "resolve_name", resolve)
    assert registration._is_reached(registration.HOOKS[2])
    assert served == ["around, hooked"]
