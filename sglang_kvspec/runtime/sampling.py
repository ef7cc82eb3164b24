"""Conversion of logits to the target: penalties, masks, bias, temperature, filters, noise.

The order and the formulas are those of SGLang's own sampler, so that a request sees the same target
with and without KVSpec. Every function handles rows of one request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import torch

TOP_K_ALL = 1 << 30


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request; defaults change nothing. stop_tokens: forbidden until
    min_new_tokens tokens were emitted. seed: None draws from the server's generator."""

    temperature: float = 1.0
    top_k: int = TOP_K_ALL
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop_tokens: frozenset[int] = frozenset()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.top_k <= 1

    @property
    def is_argmax(self) -> bool:
        """Return True if the chosen token is that of the model's largest unadjusted logit."""
        return self.is_greedy and not self.depends_on_output and not self.logit_bias

    @property
    def depends_on_output(self) -> bool:
        return (
            self.frequency_penalty != 0
            or self.presence_penalty != 0
            or self.repetition_penalty != 1
            or self.min_new_tokens > 0
        )


def adjust_logits(
    logits: torch.Tensor,
    params: SamplingParams,
    output: Sequence[int],
    drafts: Sequence[int],
    masks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply penalties, grammar masks and bias to logits [n, vocab]. Return new fp32 logits.

    Row j follows `output` and drafts[:j]. masks: [n, vocab] bool, True where a token is allowed.
    """
    logits = logits.float().clone()
    if params.depends_on_output:
        seen = Counter(output)
        for row, after in zip(logits, [None, *drafts], strict=False):
            if after is not None:
                seen[after] += 1
            _penalise(row, params, seen)
    if masks is not None:
        logits.masked_fill_(~masks, float("-inf"))
    if params.logit_bias:
        tokens = torch.tensor(list(params.logit_bias), device=logits.device)
        bias = torch.tensor(list(params.logit_bias.values()), device=logits.device)
        logits[:, tokens] += bias
    return logits


def _penalise(row: torch.Tensor, params: SamplingParams, seen: Counter[int]) -> None:
    """Apply penalties to one row [vocab] in place. seen: how often each token was emitted before
    it."""
    if seen:
        tokens = torch.tensor(list(seen), device=row.device)
        counts = torch.tensor(list(seen.values()), dtype=torch.float32, device=row.device)
        row[tokens] -= params.frequency_penalty * counts + params.presence_penalty
    if sum(seen.values()) < params.min_new_tokens and params.stop_tokens:
        row[torch.tensor(sorted(params.stop_tokens), device=row.device)] = float("-inf")
    if seen and params.repetition_penalty != 1:
        values = row[tokens]
        scale = params.repetition_penalty
        row[tokens] = torch.where(values < 0, values * scale, values / scale)


def num_sound_rows(logits: torch.Tensor, params: SamplingParams) -> int:
    """Return the number of rows of adjusted logits [n, vocab] before the first row without a
    choice.

    The largest logit of such a row is not finite: the row holds NaN or inf, or every token in it is
    masked. Sampled requests divide by the temperature, which may overflow.
    """
    largest = logits.amax(-1)
    return num_finite(largest if params.is_greedy else largest / params.temperature)


def num_finite(largest: torch.Tensor) -> int:
    """Return the number of values in `largest` [n] before the first that is not finite."""
    sound = torch.isfinite(largest).tolist()
    return len(sound) if all(sound) else sound.index(False)


def logprobs_of(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the log-probabilities that SGLang reports: after temperature, before top-k, top-p and
    min-p."""
    return torch.log_softmax(logits / params.temperature, dim=-1)


def distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the distribution that tokens are drawn from: [n, vocab] fp32, rows sum to 1.

    Filters see the unfiltered probabilities in descending order, as in SGLang's torch sampler. A
    token stays if it is among the top k and the mass before it is at most top_p. It must also have
    at least min_p of the most likely token's probability.
    """
    probs = torch.softmax(logits / params.temperature, dim=-1)
    if params.top_k >= probs.shape[-1] and params.top_p >= 1 and params.min_p <= 0:
        return probs
    ordered, tokens = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    keep = before <= params.top_p
    keep &= torch.arange(probs.shape[-1], device=probs.device) < params.top_k
    keep &= ordered >= ordered[:, :1] * params.min_p
    kept = torch.zeros_like(probs).scatter_(-1, tokens, ordered * keep)
    return kept / kept.sum(dim=-1, keepdim=True)


def choose_with_noise(probs: torch.Tensor, seed: int, first_position: int) -> list[int]:
    """Draw one token per row of probs [n, vocab], with Gumbel noise that seed and position fix.

    Row j is the token at first_position + j. Equal distributions give equal tokens in every batch
    and every call. So a draft agrees with the target unless their distributions differ enough to
    change the token, and a seeded request repeats itself exactly.
    """
    chosen = []
    for row, p in enumerate(probs):
        generator = torch.Generator().manual_seed(_noise_seed(seed, first_position + row))
        uniform = torch.rand(p.shape, generator=generator, dtype=torch.float64)
        gumbel = -torch.log(-torch.log(uniform.clamp_min(torch.finfo(torch.float64).tiny)))
        chosen.append(int(torch.argmax(p.double().log().cpu() + gumbel)))
    return chosen


def _noise_seed(seed: int, position: int) -> int:
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
