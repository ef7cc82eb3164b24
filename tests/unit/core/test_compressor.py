"""Values of --kvspec-compressor: names of scorers with options."""

from __future__ import annotations

import pytest

from sglang_kvspec.core.compressor import Compressor, parse_compressor
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.errors import ConfigError


def test_a_name_alone_reads_pages_by_the_scorers_own_allocation():
    assert parse_compressor("random") == Compressor("random", "pages", None, True, {})


def test_options_of_the_server_and_of_the_scorer_are_told_apart():
    parsed = parse_compressor("random:seed=3,by=tokens,heads=model")
    assert parsed == Compressor("random", "tokens", "model", True, {"seed": "3"})


@pytest.mark.parametrize("text", ["random:keep_anchors=false", "random:keep_anchors=true"])
def test_heads_that_free_anchors_read_the_same_pages(text):
    frees = text.endswith("false")
    heads = "same" if frees else None
    assert parse_compressor(text) == Compressor("random", "pages", heads, not frees, {})
    assert KVSpecConfig(compressor=text).frees_anchors == frees


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("random:", "must be NAME or NAME:key=value,key=value, got 'random:' with the part ''"),
        ("random:seed", "must be NAME or NAME:key=value,key=value, got 'random:seed' with"),
        ("random:seed=1,seed=2", "random:seed=1,seed=2: the option seed is given twice"),
        ("random:by=words", "random:by=words: by must be one of pages, tokens, got 'words'"),
        ("random:keep_anchors=no", "keep_anchors must be one of true, false, got 'no'"),
        (
            "random:keep_anchors=false,heads=model",
            "keep_anchors=false cannot be combined with heads=model (allowed: same): a page's",
        ),
        (
            "random:keep_anchors=false,by=tokens",
            "keep_anchors=false cannot be combined with by=tokens (allowed: pages): a page's",
        ),
        ("random:heads=all", "heads must be one of head, layer, model, same, got 'all'"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(text, sentence):
    with pytest.raises(ConfigError) as caught:
        KVSpecConfig(compressor=text)
    assert str(caught.value).startswith("--kvspec-compressor ")
    assert sentence in str(caught.value)


def test_a_codec_is_not_a_compressor_and_the_refusal_names_its_flag():
    with pytest.raises(ConfigError, match="uniform4 is a codec: write --kvspec-codec uniform4"):
        KVSpecConfig(compressor="uniform4")


def test_auto_is_a_value_and_the_refusal_of_another_names_it():
    assert KVSpecConfig(compressor="auto").compressor == "auto"
    with pytest.raises(ConfigError, match="must be one of auto, duo, expected"):
        KVSpecConfig(compressor="automatic")
