"""DuoAttention: some heads read everything, all others only the first and the newest tokens."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.seams import SCORERS
from sglang_kvspec.scorers.base import ALWAYS, About, Allocation, LayerChunk, Needs
from sglang_kvspec.scorers.options import require, require_file


@dataclass(frozen=True, slots=True)
class DuoAttention:
    """Scorer by KV heads: all tokens of retrieval heads; the first and the newest of others.

    Source: Xiao et al., "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and
    Streaming Heads", arXiv 2410.10819, section 2. With a budget, streaming heads also read the
    newest tokens that the budget pays for.

    file: JSON {"retrieval": [[number, ...], ...]}, a number for each layer and each KV head of the
    model, larger for heads that need all tokens; read once in a process. share: share of the
    model's KV heads that are retrieval heads, those with the largest numbers. sinks, recent: first
    and newest tokens of a prompt that streaming heads always read.
    """

    about: ClassVar[About] = About(
        "DuoAttention (Xiao et al., arXiv 2410.10819, section 2)",
        "all tokens for retrieval heads; the first and the newest for all others",
        "none; calibration once a model",
    )
    needs: ClassVar[Needs] = Needs(earlier=False)
    allocation: ClassVar[Allocation] = "head"
    keeps_whole_heads: ClassVar[bool] = True

    file: str = ""
    share: float = 0.5
    sinks: int = 16
    recent: int = 64

    def __post_init__(self) -> None:
        """Raises ConfigError without a file, and for a file in another form."""
        require_file("duo", self.file, "benchmarks/calibrate_duo.py")
        require(0 <= self.share <= 1, "duo", "share", self.share, "between 0 and 1")
        require(self.sinks >= 0, "duo", "sinks", self.sinks, "0 or more")
        require(self.recent >= 0, "duo", "recent", self.recent, "0 or more")
        _retrieval_heads(self.file, self.share)

    def score(self, chunk: LayerChunk) -> torch.Tensor:
        """Return scores as Scorer says. Raises ConfigError for a file of another model."""
        keys = chunk.keys
        positions = torch.arange(chunk.end, dtype=torch.float32, device=keys.device)
        # Heads do not compete, so that positions alone put the newest of a head's tokens first.
        scores = positions.repeat(keys.shape[1], 1)
        scores[:, : self.sinks] = ALWAYS
        scores[:, max(0, chunk.end - self.recent) :] = ALWAYS
        for head, is_retrieval in enumerate(self._is_retrieval(chunk)):
            if is_retrieval:
                scores[head] = ALWAYS
        return scores

    def _is_retrieval(self, chunk: LayerChunk) -> tuple[bool, ...]:
        """Return for each KV head of the chunk whether it is a retrieval head."""
        layers = _retrieval_heads(self.file, self.share)
        stop = chunk.first_kv_head + chunk.keys.shape[1]
        if chunk.layer >= len(layers) or stop > len(layers[0]):
            raise ConfigError(
                f"{SCORERS.flag} duo:file={self.file} is of another model: layer {chunk.layer} and "
                f"{stop} KV heads are needed"
            )
        return layers[chunk.layer][chunk.first_kv_head : stop]


@cache
def _retrieval_heads(file: str, share: float) -> tuple[tuple[bool, ...], ...]:
    """Return which KV heads of each layer are retrieval heads. Among equal numbers, heads of
    earlier layers are."""
    values = _read_values(file)
    num_heads = len(values[0])
    flat = [value for layer in values for value in layer]
    # Python's sort is stable.
    order = sorted(range(len(flat)), key=lambda head: -flat[head])
    chosen = set(order[: round(share * len(flat))])
    return tuple(
        tuple(layer * num_heads + head in chosen for head in range(num_heads))
        for layer in range(len(values))
    )


def _read_values(file: str) -> list[list[float]]:
    """Return the numbers of all layers and KV heads of a calibration."""
    place = f"{SCORERS.flag} duo:file={file}"
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{place} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{place} is not JSON: {error}") from error
    values: Any = found.get("retrieval") if isinstance(found, dict) else None
    if not _is_table(values):
        raise ConfigError(
            f'{place} must be {{"retrieval": [[number, ...], ...]}} with one number for each layer '
            "and KV head"
        )
    return [[float(value) for value in layer] for layer in values]


def _is_table(values: Any) -> bool:
    """Return whether values are lists of finite numbers, of one length that is not 0."""
    return (
        isinstance(values, list)
        and all(isinstance(layer, list) for layer in values)
        and len({len(layer) for layer in values}) == 1
        and len(values[0]) > 0
        and all(
            isinstance(value, int | float) and math.isfinite(value)
            for layer in values
            for value in layer
        )
    )
