"""Long prompts from real text: installed Python sources that the reference models were not trained
on."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

PACKAGES = ("networkx", "aiohttp")

# Lengths around the ends of one and of several pages, where off-by-one errors show.
_PAGE_EDGES = (127, 128, 129, 191, 192, 193, 1023, 1024, 1025, 2048, 4096)
_SPREAD_COUNT = 33
_SHORTEST, _LONGEST = 100, 6000


@dataclass(frozen=True)
class Prompt:
    """Token ids from the start of one source file. `name`: the file, with its package."""

    name: str
    input_ids: tuple[int, ...]


def prompt_lengths() -> tuple[int, ...]:
    """Return 44 lengths from 100 to 6000 tokens, in an order that mixes short and long ones."""
    ratio = (_LONGEST / _SHORTEST) ** (1 / (_SPREAD_COUNT - 1))
    spread = [round(_SHORTEST * ratio**step) for step in range(_SPREAD_COUNT)]
    ordered = sorted([*spread, *_PAGE_EDGES])
    # 17 and 44 have no common divisor, so every entry comes once, and neighbours are far apart.
    return tuple(ordered[step * 17 % len(ordered)] for step in range(len(ordered)))


def cut_prompts(model_folder: Path, lengths: Sequence[int]) -> tuple[Prompt, ...]:
    """Return one prompt for each of `lengths`, of exactly that many tokens, from distinct files.

    The same installed packages, tokenizer and lengths give the same prompts. Raises ValueError
    where the packages have too few long files.
    """
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    open_places = dict(enumerate(lengths))
    cut: dict[int, Prompt] = {}
    for name, token_ids in _tokenised_files(tokenizer):
        fitting = [place for place, length in open_places.items() if length <= len(token_ids)]
        if fitting:
            # Take the longest remaining length that fits, since long files are rarer than short
            # ones.
            place = max(fitting, key=lambda place: open_places[place])
            cut[place] = Prompt(name, tuple(token_ids[: open_places.pop(place)]))
        if not open_places:
            return tuple(cut[place] for place in range(len(lengths)))
    raise ValueError(
        f"no file of {', '.join(PACKAGES)} is left for prompts of {sorted(open_places.values())} "
        "tokens"
    )


def _tokenised_files(tokenizer: Tokenizer) -> Iterator[tuple[str, list[int]]]:
    """Yield source files as (name, token ids). The packages take turns, each in path order."""
    folders = [_package_folder(name) for name in PACKAGES]
    files = [sorted(folder.rglob("*.py")) for folder in folders]
    for position in range(max(map(len, files))):
        for folder, paths in zip(folders, files, strict=True):
            if position < len(paths):
                path = paths[position]
                token_ids = tokenizer.encode(path.read_text(encoding="utf-8")).ids
                yield str(path.relative_to(folder.parent)), token_ids


def source_path(name: str) -> Path:
    """Return the file that the prompt `name` was cut from."""
    return _package_folder(name.partition("/")[0]).parent / name


def _package_folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(f"prompts are cut from the sources of {package}, which is not installed")
    return Path(spec.origin).parent
