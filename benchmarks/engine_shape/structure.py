"""Counts over the source tree, by its syntax: nothing is imported."""

from __future__ import annotations

import ast
from configparser import ConfigParser
from functools import cache
from pathlib import Path

# Bases that only declare: a class below one of them inherits nothing of ours that runs.
_DECLARES = {"Protocol", "ABC"}


def file_lines(package: Path) -> dict[str, int]:
    """Return the number of lines of every module, by its path below the package's parent."""
    return {
        str(path.relative_to(package.parent)): len(path.read_text(encoding="utf-8").splitlines())
        for path in sorted(package.rglob("*.py"))
    }


def class_depths(package: Path) -> dict[str, int]:
    """Return for every class how many classes of ours it inherits from, one behind the other.

    Protocols, abstract bases and exceptions are left out: what is below one of them counts 0.
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
    """Return, by module, the Python files that the entry points of a group in a folder of plug-ins
    lead to."""
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
