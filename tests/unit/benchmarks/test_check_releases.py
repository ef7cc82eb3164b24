"""Static comparison of SGLang's releases, on small wheels that the tests write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import check_releases
import pytest
from releases import wheels
from releases.needs import (
    Need,
    OwnArguments,
    all_needs,
    needs_of_hooks,
    needs_of_imports,
    needs_of_methods,
)
from releases.record import complaints
from releases.tables import release_tables

from kvspec_patches.hook import Hook
from kvspec_patches.hooks import HOOKS

ROOT = Path(__file__).resolve().parents[3]
OLD, NEW = "0.5.17", "0.5.18"
POOL = "class Pool:\n    def free(self, page, lazy=False): ...\n"
CALLER = "from sglang.pool import Pool\ndef run(pool): pool.free(1)\n"
SOURCES = {"pool": POOL, "caller": CALLER}


def free_hook(original, self, page, **kwargs):
    return original(self, page, **kwargs)


def spread_hook(original, *args, **kwargs):
    return original(*args, **(kwargs | {"lazy": True}))


def newer_hook(original, self, page, why=None, *rest, how=None, **kwargs):
    return original(self, page, *rest, **kwargs)


FREE = Hook("sglang.pool.Pool.free", "around", "kvspec", free_hook, "never")


def write_wheel(folder, release, sources):
    folder.mkdir(exist_ok=True)
    with ZipFile(folder / f"sglang-{release}-py3-none-any.whl", "w") as archive:
        archive.writestr("sglang/__init__.py", "")
        for name, text in sources.items():
            archive.writestr(f"sglang/{name}.py", text)


@pytest.fixture
def table(tmp_path):
    """Function that compares an old and a new release: sources of each, by module."""

    def compare(needs, old, new):
        write_wheel(tmp_path / "wheels", OLD, old)
        write_wheel(tmp_path / "wheels", NEW, new)
        return check_releases.compare(needs, (OLD, NEW), tmp_path / "wheels")

    return compare


def need(*places):
    return Need("import", places, ("compat/some",))


def words(settings):
    return [list(row["cells"].values()) for row in settings["rows"]]


def reasons(settings):
    return [each["reason"] for each in settings["breaks"]]


def test_a_release_with_all_symbols_has_no_break(table):
    needs = [*needs_of_hooks([FREE]), need("sglang.pool.Pool")]
    settings = table(needs, SOURCES, SOURCES)
    assert words(settings) == [["yes", "yes"]] * 2
    assert complaints(settings, needs) == []


def test_a_hooked_function_that_went_is_a_break(table):
    needs = needs_of_hooks([FREE])
    settings = table(needs, SOURCES, SOURCES | {"pool": "class Pool:\n    pass\n"})
    assert words(settings) == [["yes", "no"]]
    assert complaints(settings, needs) == ["SGLang 0.5.18: sglang.pool.Pool.free does not exist"]


@pytest.mark.parametrize(
    "caller",
    [
        "from sglang.pool import Pool\n",
        "class Other:\n    def free(self, page): super().free(page)\n",
        "def run(free): free(1)\n",
        "# pool.free(1)\n",
    ],
    ids=["import", "override", "another function", "comment"],
)
def test_a_hooked_method_without_callers_is_a_break(table, caller):
    recursive = POOL.replace("...", "self.free(page)")
    new = {"pool": recursive, "caller": caller, "test/test_pool": CALLER}
    settings = table(needs_of_hooks([FREE]), SOURCES, new)
    assert words(settings) == [["yes", "uncalled"]]
    assert reasons(settings) == ["is never called"]


def test_a_function_that_is_handed_on_counts_as_called(table):
    hook = Hook("sglang.pool.free", "before", "kvspec", lambda page: None, "never")
    need_of_free = Need("hook", (hook.target,), ("free",), OwnArguments(("page",), (), False, True))
    sources = {"pool": "def free(page): ...\n", "caller": "import threading\nrun(target=free)\n"}
    settings = table([need_of_free], sources, sources)
    assert [row["uses"] for row in settings["rows"]] == [{OLD: 1, NEW: 1}]


@pytest.mark.parametrize(
    ("hook", "arguments", "reason"),
    [
        (free_hook, "self, slot, lazy=False", "has no argument `page`, which ours names"),
        (free_hook, "self, lazy, page", "takes `page` at another position than ours"),
        (free_hook, "self, page, *, why", None),
        (free_hook, "self, page=None", None),
        (spread_hook, "self, page, idle=False", "has no argument `lazy`, which ours names"),
        (spread_hook, "self, page, **options", None),
        (newer_hook, "self, page", None),
    ],
)
def test_a_signature_breaks_only_a_hook_that_does_not_fit(table, hook, arguments, reason):
    row = Hook(FREE.target, "around", "kvspec", hook, "never")
    new = POOL.replace("self, page, lazy=False", arguments)
    settings = table(needs_of_hooks([row]), SOURCES, SOURCES | {"pool": new})
    assert words(settings) == [["yes", "unfit" if reason else "changed"]]
    assert reasons(settings) == ([reason] if reason else [])


def test_an_argument_that_a_hook_does_not_take_is_a_break(table):
    own = OwnArguments(("self", "page", "lazy"), (), False, False)
    needs = [Need("hook", (FREE.target,), ("free",), own)]
    new = POOL.replace("lazy=False", "lazy=False, *, why=None")
    settings = table(needs, SOURCES, SOURCES | {"pool": new})
    assert reasons(settings) == ["takes `why`, which ours does not"]
    assert settings["changes"] == [
        {"symbol": FREE.target, "release": NEW, "change": "gains `why`"},
    ]


def test_a_row_that_a_release_does_not_need_is_no_break(table):
    row = Hook(FREE.target, "around", "kvspec", free_hook, "never", until=NEW)
    settings = table(needs_of_hooks([row]), SOURCES, {"caller": CALLER})
    assert words(settings) == [["yes", "-"]]
    assert settings["breaks"] == []


def test_a_release_before_all_supported_ones_is_asked_for_what_the_first_needs():
    (asked,) = needs_of_hooks([FREE])
    assert asked.is_for("0.5.16")


def test_an_import_from_one_of_two_places_may_move(table):
    needs = [need("sglang.pool.Pool", "sglang.kv.pool.Pool"), need("sglang.pool.Pool")]
    settings = table(needs, SOURCES, {"kv/pool": POOL})
    assert words(settings) == [["yes", "moved"], ["yes", "no"]]
    assert reasons(settings) == ["does not exist"]


@pytest.mark.parametrize(
    "sources",
    [
        {"pool": "from sglang.kv.pool import Pool\n", "kv/pool": POOL},
        {"pool": "from .kv.pool import *\n", "kv/pool": POOL},
        {"pool/__init__": "from .paged import Paged as Pool\n", "pool/paged": "Paged = 1\n"},
        {"pool": "try:\n    import fast\nexcept ImportError:\n    Pool = None\n"},
        {"pool": "if fast:\n    pass\nelse:\n    class Pool: ...\n"},
    ],
    ids=["import", "star", "relative", "handler", "else"],
)
def test_a_name_is_found_where_it_is_bound(table, sources):
    settings = table([need("sglang.pool.Pool")], sources, {"pool": "import Pool\n"})
    assert [cells[0] for cells in words(settings)] == ["yes"]
    assert reasons(settings) == ["does not exist"]


def test_a_method_of_a_base_class_in_another_module_is_found(table):
    inherited = {
        "base": POOL.replace("Pool", "Base"),
        "pool": "from sglang import base\nclass Pool(base.Base): ...\n",
        "caller": CALLER,
    }
    needs = needs_of_hooks([FREE])
    assert words(table(needs, SOURCES, inherited)) == [["yes", "yes"]]
    inherited["base"] = "class Base: ...\n"
    assert words(table(needs, SOURCES, inherited)) == [["yes", "no"]]


def test_a_circle_of_imports_ends(table):
    circle = {"pool": "from sglang.kv import Pool\n", "kv": "from sglang.pool import Pool\n"}
    assert words(table([need("sglang.pool.Pool")], SOURCES, circle)) == [["yes", "no"]]


def test_fields_of_a_record_are_its_arguments(table):
    old = "from dataclasses import dataclass\n@dataclass\nclass Pool:\n    size: int\n"
    settings = table([need("sglang.pool.Pool")], {"pool": old}, {"pool": f"{old}    page: int\n"})
    assert words(settings) == [["yes", "changed"]]
    assert [each["change"] for each in settings["changes"]] == ["gains `page`"]


@pytest.fixture
def sources(tmp_path):
    """Sources of a small KVSpec, which imports and subclasses names of SGLang."""
    files = {
        "sglang_kvspec/adapters/compat/pool.py": (
            "try:\n    from sglang.pool import Pool\n"
            "except ImportError:\n    from sglang.kv.pool import Pool\n"
            "from sglang import server\n"
        ),
        "sglang_kvspec/adapters/pool.py": (
            "from sglang_kvspec.adapters.compat.pool import Pool as Base\n"
            "class Own(Base):\n    def free(self, page, lazy=False): ...\n    def ours(self): ...\n"
        ),
        "patches/kvspec_patches/some.py": "def hook():\n    from sglang.late import name\n",
        "sglang_kvspec/plugin.py": "from sglang_kvspec.core import flags\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_imports_and_methods_are_read_from_sources(sources):
    assert [each.places for each in needs_of_imports(sources)] == [
        ("sglang.late.name",),
        ("sglang.pool.Pool", "sglang.kv.pool.Pool"),
        ("sglang.server",),
    ]
    assert [each.places[0] for each in needs_of_methods(sources)] == [
        "sglang.pool.Pool.free",
        "sglang.pool.Pool.ours",
    ]


def test_an_overridden_method_must_fit_and_one_of_ours_has_no_row(sources, table):
    new = SOURCES | {"pool": POOL.replace("lazy", "idle")}
    settings = table(needs_of_methods(sources), SOURCES, new)
    assert [row["symbol"].split(" or ")[0] for row in settings["rows"]] == ["sglang.pool.Pool.free"]
    assert reasons(settings) == ["has no argument `lazy`, which ours names"]


def test_each_hook_and_each_compat_module_has_needs():
    needs = all_needs(HOOKS, ROOT)
    assert sum(each.kind == "hook" for each in needs) == len(HOOKS)
    compat = (ROOT / "sglang_kvspec/adapters/compat").glob("[!_]*.py")
    users = {user for each in needs for user in each.users}
    assert {f"compat/{path.stem}" for path in compat} <= users
    places = {places for each in needs if len(places := each.places) > 1 and each.kind == "import"}
    assert (
        "sglang.srt.runtime_context.get_schedule",
        "sglang.srt.runtime_context.get_server_args",
    ) in places


def test_the_table_of_hooks_does_not_import_sglang():
    code = "import sys, kvspec_patches.hooks; sys.exit('sglang' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def run(monkeypatch, tmp_path, *arguments):
    """Run the script on the needs of FREE alone, with wheels and results in `tmp_path`."""
    monkeypatch.setattr(check_releases, "all_needs", lambda hooks, root: needs_of_hooks([FREE]))
    monkeypatch.setattr(check_releases, "SUPPORTED", (OLD, NEW))
    monkeypatch.setattr(check_releases, "OTHERS", ())
    paths = (
        "--wheels",
        tmp_path / "wheels",
        "--out",
        tmp_path / "out.json",
        "--page",
        tmp_path / "page.md",
    )
    monkeypatch.setattr(sys, "argv", ["check_releases.py", *map(str, paths), *arguments])
    return check_releases.main()


def test_a_run_writes_result_and_page_and_the_cached_table_then_passes(monkeypatch, tmp_path):
    for release in (OLD, NEW):
        write_wheel(tmp_path / "wheels", release, SOURCES)
    page = tmp_path / "page.md"
    page.write_text("<!-- releases_hooks:begin -->\n<!-- releases_hooks:end -->\n")
    assert run(monkeypatch, tmp_path) == 0
    assert f"| `{FREE.target}` | test_check_releases | yes | yes | 1 |" in page.read_text()
    assert run(monkeypatch, tmp_path, "--cached") == 0
    record = json.loads((tmp_path / "out.json").read_text())
    assert [each["value"] for each in record["figures"]] == [0, 1]
    assert set(record["settings"]["wheels"]) == {OLD, NEW}


def test_a_break_fails_also_from_the_cached_table(monkeypatch, tmp_path, capsys):
    write_wheel(tmp_path / "wheels", OLD, SOURCES)
    write_wheel(tmp_path / "wheels", NEW, {"caller": CALLER})
    assert run(monkeypatch, tmp_path) == 1
    assert run(monkeypatch, tmp_path, "--cached") == 1
    assert capsys.readouterr().err.count("Pool.free does not exist") == 2
    tables = release_tables(tmp_path / "out.json")
    assert f"| `{FREE.target}` | {NEW} | does not exist |" in tables["releases_misfits"]


def test_a_cached_table_of_other_symbols_is_refused(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, tmp_path, "--cached") == 1
    assert "there is no cached table" in capsys.readouterr().err
    for release in (OLD, NEW):
        write_wheel(tmp_path / "wheels", release, SOURCES)
    assert run(monkeypatch, tmp_path) == 0
    monkeypatch.setattr(
        sys.modules[__name__], "FREE", Hook(FREE.target, "around", "kvspec", spread_hook, "")
    )
    assert run(monkeypatch, tmp_path, "--cached") == 1
    assert "made for other symbols" in capsys.readouterr().err


def test_without_an_index_the_script_fails_or_uses_the_cached_table(monkeypatch, tmp_path, capsys):
    for release in (OLD, NEW):
        write_wheel(tmp_path / "wheels", release, SOURCES)
    assert run(monkeypatch, tmp_path) == 0
    (tmp_path / "wheels" / f"sglang-{NEW}-py3-none-any.whl").unlink()
    failed = subprocess.CompletedProcess((), 1, "", "WARNING: slow\nERROR: no answer\n")
    monkeypatch.setattr(wheels.subprocess, "run", lambda *args, **kwargs: failed)
    assert run(monkeypatch, tmp_path) == 1
    assert "SGLang 0.5.18 did not download (ERROR: no answer): run" in capsys.readouterr().err
    assert run(monkeypatch, tmp_path, "--cached-if-offline") == 0
    assert "using the cached table" in capsys.readouterr().err
