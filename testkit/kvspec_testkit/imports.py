"""Import graph of the project's modules, from their syntax: nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = {
    "sglang_kvspec": ROOT,
    "kvspec_kernels": ROOT / "kernels",
    "kvspec_patches": ROOT / "patches",
    "kvspec_testkit": ROOT / "testkit",
}

Imports = Mapping[str, frozenset[str]]


def is_within(name: str, prefix: str) -> bool:
    """Return True if a dotted name is `prefix` or is below it."""
    return name == prefix or name.startswith(prefix + ".")


def module_files() -> dict[str, Path]:
    """Return the file of every module of the project, by dotted name."""
    files = {}
    for package, source_root in SOURCE_ROOTS.items():
        for path in sorted((source_root / package).rglob("*.py")):
            parts = path.relative_to(source_root).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imported_names(source: str, module: str, *, is_package: bool) -> frozenset[str]:
    """Return the dotted names that `source` imports anywhere: by statements, relative or not, lazy
    or for type checking only, and by `import_module("literal")`. `from a import b` names a and a.b.
    """
    names = set()
    for base, members in _import_statements(source, module, is_package=is_package):
        names |= {base, *(f"{base}.{member}" for member in members)}
    return frozenset(names)


def _import_statements(
    source: str, module: str, *, is_package: bool
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the names of every import: (a, (b, c)) for `from a import b, c`, (a, ()) otherwise."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base] if base else parent)
            yield base, tuple(alias.name for alias in node.names)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
            name = called.id if isinstance(called, ast.Name) else called
            if name in ("import_module", "__import__") and node.args:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield first.value, ()


def loaded_modules(
    source: str, module: str, modules: Collection[str], *, is_package: bool
) -> frozenset[str]:
    """Return those of `modules` that imports anywhere in `source` load, except the packages that
    hold `module` itself.

    `from a import b` loads a.b if that is a module. Importing a.b also runs a/__init__.py.
    """
    loaded = set()
    for base, members in _import_statements(source, module, is_package=is_package):
        named = {f"{base}.{member}" for member in members}
        loaded |= named & set(modules)
        if not named or named - set(modules):
            loaded.add(base)
    for name in list(loaded):
        packages = accumulate(name.split("."), "{}.{}".format)
        loaded |= {package for package in packages if not is_within(module, package)}
    return frozenset(loaded & set(modules))


def import_graph() -> dict[str, frozenset[str]]:
    """Return, for every module of the project, the modules of the project that it loads."""
    files = module_files()
    return {
        module: loaded_modules(
            path.read_text(encoding="utf-8"), module, files, is_package=path.name == "__init__.py"
        )
        for module, path in files.items()
    }


def find_cycle(graph: Imports) -> list[str]:
    """Return a cycle of modules: each imports the next, and the last is the first. [] if none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle[::-1]
    return []


def project_imports() -> dict[str, frozenset[str]]:
    """Return the dotted names that every module of the project imports."""
    return {
        module: imported_names(
            path.read_text(encoding="utf-8"), module, is_package=path.name == "__init__.py"
        )
        for module, path in module_files().items()
    }
