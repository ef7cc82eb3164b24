"""patches/README.md and the hook modules say the same."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "patches" / "kvspec_patches"


def _constants(path: Path) -> dict[str, object]:
    """Module-level constants of a hook module, read without importing it."""
    values = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values[node.targets[0].id] = ast.literal_eval(node.value)
    return values


def _manifest() -> tuple[str, ...]:
    manifest = _constants_of_package()["MANIFEST"]
    assert isinstance(manifest, tuple)
    return manifest


def _constants_of_package() -> dict[str, object]:
    tree = ast.parse((PACKAGE / "registration.py").read_text())
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def test_every_hook_module_is_in_the_manifest() -> None:
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "registration"}
    assert set(_manifest()) == modules


def test_readme_has_one_row_a_module_with_its_symbol_and_scope() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "patches" / "README.md").read_text().splitlines()
        if line.startswith("| ") and not line.startswith("| module")
    ]
    assert [row[0] for row in rows] == list(_manifest())
    for name, symbol, scope, *_ in rows:
        constants = _constants(PACKAGE / f"{name}.py")
        assert str(constants["TARGET"]).endswith(symbol.strip("`"))
        assert constants["SCOPE"] == scope


def test_every_hook_says_version_and_end() -> None:
    for name in _manifest():
        doc = ast.get_docstring(ast.parse((PACKAGE / f"{name}.py").read_text())) or ""
        text = " ".join(doc.split())
        assert "0.5.17" in text, name
        assert "Remove when" in text, name
