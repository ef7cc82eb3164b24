"""Scorers that look at positions alone: streaming, duo and random."""

from __future__ import annotations

import json

import pytest
import torch

from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.scorers.base import ALWAYS
from sglang_kvspec.scorers.duo import DuoAttention
from sglang_kvspec.scorers.selection import kept_tokens
from sglang_kvspec.scorers.streaming import StreamingLLM


def read_by(scores, budget):
    """Return the tokens that drafts read of each KV head."""
    kept = kept_tokens(scores[None], budget, "head", 1)[0]
    return [row.nonzero().flatten().tolist() for row in kept]


@pytest.mark.parametrize("ends", [[20], [7, 11, 20]])
def test_streaming_reads_sinks_and_the_newest(make_layer, ends):
    scores = make_layer(20).run(StreamingLLM(), ends)
    assert read_by(scores, 0.25) == [[0, 1, 2, 3, 15, 16, 17, 18, 19]] * 3


def test_streaming_knows_positions_of_a_cached_prefix(make_layer):
    scores = make_layer(20).run(StreamingLLM(sinks=1), cached=12)
    assert read_by(scores, 0.5) == [[0, *range(10, 20)]] * 3


@pytest.mark.parametrize("ends", [[20], [7, 11, 20]])
@pytest.mark.parametrize(("layer", "retrieval"), [(0, {1}), (1, {0, 2})])
def test_duo_reads_all_tokens_of_retrieval_heads(make_layer, heads_file, ends, layer, retrieval):
    scorer = DuoAttention(str(heads_file), sinks=2, recent=3)
    scores = make_layer(20).run(scorer, ends, layer=layer)
    streaming = [0, 1, 15, 16, 17, 18, 19]
    expected = [[*range(20)] if head in retrieval else streaming for head in range(3)]
    # 2 more than what is always read.
    assert read_by(scores, 0.1) == expected
    assert read_by(scores, 0.0) == [
        [*range(20)] if head in retrieval else [0, 1, 17, 18, 19] for head in range(3)
    ]


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (1 / 6, 1), (0.5, 3), (1.0, 6)])
def test_duo_takes_the_share_of_the_whole_model(make_layer, heads_file, share, count):
    scorer = DuoAttention(str(heads_file), share=share, sinks=0, recent=0)
    scores = torch.cat([make_layer(5).run(scorer, layer=layer) for layer in (0, 1)])
    assert (scores == ALWAYS).all(-1).sum() == count
    if count == 1:
        assert (scores[1] == ALWAYS).all(), "the largest number"


def test_duo_prefers_earlier_heads_among_equal_numbers(make_layer, tmp_path):
    path = tmp_path / "equal.json"
    path.write_text(json.dumps({"retrieval": [[1, 1, 1], [1, 1, 1]]}))
    scorer = DuoAttention(str(path), share=1 / 3, sinks=0, recent=0)
    scores = torch.cat([make_layer(5).run(scorer, layer=layer) for layer in (0, 1)])
    assert (scores == ALWAYS).all(-1).tolist() == [True, True, False, False, False, False]


def test_duo_needs_a_file():
    with pytest.raises(ConfigError, match=r"duo:file=PATH") as error:
        DuoAttention()
    assert "benchmarks/calibrate_duo.py" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not JSON"),
        ("[]", "must be"),
        ('{"retrieval": []}', "must be"),
        ('{"retrieval": [[]]}', "must be"),
        ('{"retrieval": [[1, 2], [1]]}', "must be"),
        ('{"retrieval": [[1, "2"]]}', "must be"),
        ('{"retrieval": [1, 2]}', "must be"),
        ('{"retrieval": [[NaN, 2]]}', "must be"),
    ],
)
def test_duo_refuses_other_files(tmp_path, text, message):
    path = tmp_path / "heads.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=rf"--kvspec-compressor duo:file={path}.*{message}"):
        DuoAttention(str(path))


@pytest.mark.parametrize(("num_kv_heads", "layer"), [(3, 2), (4, 0)])
def test_duo_refuses_a_file_of_another_model(make_layer, heads_file, num_kv_heads, layer):
    scorer = DuoAttention(str(heads_file))
    with pytest.raises(ConfigError, match=f"another model: layer {layer} and {num_kv_heads} KV"):
        make_layer(5, num_kv_heads=num_kv_heads).run(scorer, layer=layer)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("streaming", {"sinks": -1}),
        ("snapkv", {"window": 0}),
        ("snapkv", {"kernel": 4}),
        ("snapkv", {"kernel": -1}),
        ("expected", {"sinks": -1}),
        ("expected", {"future": 0}),
        ("kvzap", {"window": 0}),
        ("duo", {"share": 1.5}),
        ("duo", {"sinks": -1}),
        ("duo", {"recent": -1}),
    ],
)
def test_options_out_of_range_are_refused(make_scorer, name, options):
    [(option, value)] = options.items()
    with pytest.raises(ConfigError, match=f"{name}: {option} must be .*, got {value}"):
        make_scorer(name, **options)


def test_random_tokens_are_spread_evenly(make_scorer, make_layer):
    scores = make_layer(4000, group=1).run(make_scorer("random"))
    kept = kept_tokens(scores[None], 0.25, "head", 1)[0].float()
    # Five standard deviations of 250 tokens of 1000.
    assert ((kept.view(3, 4, 1000).sum(-1) - 250).abs() < 5 * 13.7).all()
    assert not torch.equal(kept[0], kept[1])
