"""Presses of NVIDIA's kvpress as scorers."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch

from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.scorers.base import ALWAYS, About, Allocation, LayerChunk, Needs
from sglang_kvspec.scorers.press_layer import KEYS, QUERIES, PressLayer, layer_of

logger = logging.getLogger(__name__)

_FLAG = "--kvspec-compressor kvpress"
# Sizes of the random chunks with which a press is tried. Some presses need more tokens than a
# window.
_TRIED_TOKENS = (512, 4096)
# kvpress itself comes without its dependencies, see pyproject.toml.
_INSTALL = "pip install 'sglang-kvspec[kvpress]' && pip install --no-deps 'kvpress>=0.5.5,<0.6'"
_WORDS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True, slots=True)
class PressScorer:
    """Scorer by a ScorerPress of kvpress 0.5, called on the whole prompt with each chunk.

    press: class of the package kvpress, or MODULE.CLASS of another package. args: arguments of the
    press as name:value, joined with +. queries: newest queries that are kept for later chunks and
    shown to the press; 0 for all. seed: of random numbers that the press draws.

    Raises ConfigError where kvpress or the press is missing, and for a press that needs more than
    keys, values and queries.
    """

    about: ClassVar[About] = About(
        "the press's own; kvpress (Devoto et al., arXiv 2510.00636)",
        "tokens that a press of NVIDIA's kvpress scores highest",
        "the press's own, for the whole prompt with each chunk; queries of the prompt in memory",
    )
    needs: ClassVar[Needs] = Needs(rotary=True)
    allocation: ClassVar[Allocation] = "head"

    press: str = ""
    args: str = ""
    queries: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.queries < 0:
            raise ConfigError(f"{_FLAG}: queries must be 0 or more, got {self.queries}")
        projections_of(_find_press(self.press), self)

    def score(self, chunk: LayerChunk) -> torch.Tensor:
        """See Scorer. Where the press raises or returns other sizes, tokens keep their scores, and
        new ones get ALWAYS: such as a chunk behind a cached prefix, whose queries are unknown."""
        reads = projections_of(_find_press(self.press), self)
        queries = _known_queries(chunk, self.queries) if QUERIES in reads else None
        layer = layer_of(chunk, queries, KEYS in reads)
        unscored = chunk.keys.new_full(
            (chunk.keys.shape[1], len(chunk.queries)), ALWAYS, dtype=torch.float32
        )
        try:
            scores = scores_by(self, layer)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            _warn_once(self.press, type(error).__name__)
            return torch.cat((chunk.scores, unscored), dim=-1)
        return scores

    def make(self) -> Any:
        """Return a new press, so that none carries anything from one request to another."""
        found = _find_press(self.press)
        try:
            return found(**_arguments(self.args))
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"{_FLAG}:press={self.press} does not take args={self.args!r}: {error}"
            ) from error


@torch.no_grad()
def scores_by(
    scorer: PressScorer, layer: PressLayer, attentions: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the scores [num_kv_heads, num_tokens] float32 of a new press. Raises ValueError for
    other sizes and for a KV head without a number, and whatever the press raises."""
    press = scorer.make()
    with _seeded(scorer.seed + layer.module.layer_idx, layer.keys.device):
        scores = layer.scores_of(press, attentions)
    if scores.shape != layer.keys.shape[:3]:
        raise ValueError(f"scores of {list(layer.keys.shape[:3])} wanted, got {list(scores.shape)}")
    if bool(scores.isnan().all(-1).any()):
        raise ValueError("all scores of a KV head are NaN")
    # A press may divide by zero; a token without a score is read last.
    lowest = -float("inf")
    return scores[0].float().nan_to_num(nan=lowest, posinf=ALWAYS, neginf=lowest)


def _known_queries(chunk: LayerChunk, newest: int) -> torch.Tensor:
    """Return queries before the rotary embedding [n, num_heads, head_dim] up to the chunk's last,
    as far back as all are known. Notes those of the chunk for later chunks. newest: how many are
    wanted, 0 for all."""
    assert chunk.rotary is not None
    unrotated = chunk.rotary.unrotate(chunk.queries.float(), chunk.positions)
    # One tensor for each chunk, because requests with a common prefix share tensors.
    noted = {int(start): queries for start, queries in chunk.memory.items()}
    noted[chunk.start] = unrotated.to(chunk.queries.dtype)
    first, parts = chunk.end, []
    for start in sorted(noted, reverse=True):
        # Tokens between the notes and the chunk were generated, or another request computed them.
        if start + len(noted[start]) == first and (not newest or chunk.end - first < newest):
            first = start
            parts.append(noted[start])
    chunk.memory.clear()
    chunk.memory.update((str(start), noted[start]) for start in noted if start >= first)
    known = torch.cat(parts[::-1])
    return known[-newest:] if newest else known


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's random numbers for a while, and restore its generators of the CPU and of
    `device`: presses may draw without a seed, and ranks must agree."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@cache
