"""Import statements of a module of KVSpec, and the places that each name may come from."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from releases.wheels import PACKAGE

_IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError")


def imported_names(tree: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each name that a module imports from SGLang, with the dotted names it may stand for.

    A `try` and its handlers of ImportError import one name from several places.
    """
    chosen: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and (handlers := _import_handlers(node)):
            imports = [*node.body, *(each for handler in handlers for each in handler.body)]
            chosen.update(imports)
            yield from _alternatives(each for each in imports if isinstance(each, ast.ImportFrom))
        elif isinstance(node, ast.ImportFrom) and node not in chosen:
            yield from ((name, (place,)) for name, place in _names(node))
        elif isinstance(node, ast.Import) and node not in chosen:
            for each in node.names:
                if _is_of_sglang(each.name):
                    yield each.asname or each.name, (each.name,)


def own_names(tree: ast.AST, package: str) -> Iterator[tuple[str, str, str]]:
    """Yield each name that a module imports from a module of `package`: the bound name, the stem of
    that module, and the name there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
            for each in node.names:
                yield each.asname or each.name, str(node.module).rpartition(".")[2], each.name


def _import_handlers(node: ast.Try) -> list[ast.ExceptHandler]:
    return [
        handler
        for handler in node.handlers
        if handler.type is not None
        and any(name in ast.unparse(handler.type) for name in _IMPORT_ERRORS)
    ]


def _alternatives(imports: Iterable[ast.ImportFrom]) -> Iterator[tuple[str, tuple[str, ...]]]:
    places: dict[str, list[str]] = {}
    for node in imports:
        for name, place in _names(node):
            places.setdefault(name, []).append(place)
    yield from ((name, tuple(found)) for name, found in places.items())


def _names(node: ast.ImportFrom) -> Iterator[tuple[str, str]]:
    if not node.level and _is_of_sglang(node.module or ""):
        for each in node.names:
            yield each.asname or each.name, f"{node.module}.{each.name}"


def _is_of_sglang(module: str) -> bool:
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")
