"""Points to measure: a model, a context length and a number of requests at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SHAPES = Path(__file__).resolve().parent / "shapes"
# Models by their name on the command line and in figures. Each has only a config.json: weights are
# dummies.
DUMMY_MODELS = {"8b": SHAPES / "llama-8b", "32b": SHAPES / "qwen3-32b"}

# Stands for the concurrency that the server allows, known once it reports how many tokens fit.
MAX_CONCURRENCY = 0

# Text that is tokenized again may be a few tokens longer.
_SLACK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Model:
    """Model to serve. name: its name in figures. folder: folder with config.json. dummy: there are
    no weights."""

    name: str
    folder: Path
    dummy: bool

    @classmethod
    def find(cls, text: str) -> Model:
        """Find a model by a name of DUMMY_MODELS or by folder. Raises ValueError."""
        if text in DUMMY_MODELS:
            return cls(text, DUMMY_MODELS[text], dummy=True)
        folder = Path(text).resolve()
        if not (folder / "config.json").is_file():
            known = ", ".join(DUMMY_MODELS)
            raise ValueError(
                f"a model must be one of {known}, or a folder with a config.json, got {text!r}"
            )
        return cls(folder.name, folder, dummy=not any(folder.glob("*.safetensors")))

    def config(self, key: str) -> int:
        """Return a number of config.json."""
        return int(json.loads((self.folder / "config.json").read_text(encoding="utf-8"))[key])


@dataclass(frozen=True, slots=True)
class Point:
    """One point. concurrency: requests at a time, MAX_CONCURRENCY for as many as fit."""

    model: Model
    context_len: int
    concurrency: int

    @property
    def label(self) -> str:
        return label(self.model.name, self.context_len, self.concurrency)

    @property
    def seed(self) -> int:
        """Return the seed of this point's prompts. All systems get the same prompts, other points
        get different ones."""
        return (self.context_len * 1009 + self.concurrency) % 2**31

    def prompt_len(self, output_len: int) -> int:
        """Return the tokens of a prompt: the context length, or less if prompt and answer would not
        fit."""
        most = self.model.config("max_position_embeddings") - output_len - _SLACK_TOKENS
        return min(self.context_len, most)


def parse_points(texts: Sequence[str]) -> list[Point]:
    """Parse MODEL:CONTEXT:CONCURRENCY[,CONCURRENCY...], such as 8b:32k:1,16,max. Drop duplicates,
    and group points by model.

    Raises ValueError with the form of a point.
    """
    points = []
    for text in texts:
        try:
            name, context, concurrencies = text.rsplit(":", 2)
            context_len = _tokens(context)
            counts = [_concurrency(count) for count in concurrencies.split(",")]
        except ValueError:
            raise ValueError(
                "a point must have the form MODEL:CONTEXT:CONCURRENCY[,...], such as "
                f"8b:32k:1,16,max, got {text!r}"
            ) from None
        model = Model.find(name)
        points += [Point(model, context_len, count) for count in counts]
    models = list(dict.fromkeys(point.model for point in points))
    return sorted(dict.fromkeys(points), key=lambda point: models.index(point.model))


def label(model: str, context_len: int, concurrency: int | None = None) -> str:
    """Return the name of a point in figures: 8b.32k.bs16, or 8b.32k without concurrency."""
    whole = context_len % 1024 == 0
    name = f"{model}.{context_len // 1024}k" if whole else f"{model}.{context_len}"
    if concurrency is None:
        return name
    return f"{name}.max" if concurrency == MAX_CONCURRENCY else f"{name}.bs{concurrency}"


def _tokens(text: str) -> int:
    count = int(text[:-1]) * 1024 if text.lower().endswith("k") else int(text)
    if count < 1:
        raise ValueError(text)
    return count


def _concurrency(text: str) -> int:
    if text == "max":
        return MAX_CONCURRENCY
    count = int(text)
    if count < 1:
        raise ValueError(text)
    return count
