"""Uses of hooked functions in the sources of a wheel, counted by name."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection

from releases.symbols import Function
from releases.wheels import Wheel


def count_uses(
    wheel: Wheel, functions: Collection[str], methods: Collection[str]
) -> dict[str, int]:
    """Return how many places use each name, outside functions of that name.

    A place is a call, or another use of the value: a function may be handed on. Methods are
    counted where they stand behind a point. An import alone is no use.
    """
    wanted = {*functions, *methods}
    word = re.compile(rf"\b({'|'.join(sorted(map(re.escape, wanted)))})\b")
    counter = _Counter(frozenset(functions), frozenset(wanted))
    for text in wheel.sources():
        # Parsing is what takes time, so files without any of the names are left out.
        if word.search(text):
            counter.visit(ast.parse(text))
    return {name: counter.uses[name] for name in wanted}


class _Counter(ast.NodeVisitor):
    def __init__(self, functions: frozenset[str], wanted: frozenset[str]) -> None:
        self.uses: Counter[str] = Counter()
        self._functions, self._wanted = functions, wanted
        self._inside: list[str] = []

    def visit_FunctionDef(self, node: Function) -> None:
        self._inside.append(node.name)
        self.generic_visit(node)
        self._inside.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and node.id in self._functions:
            self._note(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load) and node.attr in self._wanted:
            self._note(node.attr)
        self.generic_visit(node)

    def _note(self, name: str) -> None:
        if name not in self._inside:
            self.uses[name] += 1
