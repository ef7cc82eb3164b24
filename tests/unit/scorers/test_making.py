"""Scorers by name and options, and what is refused."""

from __future__ import annotations

import pytest

from sglang_kvspec.core.compressor import parse_compressor
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.registry import forget_entries
from sglang_kvspec.core.seams import SCORERS
from sglang_kvspec.scorers.making import find_scorer, make_scorer, options_of
from sglang_kvspec.scorers.random_tokens import RandomTokens


def test_options_are_converted_to_the_types_of_their_fields():
    assert make_scorer(parse_compressor("random:seed=3,by=tokens")) == RandomTokens(seed=3)
    assert make_scorer(parse_compressor("random")) == RandomTokens()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "random:window=3",
            "the option window does not exist (allowed: by, heads, keep_anchors, seed)",
        ),
        ("random:seed=x", "the option seed must be a whole number, got 'x'"),
        ("random:seed=1.5", "the option seed must be a whole number, got '1.5'"),
    ],
)
def test_wrong_options_are_refused(text, sentence):
    with pytest.raises(ConfigError) as caught:
        make_scorer(parse_compressor(text))
    assert str(caught.value) == f"--kvspec-compressor random: {sentence}"


def test_an_entry_point_to_something_else_is_refused(tmp_path, monkeypatch):
    info = tmp_path / "wrong-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{SCORERS.group}]\nwrong = wrong_scorer:Wrong\n")
    (tmp_path / "wrong_scorer.py").write_text("class Wrong: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    forget_entries()
    with pytest.raises(ConfigError, match="wrong: the entry point must lead to a frozen dataclass"):
        find_scorer("wrong")
    forget_entries()


@pytest.mark.parametrize("name", SCORERS.built_in)
def test_every_scorer_has_options_that_text_can_give(name):
    assert set(options_of(find_scorer(name)).values()) <= {int, float, str}
