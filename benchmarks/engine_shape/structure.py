"""Counts over the source tree by its syntax, without importing it."""

from __future__ import annotations

import ast
from configparser import ConfigParser
from functools import cache
from pathlib import Path

# Bases that only declare: a class below one of them inherits no code of KVSpec.
_DECLARES = {"Protocol", "ABC"}


def file_lines(package: Path) -> dict[str, int]:
    """Return the number of lines of each module, by its path below the package's parent."""
    return {
        str(path.relative_to(package.parent)): len(path.read_text(encoding="utf-8").splitlines())
        for path in sorted(package.rglob("*.py"))
    }


def class_depths(package: Path) -> dict[str, int]:
    """Return for every class the length of its longest chain of base classes in `package`.

    Protocols, abstract bases and exceptions do not count: a class directly below one has length 0.
    Classes are told apart by name.
    """
    bases: dict[str, list[str]] = {}
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                names = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
                bases[node.name] = names

    def is_exception(name: str) -> bool:
        return name.endswith(("Error", "Exception")) or any(map(is_exception, bases.get(name, ())))

    @cache
    def depth(name: str) -> int:
        if _DECLARES & set(bases[name]) or is_exception(name):
            return 0
        ours = [base for base in bases[name] if base in bases]
        return max((depth(base) + (not _DECLARES & set(bases[base])) for base in ours), default=0)

    return {name: depth(name) for name in sorted(bases)}


def plugin_files(folder: Path, group: str) -> dict[str, list[str]]:
    """Return, by module, the Python files behind the entry points of `group` in a folder of
    plug-ins."""
    files = set()
    for path in folder.glob("*.dist-info/entry_points.txt"):
        points = ConfigParser()
        points.read(path)
        if points.has_section(group):
            modules = [value.split(":")[0] for value in points[group].values()]
            files |= {module.split(".")[0] for module in modules}
    found = {}
    for module in sorted(files):
        package = folder / module
        paths = sorted(package.rglob("*.py")) if package.is_dir() else [package.with_suffix(".py")]
        found[module] = [path.name for path in paths]
    return found
