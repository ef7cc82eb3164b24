"""The compressor of a server that asks for auto."""

from __future__ import annotations

import logging

import pytest

from sglang_kvspec.adapters import compressor_choice
from sglang_kvspec.adapters.compressor_choice import with_compressor
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.errors import ConfigError, UnsupportedError
from sglang_kvspec.planning.compressor_choice import Measured


def method(scorer, cost):
    return Measured(scorer, "uniform4", 4, cost, (12.0,), (0.95,), (cost,))


@pytest.fixture
def measured(monkeypatch):
    """Four methods, the cheapest first: one that needs a file, one that reads prompts twice, one
    that scores verified tokens, and one that any server serves."""
    methods = [
        method("kvzap", 0.1),
        method("kvzip", 0.2),
        method("h2o", 0.3),
        method("snapkv", 0.4),
    ]
    monkeypatch.setattr(compressor_choice, "MEASURED", methods)


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("on_gpu", "scorer", "budget"), [(False, "h2o", 0.3), (True, "snapkv", 0.4)]
)
def test_auto_is_the_cheapest_that_the_server_serves(on_gpu, scorer, budget, caplog):
    with caplog.at_level(logging.INFO):
        found = with_compressor(KVSpecConfig(compressor="auto"), on_gpu=on_gpu)
    assert (found.compressor, found.draft_budget) == (scorer, budget)
    assert found.parsed_compressor.name == scorer
    assert f"compressor: {scorer} with --kvspec-draft-budget {budget:g};" in caplog.text


@pytest.mark.usefixtures("measured")
def test_a_budget_that_was_asked_for_stays():
    asked = KVSpecConfig(compressor="auto", draft_budget=0.05)
    found = with_compressor(asked, on_gpu=False)
    assert (found.compressor, found.draft_budget) == ("h2o", 0.05)


@pytest.mark.parametrize("compressor", [None, "random:seed=3"])
def test_any_other_value_stays(compressor):
    config = KVSpecConfig(compressor=compressor)
    assert with_compressor(config, on_gpu=False) is config


@pytest.mark.parametrize(
    ("compressor", "what"),
    [
        ("snapkv:by=tokens", "snapkv chooses single tokens with by=tokens"),
        ("h2o", "h2o scores tokens again after each verification"),
    ],
)
def test_a_gpu_refuses_what_only_a_cpu_does(compressor, what):
    config = KVSpecConfig(compressor=compressor)
    assert with_compressor(config, on_gpu=False) is config
    with pytest.raises(UnsupportedError, match=f"^--kvspec-compressor {what} and serves on a CPU"):
        with_compressor(config, on_gpu=True)


def test_a_gpu_reads_prompts_twice_at_the_target_exact_only():
    config = KVSpecConfig(compressor="kvzip", target="int8")
    assert with_compressor(config, on_gpu=False) is config
    with pytest.raises(UnsupportedError, match="kvzip reads prompts twice at --kvspec-target int8"):
        with_compressor(config, on_gpu=True)


def test_wrong_options_are_refused_before_weights_are_read():
    with pytest.raises(ConfigError, match="--kvspec-compressor snapkv: "):
        with_compressor(KVSpecConfig(compressor="snapkv:windows=3"), on_gpu=False)


def test_auto_must_be_decided_before_it_is_used():
    with pytest.raises(AssertionError, match="not decided"):
        _ = KVSpecConfig(compressor="auto").parsed_compressor


def test_a_gpu_frees_anchors():
    config = KVSpecConfig(compressor="snapkv:keep_anchors=false")
    assert with_compressor(config, on_gpu=True) is config


@pytest.mark.parametrize("on_gpu", [False, True])
def test_prompts_are_read_twice_where_that_is_asked_for(on_gpu):
    config = KVSpecConfig(compressor="kvzip")
    assert with_compressor(config, on_gpu=on_gpu) is config


@pytest.mark.parametrize("option", ["heads=same", "keep_anchors=false"])
def test_a_method_that_keeps_whole_heads_cannot_read_the_same_pages_with_all(tmp_path, option):
    file = tmp_path / "heads.json"
    file.write_text('{"retrieval": [[1.0, 0.0]]}')
    config = KVSpecConfig(compressor=f"duo:file={file},{option}")
    with pytest.raises(ConfigError, match="duo keeps all pages of some heads, so it cannot"):
        with_compressor(config, on_gpu=False)
