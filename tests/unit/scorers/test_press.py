"""Presses as scorers, with a small package in place of kvpress. test_kvpress.py runs kvpress."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.seams import SCORERS
from sglang_kvspec.scorers.base import ALWAYS, LayerChunk
from sglang_kvspec.scorers.press import PressScorer
from sglang_kvspec.scorers.press_layer import cos_sin, half_split_order

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8

PACKAGE = '''
"""Presses as those of kvpress."""
import random
from dataclasses import dataclass

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

for name, function in list(ALL_ATTENTION_FUNCTIONS.items()):
    ALL_ATTENTION_FUNCTIONS[name] = lambda *args, **named: None

@dataclass
class ScorerPress:
    compression_ratio: float = 0.0
    def __post_init__(self):
        assert 0 <= self.compression_ratio < 1, "compression_ratio must be in 0 .. 1"
    def post_init_from_model(self, model):
        pass

@dataclass
class SumPress(ScorerPress):
    weight: float = 1.0
    absolute: bool = False
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        sums = keys.sum(-1) * self.weight + module.layer_idx
        return sums.abs() if self.absolute else sums

@dataclass
class LastQueryPress(ScorerPress):
    """Products of the newest query and all keys, and of the query at the next position."""
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        heads = module.config.num_attention_heads
        last = module.q_proj(hidden_states[:, -1:]).view(1, heads, module.head_dim)
        now = [part[0, -1] for part in kwargs["position_embeddings"]]
        ids = torch.tensor([[hidden_states.shape[1]]])
        later = [part[0, 0] for part in module.rotary_emb(keys, ids)]
        first, second = last.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        queries = [last * cos + turned * sin for cos, sin in (now, later)]
        repeated = keys.repeat_interleave(module.num_key_value_groups, 1)
        products = sum(torch.einsum("bhd,bhnd->bhn", query, repeated) for query in queries)
        return products.unflatten(1, (keys.shape[1], -1)).mean(2) / module.head_dim**0.5

@dataclass
class MeanQueryPress(ScorerPress):
    """Products of keys and the mean of all queries, both before the rotary embedding."""
    minimum: int = 1
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        n = hidden_states.shape[1]
        assert n >= self.minimum, "too few queries"
        queries = module.q_proj(hidden_states).view(1, n, keys.shape[1], -1, module.head_dim)
        plain = module.k_proj(hidden_states).view(1, n, keys.shape[1], module.head_dim)
        return torch.einsum("bhd,bnhd->bhn", queries.mean((1, 3)), plain)

class DrawingPress(ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return torch.rand(keys.shape[:3])

class NaNPress(ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return keys.sum(-1).log()

@dataclass
class NaNHeadPress(ScorerPress):
    tokens: int = 60
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        scores = keys.sum(-1)
        if keys.shape[2] < self.tokens:
            scores[:, 1] = float("nan")
        return scores

class OtherDrawingPress(ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return keys.sum(-1) * random.random()

class HiddenPress(ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return hidden_states.norm(dim=-1)[:, None].expand(keys.shape[:3])

class WeightsPress(ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return (values @ module.o_proj.weight).norm(dim=-1)

class ConfigPress(ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return keys[..., 0] * module.config.hidden_size

class AttentionsPress(ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return attentions.sum(2).unflatten(1, (keys.shape[1], -1)).mean(2)

class ShortPress(ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return keys[:, :, 1:].sum(-1)

class TrainedPress(SumPress):
    def post_init_from_model(self, model):
        self.weight = model.weight

class OtherPress:
    pass
'''


@dataclass
class Rotary:
    """scorers.base.Rotary by angles. dim: channels that are rotated, the first ones. halves: pairs
    are channels i and i + dim / 2; otherwise neighbours."""

    dim: int = HEAD_DIM
    halves: bool = True

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None, None] * 10.0 ** -torch.arange(self.dim // 2)
        out = x.clone()
        pairs = out[..., : self.dim]
        pairs = pairs.unflatten(-1, (2, -1) if self.halves else (-1, 2))
        if not self.halves:
            pairs = pairs.transpose(-1, -2)
        first, second = pairs[..., 0, :].clone(), pairs[..., 1, :].clone()
        pairs[..., 0, :] = first * angles.cos() - second * angles.sin()
        pairs[..., 1, :] = second * angles.cos() + first * angles.sin()
        return out

    def unrotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.rotate(x, -positions)


ROTARIES = [Rotary(), Rotary(halves=False), Rotary(dim=4), Rotary(dim=4, halves=False)]


@dataclass
class Layer:
    """Queries, keys and values of one layer before the rotary embedding, [n, heads, HEAD_DIM]."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    rotary: Rotary

    def run(
        self,
        scorer: PressScorer,
        ends: list[int],
        cached: int = 0,
        memory: dict[str, torch.Tensor] | None = None,
        scale: float = HEAD_DIM**-0.5,
    ) -> torch.Tensor:
        """Return the scores after chunks that end at `ends`, behind a cached prefix."""
        positions = torch.arange(len(self.keys))
        queries = self.rotary.rotate(self.queries, positions)
        keys = self.rotary.rotate(self.keys, positions)
        scores = torch.full((KV_HEADS, cached), ALWAYS)
        start, memory = cached, {} if memory is None else memory
        for end in ends:
            scores = scorer.score(
                LayerChunk(
                    layer=3,
                    first_kv_head=0,
                    start=start,
                    prompt_len=end,
                    queries=queries[start:end],
                    scale=scale,
                    keys=keys[:end],
                    values=self.values[:end],
                    scores=scores,
                    memory=memory,
                    rotary=self.rotary,
                )
            )
            start = end
        return scores

    def last_query_scores(self, scale: float = HEAD_DIM**-0.5) -> torch.Tensor:
        """Return what LastQueryPress is to return for all tokens."""
        last = len(self.keys) - 1
        positions = torch.arange(last + 1)
        keys = self.rotary.rotate(self.keys, positions).repeat_interleave(HEADS // KV_HEADS, 1)
        products = 0.0
        for position in (last, last + 1):
            query = self.rotary.rotate(self.queries[-1:], torch.tensor([position]))[0]
            products = products + torch.einsum("hd,nhd->hn", query, keys)
        return products.unflatten(0, (KV_HEADS, -1)).mean(1) * scale


def make_layer(num_tokens: int, rotary: Rotary = ROTARIES[0]) -> Layer:
    draws = torch.Generator().manual_seed(num_tokens)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    parts = [torch.randn((num_tokens, n, HEAD_DIM), generator=draws) for n in heads]
    return Layer(*parts, rotary=rotary)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package kvpress of a few presses, in place of one that may be installed."""
    folder = tmp_path / "kvpress"
    folder.mkdir()
    (folder / "__init__.py").write_text(PACKAGE)
    for name in list(sys.modules):
        if name.split(".")[0] == "kvpress":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    sys.modules.pop("kvpress", None)


def test_the_registry_leads_to_the_scorer():
    assert SCORERS.load("kvpress") is PressScorer


def test_without_kvpress_the_refusal_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    with pytest.raises(ConfigError) as caught:
        PressScorer(press="SumPress")
    assert str(caught.value) == (
        "--kvspec-compressor kvpress needs the package kvpress: pip install "
        "'sglang-kvspec[kvpress]' && pip install --no-deps 'kvpress>=0.5.5,<0.6'"
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "needs a press: write --kvspec-compressor kvpress:press=SnapKVPress"),
        ({"press": "NoPress"}, "press must be a ScorerPress of kvpress, got 'NoPress'"),
        ({"press": "OtherPress"}, "press must be a ScorerPress of kvpress, got 'OtherPress'"),
        ({"press": "no_package.Press"}, "cannot import no_package: No module named 'no_package'"),
        ({"press": "SumPress", "queries": -1}, "queries must be 0 or more, got -1"),
        ({"press": "SumPress", "args": "weight"}, "args='weight': 'weight' is not name:value"),
        ({"press": "SumPress", "args": "size:3"}, "unexpected keyword argument 'size'"),
        ({"press": "SumPress", "args": "compression_ratio:2"}, "must be in 0 .. 1"),
    ],
)
def test_wrong_options_are_refused(package, options, sentence):
    with pytest.raises(ConfigError) as caught:
        PressScorer(**options)
    assert str(caught.value).startswith("--kvspec-compressor kvpress")
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("press", "needed"),
    [
        ("TrainedPress", "parameters that it takes from a model of transformers"),
        ("WeightsPress", "o_proj of the attention layer"),
        ("ConfigPress", "config.hidden_size of the attention layer"),
        ("AttentionsPress", "the attention weights of all tokens"),
        ("HiddenPress", "hidden states themselves, or random numbers that are not torch's"),
        ("OtherDrawingPress", "hidden states themselves, or random numbers that are not torch's"),
        ("ShortPress", "something else (ValueError: scores of [1, 2, 4096] wanted, got [1, 2, 4"),
    ],
)
def test_a_press_that_needs_more_is_refused_with_what_it_needs(package, press, needed):
    with pytest.raises(ConfigError) as caught:
        PressScorer(press=press)
    assert str(caught.value).startswith(
        f"--kvspec-compressor kvpress:press={press} cannot serve: a server shows presses keys, "
        f"values and queries, and this press needs {needed}"
    )


def test_arguments_reach_the_press_with_their_types(package):
    layer = make_layer(20)
    args = "weight:-2.5+absolute:true"
    positions = torch.arange(20)
    sums = layer.rotary.rotate(layer.keys, positions).sum(-1).T
    scores = layer.run(PressScorer(press="SumPress", args=args), [20])
    torch.testing.assert_close(scores, (-2.5 * sums + 3).abs())


def test_a_press_of_another_package_is_found_by_its_path(package, monkeypatch):
    (package.parent / "my_presses.py").write_text("from kvpress import SumPress as MyPress\n")
    layer = make_layer(20)
    ours, theirs = (PressScorer(press=name) for name in ("my_presses.MyPress", "SumPress"))
    monkeypatch.delitem(sys.modules, "my_presses")
    assert torch.equal(layer.run(ours, [20]), layer.run(theirs, [20]))


@pytest.mark.parametrize("rotary", ROTARIES)
def test_presses_see_queries_of_any_rotary_embedding(package, rotary):
    layer = make_layer(30, rotary)
    scores = layer.run(PressScorer(press="LastQueryPress"), [30])
    torch.testing.assert_close(scores, layer.last_query_scores())


def test_products_have_the_scale_of_the_model(package):
    layer = make_layer(30)
    scores = layer.run(PressScorer(press="LastQueryPress"), [30], scale=0.7)
    torch.testing.assert_close(scores, layer.last_query_scores(0.7))


@pytest.mark.parametrize("rotary", ROTARIES)
def test_cosines_and_sines_rotate_halves_as_the_model_rotates(rotary):
    positions = torch.tensor([0, 1, 5, 300])
    x = torch.randn((4, 3, HEAD_DIM), generator=torch.Generator().manual_seed(1))
    order = half_split_order(rotary, HEAD_DIM, torch.device("cpu"))
    cos, sin = (part[0][:, None] for part in cos_sin(rotary, positions, order, torch.float32))
    first, second = x[..., order].chunk(2, dim=-1)
    turned = x[..., order] * cos + torch.cat((-second, first), dim=-1) * sin
    torch.testing.assert_close(turned, rotary.rotate(x, positions)[..., order])


@pytest.mark.parametrize("press", ["SumPress", "LastQueryPress", "MeanQueryPress"])
@pytest.mark.parametrize("ends", [[10, 20, 40], [39, 40], [1, 2, 40]])
def test_chunks_give_the_scores_of_the_whole_prompt(package, press, ends):
    layer, scorer = make_layer(40), PressScorer(press=press)
    torch.testing.assert_close(layer.run(scorer, ends), layer.run(scorer, [40]))


def test_behind_a_cached_prefix_a_press_scores_with_the_queries_there_are(package):
    layer, scorer = make_layer(40), PressScorer(press="LastQueryPress")
    scores = layer.run(scorer, [30, 40], cached=20)
    torch.testing.assert_close(scores, layer.last_query_scores())


def test_tokens_keep_their_scores_where_the_press_returns_too_few(package):
    layer, scorer = make_layer(40), PressScorer(press="MeanQueryPress")
    assert (layer.run(scorer, [30, 40], cached=20) == ALWAYS).all()


def test_tokens_keep_their_scores_where_the_press_raises(package, caplog):
    layer, scorer = make_layer(40), PressScorer(press="MeanQueryPress", args="minimum:35")
    assert (layer.run(scorer, [20, 30]) == ALWAYS).all()
    torch.testing.assert_close(
        layer.run(scorer, [30, 40]), layer.run(PressScorer(press="MeanQueryPress"), [40])
    )
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == [
        "--kvspec-compressor kvpress:press=MeanQueryPress raised AssertionError and scored no "
        "tokens of a chunk; drafts read all of them"
    ]


def test_without_need_no_queries_are_kept(package):
    memory: dict[str, torch.Tensor] = {}
    make_layer(40).run(PressScorer(press="SumPress"), [20, 40], memory=memory)
    assert not memory


def test_only_the_newest_queries_are_kept_when_a_number_is_given(package):
    layer, memory = make_layer(40), {}
    scorer = PressScorer(press="LastQueryPress", queries=8)
    scores = layer.run(scorer, [10, 20, 30, 35, 40], memory=memory)
    torch.testing.assert_close(scores, layer.last_query_scores())
    assert sum(map(len, memory.values())) == 10
    # The mean of 8 queries is another one than that of 40, and of another length.
    fewer = PressScorer(press="MeanQueryPress", args="minimum:9", queries=8)
    assert (layer.run(fewer, [10, 40]) == ALWAYS).all()


def test_notes_that_end_before_the_chunk_are_forgotten(package):
    layer, scorer = make_layer(40), PressScorer(press="MeanQueryPress")
    memory = {"0": torch.full((15, HEADS, HEAD_DIM), math.nan)}
    scores = layer.run(scorer, [40], cached=20, memory=memory)
    assert (scores == ALWAYS).all()
    assert list(memory) == ["20"]


def test_random_numbers_are_seeded_by_layer_and_those_of_others_go_on(package):
    layer = make_layer(40)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    drawn = [layer.run(PressScorer(press="DrawingPress", seed=n), [40]) for n in (0, 0, 1)]
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_not_a_number_is_read_last(package):
    layer = make_layer(40)
    scores = layer.run(PressScorer(press="NaNPress"), [40])
    sums = layer.rotary.rotate(layer.keys, torch.arange(40)).sum(-1).T
    torch.testing.assert_close(scores, torch.where(sums < 0, -math.inf, sums.log()))


def test_a_head_without_a_number_leaves_the_chunk_unscored(package):
    layer, scorer = make_layer(70), PressScorer(press="NaNHeadPress")
    assert (layer.run(scorer, [59]) == ALWAYS).all()
    assert (layer.run(scorer, [59, 70]) != ALWAYS).all()


def test_presses_do_not_change_keys_and_values(package):
    layer = make_layer(20)
    (package / "__init__.py").write_text(
        PACKAGE.replace("        sums = keys.sum(-1)", "        keys *= 2; sums = keys.sum(-1)")
    )
    before = layer.keys.clone()
    layer.rotary = Rotary(dim=0)
    layer.run(PressScorer(press="SumPress"), [20])
    assert torch.equal(layer.keys, before)


def test_the_import_leaves_the_attention_functions_of_transformers(package):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = dict(ALL_ATTENTION_FUNCTIONS)
    PressScorer(press="SumPress")
    assert dict(ALL_ATTENTION_FUNCTIONS) == before


def test_python_random_numbers_are_not_used_by_a_trial(package):
    random.seed(4)
    expected = random.random()
    random.seed(4)
    PressScorer(press="SumPress")
    assert random.random() == expected
