"""Counts over the source tree, by its syntax: nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from configparser import ConfigParser
from functools import cache
from pathlib import Path

# Bases that only declare: a class below one of them inherits nothing of ours that runs.
_DECLARES = {"Protocol", "ABC"}
_SOURCES = (("", "sglang_kvspec"), ("kernels", "kvspec_kernels"), ("patches", "kvspec_patches"))


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


def import_cycles(root: Path) -> list[list[str]]:
    """Return the strongly connected groups of more than one module, imports inside functions and
    for types alone included."""
    graph = _imports(root)
    return [group for group in _components(graph) if len(group) > 1]


def plugin_files(folder: Path, group: str) -> list[str]:
    """Return the Python files that the entry points of a group in a folder of plug-ins lead to."""
    files = set()
    for path in folder.glob("*.dist-info/entry_points.txt"):
        points = ConfigParser()
        points.read(path)
        if points.has_section(group):
            modules = [value.split(":")[0] for value in points[group].values()]
            files |= {module.split(".")[0] for module in modules}
    found = []
    for module in sorted(files):
        package = folder / module
        found += sorted(package.rglob("*.py")) if package.is_dir() else [package.with_suffix(".py")]
    return [path.name for path in found]


def _imports(root: Path) -> dict[str, set[str]]:
    modules: dict[str, Path] = {}
    for source, package in _SOURCES:
        base = root / source
        for path in (base / package).rglob("*.py"):
            parts = path.relative_to(base).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                # A name that is a module is what is imported, not its package.
                for alias in node.names:
                    longer = f"{node.module}.{alias.name}"
                    names.add(longer if longer in modules else node.module)
        graph[module] = (names & modules.keys()) - {module}
    return graph


def _components(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return strongly connected groups (Kosaraju)."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(start: str, edges: Mapping[str, set[str]], out: list[str]) -> None:
        stack = [(start, iter(sorted(edges[start])))]
        seen.add(start)
        while stack:
            node, following = stack[-1]
            for other in following:
                if other not in seen:
                    seen.add(other)
                    stack.append((other, iter(sorted(edges[other]))))
                    break
            else:
                stack.pop()
                out.append(node)

    for node in sorted(graph):
        if node not in seen:
            visit(node, graph, order)
    reverse: dict[str, set[str]] = {node: set() for node in graph}
    for node, others in graph.items():
        for other in others:
            reverse[other].add(node)
    seen.clear()
    groups = []
    for node in reversed(order):
        if node not in seen:
            group: list[str] = []
            visit(node, reverse, group)
            groups.append(group)
    return groups
