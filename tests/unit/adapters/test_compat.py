"""Every name that adapters/compat takes from SGLang exists, and compat adds no names."""

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
def test_a_topic_says_why_and_only_imports(topic: str) -> None:
    tree = ast.parse((FOLDER / f"{topic}.py").read_text())
    assert ast.get_docstring(tree)
    *imports, names = tree.body[1:]
    assert all(isinstance(node, ast.ImportFrom) for node in imports)
    assert isinstance(names, ast.Assign)
    assert ast.unparse(names.targets[0]) == "__all__"
