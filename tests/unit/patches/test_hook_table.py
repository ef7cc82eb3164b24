"""The table of hooks, the hook modules and patches/README.md agree."""

from __future__ import annotations

from inspect import getdoc, getmodule
from pathlib import Path
from typing import get_args

from kvspec_patches.hook import Kind, Scope
from kvspec_patches.hooks import HOOKS
from sglang_kvspec.adapters.activation import SUPPORTED_SGLANG

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "patches" / "kvspec_patches"
NOT_HOOKS = {"__init__", "hook", "hooks", "registration"}


def test_every_hook_module_is_in_the_table_once() -> None:
    modules = {path.stem for path in PACKAGE.glob("*.py")} - NOT_HOOKS
    assert sorted(hook.name for hook in HOOKS) == sorted(modules)


def test_every_symbol_is_hooked_once() -> None:
    assert len({hook.target for hook in HOOKS}) == len(HOOKS)


def test_every_row_is_complete() -> None:
    for hook in HOOKS:
        assert hook.target.startswith("sglang.srt."), hook
        assert hook.kind in get_args(Kind), hook
        assert hook.scope in get_args(Scope), hook
        assert set(SUPPORTED_SGLANG) <= set(hook.releases), hook
        assert hook.remove_when, hook


def test_every_hook_module_begins_with_its_symbol() -> None:
    for hook in HOOKS:
        first = (getdoc(getmodule(hook.function)) or "").partition(":")[0]
        assert hook.target.endswith(f".{first.rpartition('.')[2]}"), hook


def test_readme_has_one_row_a_hook() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "patches" / "README.md").read_text().splitlines()
        if line.startswith("| ") and not line.startswith("| module")
    ]
    assert [row[0] for row in rows] == [hook.name for hook in HOOKS]
    for (_, symbol, scope, _, end), hook in zip(rows, HOOKS, strict=True):
        assert hook.target.endswith(symbol.strip("`"))
        assert (scope, end) == (hook.scope, hook.remove_when)
