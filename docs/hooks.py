"""Show plots of benchmarks/results and examples in the site, by the paths that the repository has.

A page names a plot as ../../benchmarks/results/NAME.png, which works where Markdown is read in the
repository. MkDocs serves files of docs/ alone, so the plots are added under assets/.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
_PLOT = re.compile(r"\((?:\.\./)+(benchmarks/results|examples)/([\w-]+\.png)\)")


def on_files(files: Files, config: Any) -> Files:
    for folder in ("benchmarks/results", "examples"):
        for path in sorted((ROOT / folder).glob("*.png")):
            plot = File.generated(config, f"assets/{path.name}", abs_src_path=str(path))
            files.append(plot)
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    up = "../" * page.file.src_uri.count("/")
    return _PLOT.sub(rf"({up}assets/\2)", markdown)
