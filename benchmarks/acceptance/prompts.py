"""Prompts outside the models' training data: windows of installed networkx and aiohttp sources, or
of this project's pages for a model of English."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

PACKAGES = ("networkx", "aiohttp")
# Begins a document, for all models here.
BOS = 0
ROOT = Path(__file__).resolve().parents[2]

# Files by the name of their source, in order.
Sources = Mapping[str, Sequence[Path]]


def package_sources() -> Sources:
    """Return the Python files of PACKAGES. Raises ValueError if one is not installed."""
    return {name: sorted(_folder_of(name).rglob("*.py")) for name in PACKAGES}


def english_pages() -> Sources:
    """Return the pages of this project."""
    patterns = ("LICENSE", "*.md", "[!.]*/README.md", "docs/**/*.md")
    return {"pages": [page for pattern in patterns for page in sorted(ROOT.glob(pattern))]}


TEXTS: Mapping[str, Callable[[], Sources]] = {"code": package_sources, "english": english_pages}


def cut_prompts(
    model_folder: Path, count: int, length: int, seed: int = 0, text: str = "code"
) -> tuple[torch.Tensor, dict[str, int]]:
    """Return `count` distinct prompts [count, length] int64, and how many come from each source.

    text: a name of TEXTS. The files of a source are joined in order and cut into windows of
    length - 1 tokens. Windows overlap as little as the text allows. Each gets a BOS in front; all
    are shuffled with `seed`. The same files, tokenizer and arguments give the same prompts. Raises
    ValueError if there is too little text.
    """
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    streams = {name: _tokens_of(files, tokenizer) for name, files in TEXTS[text]().items()}
    total = sum(len(stream) for stream in streams.values())
    window = length - 1
    # A stride shorter than the window lets neighbours overlap where the text is short.
    stride = min(window, (total - window * len(streams)) // max(count, 1))
    if stride < window // 5:
        raise ValueError(
            f"{count} prompts of {length} tokens need more source text than the {total} tokens of "
            f"{', '.join(streams)}: ask for fewer or shorter prompts"
        )
    windows = [
        (name, [BOS, *stream[start : start + window]])
        for name, stream in streams.items()
        for start in range(0, len(stream) - window + 1, stride)
    ]
    random.Random(seed).shuffle(windows)
    chosen = windows[:count]
    assert len(chosen) == count, (len(chosen), count)
    sources = {name: sum(1 for got, _ in chosen if got == name) for name in streams}
    return torch.tensor([tokens for _, tokens in chosen]), sources


def even_lengths(count: int, shortest: int, longest: int) -> list[int]:
    """Return `count` lengths from the shortest to the longest, in even steps."""
    step = (longest - shortest) / max(count - 1, 1)
    return [shortest + round(i * step) for i in range(count)]


def _folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(
            f"prompts are cut from the sources of {package}, which is not installed: install "
            f"{package}"
        )
    return Path(spec.origin).parent


def _tokens_of(files: Sequence[Path], tokenizer: Tokenizer) -> list[int]:
    texts = [path.read_text(encoding="utf-8") for path in files]
    return [token for got in tokenizer.encode_batch(texts) for token in got.ids]
