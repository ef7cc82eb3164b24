"""Lookup of dotted names in the sources of a wheel, and the arguments of what is found."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from releases.wheels import Wheel

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Longest chain of re-exports and base classes; a longer one is a circle.
_MOST_STEPS = 12
# Bases that make the annotated fields of a class the arguments of its constructor.
_RECORDS = ("Struct", "NamedTuple")


@dataclass(frozen=True, slots=True)
class Symbol:
    """Definition of a name. node: None for a module. owner: module of the definition."""

    owner: str
    node: ast.AST | None


@dataclass(frozen=True, slots=True)
class Import:
    """Name that a module takes from another: `name` of `module`; all names of it for "*"."""

    module: str
    name: str


def find(wheel: Wheel, dotted: str, steps: int = _MOST_STEPS) -> Symbol | None:
    """Return the definition of a dotted name; None if the wheel has none. Re-exports within SGLang
    and base classes of SGLang are followed."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        if (module := ".".join(parts[:end])) in wheel.files:
            return _find_in(wheel, module, parts[end:], steps)
    return None


def _find_in(wheel: Wheel, module: str, names: Sequence[str], steps: int) -> Symbol | None:
    if not names:
        return Symbol(module, None)
    if not steps:
        return None
    found = [node for name, node in bindings(wheel, module) if name == names[0]]
    # A class may be bound again to a record that is made of it: its methods are in the class.
    found.sort(key=lambda node: not isinstance(node, ast.ClassDef | Function))
    for node in found:
        if isinstance(node, Import):
            symbol = find(wheel, ".".join((node.module, node.name, *names[1:])), steps - 1)
        else:
            symbol = _member(wheel, Symbol(module, node), names[1:], steps - 1)
        if symbol is not None:
            return symbol
    for name, node in bindings(wheel, module):
        if name == "*" and isinstance(node, Import) and node.module in wheel.files:
            symbol = _find_in(wheel, node.module, names, steps - 1)
            if symbol is not None:
                return symbol
    return None


def _member(wheel: Wheel, symbol: Symbol, names: Sequence[str], steps: int) -> Symbol | None:
    if not names:
        return symbol
    if not isinstance(symbol.node, ast.ClassDef) or not steps:
        return None
    for name, node in _bound(wheel, symbol.owner, symbol.node.body):
        if name == names[0] and not isinstance(node, Import):
            return _member(wheel, Symbol(symbol.owner, node), names[1:], steps - 1)
    for base in bases(wheel, symbol, steps):
        if (found := _member(wheel, base, names, steps - 1)) is not None:
            return found
    return None


def bases(wheel: Wheel, symbol: Symbol, steps: int = _MOST_STEPS) -> Iterator[Symbol]:
    """Yield the base classes of a class that the wheel defines."""
    assert isinstance(symbol.node, ast.ClassDef)
    for base in symbol.node.bases:
        name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
        found = _find_in(wheel, symbol.owner, name.split("."), steps - 1)
        if found is not None and isinstance(found.node, ast.ClassDef):
            yield found


def bindings(wheel: Wheel, module: str) -> Iterator[tuple[str, ast.AST | Import]]:
    """Yield every name that a module binds, with its definition or import, in source order."""
    return _bound(wheel, module, wheel.tree(module).body)


def _bound(
    wheel: Wheel, module: str, body: Sequence[ast.stmt]
) -> Iterator[tuple[str, ast.AST | Import]]:
    for node in body:
        if isinstance(node, ast.ClassDef | Function):
            yield node.name, node
        elif isinstance(node, ast.Assign):
            yield from ((name, node) for target in node.targets for name in _targets(target))
        elif isinstance(node, ast.AnnAssign):
            yield from ((name, node) for name in _targets(node.target))
        elif isinstance(node, ast.ImportFrom):
            source = imported_module(node, wheel.package_of(module))
            for each in node.names:
                yield each.asname or each.name, Import(source, each.name)
        elif isinstance(node, ast.Import):
            for each in node.names:
                if each.asname:
                    path, _, name = each.name.rpartition(".")
                    yield each.asname, Import(path, name)
        else:
            for inner in ("body", "orelse", "finalbody"):
                yield from _bound(wheel, module, getattr(node, inner, []))
            for handler in getattr(node, "handlers", []):
                yield from _bound(wheel, module, handler.body)


def _targets(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from _targets(each)


def imported_module(node: ast.ImportFrom, package: str) -> str:
    """Return the absolute name of the module that `node` imports from."""
    if not node.level:
        return node.module or ""
    parts = package.split(".")[: -(node.level - 1) or None]
    return ".".join([*parts, *([node.module] if node.module else [])])


def arguments_of(wheel: Wheel, symbol: Symbol) -> ast.arguments | None:
    """Return the arguments of a function, or those of a class's constructor; None for anything
    else. The fields of a record class become its arguments."""
    if isinstance(symbol.node, Function):
        return symbol.node.args
    if not isinstance(symbol.node, ast.ClassDef):
        return None
    if is_record(wheel, symbol):
        args = [ast.arg(name) for name in _fields(wheel, symbol)]
        return ast.arguments([], args, None, [], [], None, [])
    made = _member(wheel, symbol, ["__init__"], _MOST_STEPS)
    return made.node.args if made is not None and isinstance(made.node, Function) else None


def is_record(wheel: Wheel, symbol: Symbol) -> bool:
    """Return True for a dataclass, a msgspec structure or a named tuple."""
    assert isinstance(symbol.node, ast.ClassDef)
    if any("dataclass" in ast.unparse(each) for each in symbol.node.decorator_list):
        return True
    if any(ast.unparse(base).split(".")[-1] in _RECORDS for base in symbol.node.bases):
        return True
    return any(
        is_record(wheel, base)
        for base in bases(wheel, symbol)
        if not _member(wheel, base, ["__init__"], 2)
    )


def _fields(wheel: Wheel, symbol: Symbol) -> list[str]:
    """Return the annotated fields of a record class, those of its bases first."""
    assert isinstance(symbol.node, ast.ClassDef)
    names = [name for base in bases(wheel, symbol) for name in _fields(wheel, base)]
    names += [
        node.target.id
        for node in symbol.node.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and "ClassVar" not in ast.unparse(node.annotation)
    ]
    return list(dict.fromkeys(names))
