"""Every name that adapters/compat takes from SGLang exists, and compat adds little to them."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "sglang_kvspec" / "adapters" / "compat"
TOPICS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("topic", TOPICS)
def test_names_of_a_topic_exist(topic: str) -> None:
    module = import_module(f"sglang_kvspec.adapters.compat.{topic}")
    for name in module.__all__:
        assert getattr(module, name) is not None


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_says_why_and_only_imports_or_chooses(topic: str) -> None:
    """A module imports names. Where releases differ, it chooses once: between two imports, or
    between two functions."""
    tree = ast.parse((FOLDER / f"{topic}.py").read_text())
    assert ast.get_docstring(tree)
    for node in tree.body[1:]:
        if isinstance(node, ast.Try):
            (handler,) = node.handlers
            assert all(isinstance(each, ast.ImportFrom) for each in (*node.body, *handler.body))
        elif isinstance(node, ast.If):
            chosen = [each for (each,) in (node.body, node.orelse)]
            assert all(isinstance(each, ast.FunctionDef) for each in chosen)
            assert len({each.name for each in chosen}) == 1
        elif isinstance(node, ast.Assign):
            assert ast.unparse(node.targets[0]) == "__all__"
        else:
            is_probe = isinstance(node, ast.FunctionDef) and node.name.startswith("_")
            assert is_probe or isinstance(node, ast.ImportFrom), ast.unparse(node)
