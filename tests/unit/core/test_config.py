"""KVSpecConfig as a value: round trips, unknown options and derived values. test_flags.py and
test_flag_needs.py test the ranges and needs of its fields."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kvspec.core.config import MAX_DRAFT_LEN, KVSpecConfig
from sglang_kvspec.core.errors import ConfigError, KVSpecError

configs = st.builds(
    KVSpecConfig,
    target=st.sampled_from(["exact", "int8"]),
    codec=st.sampled_from(["log4", "uniform4"]),
    draft_len=st.just("auto") | st.integers(0, MAX_DRAFT_LEN),
    recent_pages=st.integers(1, 64),
    host_gb=st.none() | st.floats(0, 1e6),
    residual_hbm_fraction=st.floats(0, 0.9),
    prefix_host_gb=st.floats(0, 1e6),
    prefix_hbm_fraction=st.floats(0, 0.9),
    prefix_dir=st.just("prefixes"),
    prefix_gb=st.none() | st.floats(0.001, 1e6),
    prefix_server=st.just("tcp://127.0.0.1:5"),
    prefix_server_keys=st.none() | st.just("keys"),
    prefix_publish_gbps=st.none() | st.floats(0, 1e6),
    prefix_wait_ms=st.none() | st.floats(0, 1e6),
)


@given(configs)
def test_survives_a_round_trip_through_json(config):
    values = json.loads(json.dumps(config.to_dict()))
    assert KVSpecConfig.from_dict(values) == config


def test_missing_options_take_their_defaults():
    assert KVSpecConfig.from_dict({}) == KVSpecConfig()
    assert KVSpecConfig.from_dict({"codec": "uniform4"}) == KVSpecConfig(codec="uniform4")


def test_an_unknown_option_is_named_with_the_known_ones():
    with pytest.raises(ConfigError) as caught:
        KVSpecConfig.from_dict({"codec": "log4", "anchor_width": 4})
    message = str(caught.value)
    assert "'anchor_width'" in message
    for field in dataclasses.fields(KVSpecConfig):
        assert field.name in message


def test_from_dict_validates_like_the_constructor():
    with pytest.raises(ConfigError, match="--kvspec-recent-pages"):
        KVSpecConfig.from_dict({"recent_pages": 0})


@given(configs)
def test_derived_values_agree_with_the_draft_length(config):
    assert config.drafts == (config.draft_len != 0)
    assert 0 <= config.max_draft_len <= MAX_DRAFT_LEN
    if config.draft_len == "auto":
        assert config.max_draft_len >= 1
    else:
        assert config.max_draft_len == config.draft_len


def test_auto_drafts_longer_where_residuals_are_fetched():
    lengths = [KVSpecConfig(host_gb=gb).max_draft_len for gb in (None, 0, 4)]
    assert lengths == [31, 31, 63]
    assert KVSpecConfig(host_gb=4, draft_len=8).max_draft_len == 8
    assert KVSpecConfig(host_gb=4, draft_len=0).max_draft_len == 0


def test_is_frozen_and_hashable():
    config = KVSpecConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.draft_len = 3
    assert {config: 1}[KVSpecConfig()] == 1


def test_config_errors_are_caught_as_value_errors_and_as_ours():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, KVSpecError)
