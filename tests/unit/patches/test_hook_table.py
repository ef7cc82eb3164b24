"""The table of hooks, the hook modules and patches/README.md agree."""

from __future__ import annotations

from dataclasses import replace
from inspect import getdoc, getmodule
from pathlib import Path
from typing import get_args

import pytest

from kvspec_patches.hook import Hook, Kind, Scope
from kvspec_patches.hooks import HOOKS
from sglang_kvspec.core.errors import UnsupportedError
from sglang_kvspec.core.sglang_releases import SUPPORTED, parse_version

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "patches" / "kvspec_patches"
NOT_HOOKS = {"__init__", "hook", "hooks", "registration"}


def test_every_hook_module_is_in_the_table_once() -> None:
    modules = {path.stem for path in PACKAGE.glob("*.py")} - NOT_HOOKS
    assert sorted(hook.name for hook in HOOKS) == sorted(modules)


@pytest.mark.parametrize("release", SUPPORTED)
def test_every_symbol_is_hooked_once(release: str) -> None:
    hooks = [hook for hook in HOOKS if hook.is_for(release)]
    assert len({hook.target for hook in hooks}) == len(hooks)


def test_a_row_is_for_the_releases_from_since_to_until() -> None:
    hook = replace(HOOKS[0], since="0.5.18", until="0.5.20")
    releases = ("0.5.9", "0.5.17", "0.5.18", "0.5.19.post1", "0.5.20", "0.6.0")
    assert [hook.is_for(each) for each in releases] == [False, False, True, True, False, False]
    assert replace(hook, until=None).is_for("0.6.0")


def test_every_row_is_for_a_supported_release() -> None:
    for hook in HOOKS:
        assert any(hook.is_for(release) for release in SUPPORTED), hook


@pytest.mark.parametrize("text", ["", "main", "v0.5.17"])
def test_a_version_without_numbers_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedError, match="no release number"):
        parse_version(text)


def test_every_row_is_complete() -> None:
    for hook in HOOKS:
        assert hook.target.startswith("sglang.srt."), hook
        assert hook.kind in get_args(Kind), hook
        assert hook.scope in get_args(Scope), hook
        assert hook.remove_when, hook


def test_every_hook_module_begins_with_its_symbol() -> None:
    for hook in HOOKS:
        first = (getdoc(getmodule(hook.function)) or "").partition(":")[0]
        assert hook.target.endswith(f".{first.rpartition('.')[2]}"), hook


def releases_of(hook: Hook) -> str:
    needed = [release for release in SUPPORTED if hook.is_for(release)]
    if needed == list(SUPPORTED):
        return "all"
    if needed[-1] == SUPPORTED[-1]:
        return f"from {needed[0]}"
    return f"to {needed[-1]}" if needed[0] == SUPPORTED[0] else f"{needed[0]} to {needed[-1]}"


def test_readme_has_one_row_a_hook() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "patches" / "README.md").read_text().splitlines()
        if line.startswith("| ") and not line.startswith("| module")
    ]
    assert [row[0] for row in rows] == [hook.name for hook in HOOKS]
    for (_, symbol, scope, releases, _, end), hook in zip(rows, HOOKS, strict=True):
        assert hook.target.endswith(symbol.strip("`"))
        assert (scope, end) == (hook.scope, hook.remove_when)
        assert releases == releases_of(hook)
