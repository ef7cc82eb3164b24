"""Presses of kvpress as scorers give what kvpress gives in a layer of transformers.

Skipped without kvpress, see docs/guides/kvpress.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.scorers.base import ALWAYS, LayerChunk
from sglang_kvspec.scorers.press import PressScorer

kvpress = pytest.importorskip("kvpress")
llama = pytest.importorskip("transformers.models.llama.modeling_llama")
qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")

TOKENS, LAYER = 300, 1
SIZES = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
}
# By class, arguments of the press.
PRESSES: list[tuple[str, dict[str, Any]]] = [
    ("CURPress", {}),
    ("CapPress", {}),
    ("CompactorPress", {"compression_ratio": 0.5, "chunk_size": 64, "sketch_dimension": 8}),
    ("ExpectedAttentionPress", {}),
    ("ExpectedAttentionPress", {"use_covariance": False, "n_sink": 2, "epsilon": 0.01}),
    ("KeyDiffPress", {}),
    ("KnormPress", {}),
    ("LagKVPress", {"lag_size": 32}),
    ("LeverageScorePress", {"sketch_dimension": 8}),
    ("NonCausalAttnPress", {"chunk_size": 64}),
    ("PyramidKVPress", {"window_size": 16}),
    ("RandomPress", {}),
    ("RandomPress", {"seed": 7}),
    ("SnapKVPress", {}),
    ("SnapKVPress", {"window_size": 32, "kernel_size": 7}),
    ("StreamingLLMPress", {"compression_ratio": 0.5}),
    ("TOVAPress", {}),
]
# Presses that read queries, and that take fewer queries than keys.
OF_NEWEST = [("SnapKVPress", {}), ("TOVAPress", {})]
each_press = pytest.mark.parametrize(
    ("name", "args"), PRESSES, ids=lambda part: part if isinstance(part, str) else ""
)


class LayerRotary:
    """scorers.base.Rotary by the rotary embedding of a model of transformers."""

    def __init__(self, embedding: Any) -> None:
        self.embedding = embedding

    def rotate(self, x: torch.Tensor, positions: torch.Tensor, sign: int = 1) -> torch.Tensor:
        cos, sin = (part[0][:, None] for part in self.embedding(x, positions[None]))
        return x * cos + sign * llama.rotate_half(x) * sin

    def unrotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.rotate(x, positions, -1)


@dataclass
class Attention:
    """An attention layer of transformers with hidden states [1, TOKENS, hidden_size], and queries,
    keys and values [1, heads, TOKENS, head_dim] that it makes of them."""

    module: Any
    hidden: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    embeddings: tuple[torch.Tensor, torch.Tensor]

    def direct(self, name: str, args: dict[str, Any], seed: int) -> torch.Tensor:
        """Return what the press returns inside of transformers, [num_kv_heads, TOKENS]."""
        press = getattr(kvpress, name)(**args)
        torch.manual_seed(seed)
        kwargs = {"position_embeddings": self.embeddings}
        return press.score(self.module, self.hidden, self.keys, self.values, None, kwargs)[0]

    def served(self, scorer: PressScorer, ends: list[int], cached: int = 0) -> torch.Tensor:
        """Return the scores after chunks that end at `ends`."""
        queries, keys, values = (
            part[0].transpose(0, 1) for part in (self.queries, self.keys, self.values)
        )
        scores, memory, start = torch.full((keys.shape[1], cached), ALWAYS), {}, cached
        for end in ends:
            chunk = LayerChunk(
                layer=LAYER,
                first_kv_head=0,
                start=start,
                prompt_len=end,
                queries=queries[start:end],
                scale=self.module.scaling,
                keys=keys[:end],
                values=values[:end],
                scores=scores,
                memory=memory,
                rotary=LayerRotary(self.module.rotary_emb),
            )
            scores, start = scorer.score(chunk), end
        return scores


def make_attention(family: Any, config: Any, attention: str, embedding: str) -> Attention:
    torch.manual_seed(2)
    with torch.no_grad():
        module = getattr(family, attention)(config, LAYER)
        module.rotary_emb = getattr(family, embedding)(config)
        hidden = torch.randn(1, TOKENS, config.hidden_size) * 3
        shape = (1, TOKENS, -1, config.head_dim)
        queries, keys, values = (
            project(hidden).view(shape).transpose(1, 2)
            for project in (module.q_proj, module.k_proj, module.v_proj)
        )
        if hasattr(module, "q_norm"):
            queries, keys = module.q_norm(queries), module.k_norm(keys)
        embeddings = module.rotary_emb(hidden, torch.arange(TOKENS)[None])
        queries, keys = family.apply_rotary_pos_emb(queries, keys, *embeddings)
    return Attention(module, hidden, queries, keys, values, embeddings)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def attention(request: pytest.FixtureRequest) -> Attention:
    if request.param == "llama":
        from transformers import LlamaConfig

        config = LlamaConfig(**SIZES)
        return make_attention(llama, config, "LlamaAttention", "LlamaRotaryEmbedding")
    from transformers import Qwen3Config

    return make_attention(qwen3, Qwen3Config(**SIZES), "Qwen3Attention", "Qwen3RotaryEmbedding")


def make(name: str, args: dict[str, Any], **options: int) -> PressScorer:
    text = "+".join(f"{key}:{value}" for key, value in args.items())
    return PressScorer(press=name, args=text, **options)


@each_press
@torch.no_grad()
def test_a_scorer_gives_what_its_press_gives_in_transformers(attention, name, args):
    served = attention.served(make(name, args, seed=5), [TOKENS])
    torch.testing.assert_close(served, attention.direct(name, args, 5 + LAYER))


@each_press
@torch.no_grad()
def test_chunks_of_the_prompt_give_the_same(attention, name, args):
    served = attention.served(make(name, args, seed=5), [90, 200, 299, TOKENS])
    torch.testing.assert_close(served, attention.direct(name, args, 5 + LAYER))


@pytest.mark.parametrize(("name", "args"), OF_NEWEST)
@torch.no_grad()
def test_presses_of_the_newest_queries_need_no_others(attention, name, args):
    direct = attention.direct(name, args, 0)
    cached = attention.served(make(name, args), [220, TOKENS], cached=200)
    torch.testing.assert_close(cached, direct)
    kept = attention.served(make(name, args, queries=65), [220, TOKENS])
    torch.testing.assert_close(kept, direct)


@torch.no_grad()
def test_behind_a_cached_prefix_expected_attention_expects_the_next_positions(attention):
    name, args = "ExpectedAttentionPress", {"n_sink": 0}
    served = attention.served(make(name, args), [TOKENS], cached=200)
    # kvpress itself, shown the newest tokens only, takes them for the first positions.
    module, press = attention.module, kvpress.ExpectedAttentionPress(**args)
    rotary = LayerRotary(module.rotary_emb)
    queries = rotary.unrotate(attention.queries[0].transpose(0, 1), torch.arange(TOKENS))
    later = SimpleNamespace(
        config=module.config,
        head_dim=module.head_dim,
        q_proj=lambda hidden: hidden,
        rotary_emb=lambda x, ids: module.rotary_emb(x, ids + 200),
    )
    newest = queries[200:].flatten(1)[None]
    direct = press.score(later, newest, attention.keys, attention.values, None, {})
    torch.testing.assert_close(served, direct[0])


@pytest.mark.parametrize(
    ("name", "args"), [("CompactorPress", {}), ("NonCausalAttnPress", {"chunk_size": 64})]
)
@torch.no_grad()
def test_presses_of_all_queries_leave_a_prompt_with_a_cached_prefix_unscored(attention, name, args):
    assert (attention.served(make(name, args), [TOKENS], cached=100) == ALWAYS).all()


@pytest.mark.parametrize("name", ["ExpectedAttentionPress", "CapPress"])
@torch.no_grad()
def test_a_mean_of_no_queries_leaves_the_prompt_unscored(attention, name):
    """These presses leave out the first four queries that they are shown."""
    scorer = make(name, {})
    assert (attention.served(scorer, [TOKENS], cached=TOKENS - 4) == ALWAYS).all()
    assert (attention.served(scorer, [TOKENS], cached=TOKENS - 5) != ALWAYS).all()


@torch.no_grad()
def test_a_prompt_within_the_window_is_unscored(attention):
    assert (attention.served(make("SnapKVPress", {}), [60]) == ALWAYS).all()


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("ExpectedAttentionStatsPress", "parameters that it takes from a model of transformers"),
        ("KVzapPress", "parameters that it takes from a model of transformers"),
        ("ObservedAttentionPress", "the attention weights of all tokens"),
        ("QFilterPress", "parameters that it takes from a model of transformers"),
    ],
)
def test_presses_that_need_more_are_refused(name, needed):
    with pytest.raises(ConfigError, match=f"press={name} cannot serve: .* needs {needed}"):
        PressScorer(press=name)


@pytest.mark.parametrize("name", ["AdaKVPress", "ChunkKVPress", "KVzipPress", "FinchPress"])
def test_presses_that_are_no_scorers_are_refused(name):
    with pytest.raises(ConfigError, match=f"must be a ScorerPress of kvpress, got '{name}'"):
        PressScorer(press=name)
