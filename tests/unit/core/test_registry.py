"""Codecs are found by entry points, and their names without an import."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_kvspec.core.codec_names import codec_names, load_codec
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.registry import Registry, forget_entries
from sglang_kvspec.core.seams import (
    CODECS,
    DRAFT_VIEWS,
    DRAFTERS,
    SCORERS,
    TARGET_ATTENTIONS,
    VERIFY_SCHEDULERS,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture
def install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], None]]:
    """Return a function that puts a distribution with one entry point of the group on sys.path."""

    def put(name: str, value: str) -> None:
        folder = tmp_path / "package"
        info = folder / "codec_package-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: codec-package\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[{CODECS.group}]\n{name} = {value}\n")
        (folder / "nameless_codec.py").write_text("class Settings: ...\n")
        monkeypatch.syspath_prepend(str(folder))
        forget_entries()

    yield put
    forget_entries()


SEAMS = [CODECS, DRAFTERS, DRAFT_VIEWS, SCORERS, TARGET_ATTENTIONS, VERIFY_SCHEDULERS]


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.flag)
def test_what_is_built_in_is_an_entry_point_of_this_package(seam: Registry) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"][seam.group] == seam.built_in
    for name in seam.built_in:
        assert seam.load(name)


def test_an_installed_package_adds_a_codec_by_name(install) -> None:
    install("zip4", "zip_codec:Settings")
    assert codec_names() == (*CODECS.built_in, "zip4")


def test_names_need_no_import(install) -> None:
    install("zip4", "nameless_codec:Settings")
    code = (
        "import sys; from sglang_kvspec.core.codec_names import codec_names;"
        "print(*codec_names()); print('nameless_codec' in sys.modules or 'torch' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
    ).stdout.split("\n")
    assert found[:2] == [" ".join((*CODECS.built_in, "zip4")), "False"]


def test_an_unknown_name_is_refused_with_what_there_is() -> None:
    names = "kivi, kvquant, log4, rotatekv, turboquant, uniform4"
    with pytest.raises(ConfigError, match=f"--kvspec-codec must be one of {names}, got 'x'"):
        load_codec("x")


@pytest.mark.parametrize("value", ["nowhere_at_all:Settings", "nameless_codec:Missing"])
def test_an_entry_point_that_cannot_be_imported_is_named(install, value) -> None:
    install("zip4", value)
    with pytest.raises(ConfigError, match=f"--kvspec-codec zip4: cannot import {value}"):
        load_codec("zip4")


def test_an_entry_point_must_lead_to_a_codec_of_its_name(install) -> None:
    install("zip4", "nameless_codec:Settings")
    with pytest.raises(ConfigError, match=r"zip4: .* must lead to a codec of this name"):
        load_codec("zip4")


def test_two_packages_cannot_give_one_name(install) -> None:
    install("log4", "other_package:Settings")
    with pytest.raises(ConfigError, match=r"log4 is both kvspec_kernels.* and other_package"):
        load_codec("log4")
    assert load_codec("uniform4").name == "uniform4", "other codecs still serve"


@pytest.mark.parametrize("name", ["../up", "Zip4", "zip 4", "z" * 33])
def test_a_name_must_do_as_a_folder(install, name) -> None:
    install(name, "zip_codec:Settings")
    with pytest.raises(ConfigError, match="lower-case letters, digits and underscores"):
        load_codec(name)
