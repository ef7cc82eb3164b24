"""Content of the wheel that `python -m build` makes."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("sglang_kvspec", "kvspec_kernels", "kvspec_patches")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Wheel built from a copy, since setuptools leaves files beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    names = [*("pyproject.toml", "README.md", "LICENSE", "NOTICE"), "sglang_kvspec", "kernels"]
    for name in (*names, "patches", "testkit", "benchmarks"):
        target = source / name
        if (ROOT / name).is_dir():
            for path in (ROOT / name).rglob("*"):
                if path.is_file() and path.suffix in {".py", ".typed", ".cu", ".cuh"}:
                    copy = target / path.relative_to(ROOT / name)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    copy.write_bytes(path.read_bytes())
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(folder)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_it_holds_every_module_and_kernel(wheel):
    names = set(wheel.namelist())
    for root, package in zip((ROOT, ROOT / "kernels", ROOT / "patches"), PACKAGES, strict=True):
        files = {
            str(path.relative_to(root))
            for path in (root / package).rglob("*")
            if path.suffix in {".py", ".typed", ".cu", ".cuh"}
        }
        assert len(files) > 10
        assert files <= names, sorted(files - names)


def test_it_publishes_types(wheel):
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(wheel.namelist())


def test_it_ships_the_server_alone(wheel):
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    (metadata,) = tops - set(PACKAGES)
    assert metadata.endswith(".dist-info")


def test_sglang_finds_it(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    text = wheel.read(name).decode()
    assert "[sglang.srt.plugins]\nkvspec = sglang_kvspec.plugin:register" in text
    assert "[console_scripts]\nsglang-kvspec = sglang_kvspec.cli:main" in text


def test_it_carries_the_licence(wheel):
    names = {Path(name).name for name in wheel.namelist() if ".dist-info/licenses/" in name}
    assert names == {"LICENSE", "NOTICE"}
