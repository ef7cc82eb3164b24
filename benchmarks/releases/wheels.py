"""Wheels of SGLang: download, and the Python sources inside."""

from __future__ import annotations

import ast
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from zipfile import ZipFile

PACKAGE = "sglang"
# Tests inside the package do not show that a server calls a function.
_TESTS = f"{PACKAGE}.test"


class DownloadError(RuntimeError):
    """Failure to get a wheel, in one sentence that says what to do."""


class Wheel:
    """Python sources of one wheel, parsed when they are needed. Nothing is unpacked or imported."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._zip = ZipFile(path)
        self._trees: dict[str, ast.Module] = {}

    @cached_property
    def files(self) -> dict[str, str]:
        """File of each module, by the module's dotted name."""
        return {
            name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name
            for name in self._zip.namelist()
            if name.startswith(f"{PACKAGE}/") and name.endswith(".py")
        }

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()

    def tree(self, module: str) -> ast.Module:
        """Return the syntax tree of a module."""
        if module not in self._trees:
            self._trees[module] = ast.parse(self._zip.read(self.files[module]))
        return self._trees[module]

    def package_of(self, module: str) -> str:
        """Return the package that the relative imports of a module start from."""
        is_package = self.files[module].endswith("/__init__.py")
        return module if is_package else module.rpartition(".")[0]

    def sources(self) -> Iterator[str]:
        """Yield the text of every module that is no test."""
        for module, file in self.files.items():
            if not f"{module}.".startswith(f"{_TESTS}."):
                yield self._zip.read(file).decode()


def get_wheel(release: str, folder: Path) -> Wheel:
    """Return the wheel of a release from `folder`, and download it there if it is missing. Raises
    DownloadError."""
    if (path := _find(release, folder)) is None:
        _download(release, folder)
        path = _find(release, folder)
    if path is None:
        raise DownloadError(f"pip left no wheel of SGLang {release} in {folder}: put one there")
    return Wheel(path)


def _find(release: str, folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob(f"{PACKAGE}-{release}-*.whl"))), None)


def _download(release: str, folder: Path) -> None:
    # An index that does not answer fails in half a minute, instead of after pip's five retries.
    command = (
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
        *("--only-binary=:all:", "--retries=1", "--timeout=15"),
        *("--dest", str(folder), f"{PACKAGE}=={release}"),
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise DownloadError(
            f"the wheel of SGLang {release} did not download ({reason}): run this where pip "
            f"reaches an index, or put the wheel in {folder}, or use --cached"
        )