def _warn_once(press: str, kind: str) -> None:
    logger.warning(
        "%s:press=%s raised %s and scored no tokens of a chunk; drafts read all of them",
        _FLAG,
        press,
        kind,
    )


# Checks at the start of a server


@cache
def projections_of(press_class: type, scorer: PressScorer) -> frozenset[str]:
    """Return the projections of hidden states that the scorer's press reads, by a trial on random
    tensors. press_class: class of the press, for the cache. Raises ConfigError for a press that
    fails."""
    press, base = scorer.make(), _find_class("kvpress.ScorerPress")
    if type(press).post_init_from_model is not base.post_init_from_model:
        raise _cannot_serve(scorer, "parameters that it takes from a model of transformers")
    for num_tokens in _TRIED_TOKENS:
        chunk = _random_chunk(num_tokens)
        layer = layer_of(chunk, chunk.queries, reads_keys=True)
        try:
            scores = scores_by(scorer, layer)
        except Exception as caught:
            error, lacking = caught, layer.lacking
            continue
        others = layer_of(chunk, chunk.queries, reads_keys=True, unread=1)
        if not torch.equal(scores, scores_by(scorer, others)):
            raise _cannot_serve(
                scorer, "hidden states themselves, or random numbers that are not torch's"
            )
        return frozenset(layer.used)
    raise _cannot_serve(scorer, _what_failed(scorer, error, lacking)) from error


def _what_failed(scorer: PressScorer, error: Exception, lacking: list[str]) -> str:
    """Return what a press needs that raised an error on random tensors."""
    if lacking:
        return f"{', '.join(dict.fromkeys(lacking))} of the attention layer"
    chunk = _random_chunk(_TRIED_TOKENS[0])
    size = (1, chunk.queries.shape[1], chunk.end, chunk.end)
    layer = layer_of(chunk, chunk.queries, reads_keys=True)
    try:
        scores_by(scorer, layer, torch.full(size, 1 / chunk.end))
    except Exception:
        return f"something else ({type(error).__name__}: {error})"
    return "the attention weights of all tokens"


def _cannot_serve(scorer: PressScorer, needed: str) -> ConfigError:
    return ConfigError(
        f"{_FLAG}:press={scorer.press} cannot serve: a server shows presses keys, values and "
        f"queries, and this press needs {needed}"
    )


class _Unrotated:
    """scorers.base.Rotary of a model that does not rotate."""

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return x

    unrotate = rotate


def _random_chunk(num_tokens: int, num_heads: int = 4, head_dim: int = 16) -> LayerChunk:
    draws = torch.Generator().manual_seed(0)
    size = (num_tokens, num_heads // 2, head_dim)
    return LayerChunk(
        layer=0,
        first_kv_head=0,
        start=0,
        prompt_len=num_tokens,
        queries=torch.randn((num_tokens, num_heads, head_dim), generator=draws),
        scale=head_dim**-0.5,
        keys=torch.randn(size, generator=draws),
        values=torch.randn(size, generator=draws),
        scores=torch.empty((num_heads // 2, 0)),
        memory={},
        rotary=_Unrotated(),
    )


# Presses by name


def _find_press(name: str) -> type:
    """Return the class of a press. Raises ConfigError if there is none."""
    if not name:
        raise ConfigError(f"{_FLAG} needs a press: write {_FLAG}:press=SnapKVPress")
    found = _find_class(name if "." in name else f"kvpress.{name}")
    base = _find_class("kvpress.ScorerPress")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{_FLAG}: press must be a ScorerPress of kvpress, got {name!r}")
    return found


def _find_class(path: str) -> Any:
    """Import MODULE.CLASS. Returns None for a class that the module does not have. Raises
    ConfigError for a module that cannot be imported."""
    module, _, name = path.rpartition(".")
    if sys.modules.get(module) is None:
        with _attention_functions_kept():
            _import(module)
    return getattr(sys.modules[module], name, None)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        if error.name == "kvpress":
            raise ConfigError(f"{_FLAG} needs the package kvpress: {_INSTALL}") from error
        raise ConfigError(f"{_FLAG}: cannot import {module}: {error}") from error


@contextmanager
def _attention_functions_kept() -> Iterator[None]:
    """Undo what kvpress does to transformers when imported: it wraps all attention functions, for
    models that transformers itself runs. SGLang may run some of these functions."""
    functions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    before = dict(functions)
    try:
        yield
    finally:
        functions.update(before)


def _arguments(text: str) -> dict[str, Any]:
    """Parse name:value+name:value. Raises ValueError for another form."""
    given: dict[str, Any] = {}
    for part in text.split("+") if text else ():
        name, colon, value = part.partition(":")
        if not (name and colon and value):
            raise ValueError(f"{part!r} is not name:value")
        given[name] = _value(value)
    return given


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
