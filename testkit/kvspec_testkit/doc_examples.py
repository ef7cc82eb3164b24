"""Code of the documentation's pages as modules, so that tests can run it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

CONTRIBUTING = Path(__file__).resolve().parents[2] / "docs" / "contributing"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def load_example(page: str) -> ModuleType:
    """Return the example of a page in docs/contributing as one module.

    The example is the block that begins with a module's docstring, and later blocks that begin with
    a class. Raises ValueError if the page has no example.
    """
    blocks = _BLOCK.findall((CONTRIBUTING / page).read_text(encoding="utf-8"))
    parts: list[str] = []
    for block in blocks:
        if block.startswith('"""') or (parts and block.startswith("class ")):
            parts.append(block)
    if not parts:
        raise ValueError(f"{page} has no Python block that begins with a docstring")
    name = f"example_of_{Path(page).stem.replace('-', '_')}"
    module = ModuleType(name)
    # Dataclasses and reference modules of codecs are looked up by this name.
    sys.modules[name] = module
    exec(compile("\n\n".join(parts), page, "exec"), module.__dict__)
    return module
