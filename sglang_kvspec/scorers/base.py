"""The interface of a scorer: how much each token of a prompt is worth to drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch

from sglang_kvspec.core.compressor import Allocation

# Score of tokens that drafts read in any case: a scorer sets it, and tokens that no scorer has seen
# have it.
ALWAYS = float("inf")

# Scorers import Allocation from here, too.
__all__ = ["ALWAYS", "About", "Allocation", "LayerChunk", "Needs", "Rotary", "Scorer"]


class About(NamedTuple):
    """Description of a scorer for `sglang-kvspec compressors`. paper: authors' name of the method,
    with a reference. keeps: which tokens. cost: of scoring, beyond a plain prefill."""

    paper: str
    keeps: str
    cost: str


class Needs(NamedTuple):
    """Inputs of a scorer beyond keys, values and queries, each at a cost.

    earlier: the scores of tokens before the chunk. They are kept for each page of the KV cache. A
    scorer that scores all tokens anew in every chunk sets it False.
    hidden: inputs of attention layers. rotary: the rotary position embedding. repeats: chunks in
    which the model reads the prompt a second time (KVzip, section 3). drafting: chunks of verified
    tokens, for a scorer that changes its scores while the request generates.
    """

    earlier: bool = True
    hidden: bool = False
    rotary: bool = False
    repeats: bool = False
    drafting: bool = False


class Rotary(Protocol):
    """Rotary position embedding of a model, linear in x.

    x: [n, heads, head_dim] of any dtype, which the result has, and with any number of heads.
    positions: [n] int64, also beyond the model's context length, as scorers look ahead.
    """

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return x at these positions."""

    def unrotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return what rotate() was given."""


@dataclass(slots=True)
class LayerChunk:
    """Consecutive tokens of one request in one attention layer, and all tokens before them.

    layer: index among the rank's attention layers. first_kv_head: number of the rank's first KV
    head among all of the model. start: position of the chunk's first token.
    prompt_len: tokens of the prompt that have KV so far; less than start + n where the chunk
    repeats the prompt or is generated.
    queries: [n, num_heads, head_dim], unscaled, behind the rotary embedding.
    scale: factor of products of queries and keys.
    keys, values: [start + n, num_kv_heads, head_dim], at the target precision; on a GPU with the
    target int8, those of tokens before the chunk as drafts read them.
    scores: [num_kv_heads, start] float32 that score() returned last, ALWAYS for tokens that it has
    not seen, such as a cached prefix, and for all unless Needs asks for them. Read-only.
    memory: what the scorer notes for later chunks of this request and layer; empty at first.
    hidden [n, hidden_size], rotary: as far as Needs asks for them; hidden is None for verified
    tokens.
    """

    layer: int
    first_kv_head: int
    start: int
    prompt_len: int
    queries: torch.Tensor
    scale: float
    keys: torch.Tensor
    values: torch.Tensor
    scores: torch.Tensor
    memory: dict[str, torch.Tensor]
    hidden: torch.Tensor | None = None
    rotary: Rotary | None = None

    @property
    def end(self) -> int:
        """Position behind the chunk's last token."""
        return self.start + len(self.queries)

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the chunk's tokens, [n] int64."""
        return torch.arange(self.start, self.end, device=self.queries.device)


class Scorer(Protocol):
    """Rule that tells which tokens of a prompt drafts read. Registered in the entry-point group
    `sglang_kvspec.scorers` as a frozen dataclass. Its fields, each an int, float or str with a
    default, are the options that `--kvspec-compressor` takes.

    A scorer may be wrong about everything: drafts are verified against all tokens. It holds no
    state, decides by its chunk alone and draws no unseeded random numbers, so that all ranks agree.

    A scorer that gives all tokens of some heads ALWAYS declares `keeps_whole_heads = True`. Heads
    that read the same pages would read all of them.
    """

    about: ClassVar[About]
    needs: ClassVar[Needs]
    allocation: ClassVar[Allocation]

    def score(self, chunk: LayerChunk) -> torch.Tensor:
        """Return the scores [num_kv_heads, chunk.end] float32, on the chunk's device, of all tokens
        up to the chunk's last; larger ones are read first. ALWAYS: read in any case; -inf: only if
        nothing else is left. Tokens before the chunk may get new scores. Changes chunk.memory only.

        chunk: the tokens of a prefill, of which long prompts have several in order; then, as far as
        `needs` asks, repeats of the prompt and verified tokens. Of repeats, the scores of the first
        prompt_len tokens count.
        """
