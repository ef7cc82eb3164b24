"""KVSpecConfig accepts what the flags document and refuses the rest with a useful message."""

from __future__ import annotations

import dataclasses
import json
import math

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

# (option, bad value, what the message must say is allowed)
BAD = [
    ("target", "bf16", ["exact", "int8"]),
    ("target", "", ["exact", "int8"]),
    ("target", None, ["exact", "int8"]),
    ("target", ["exact"], ["exact", "int8"]),
    ("codec", "int4", ["log4", "uniform4"]),
    ("codec", "LOG4", ["log4", "uniform4"]),
    ("codec", 4, ["log4", "uniform4"]),
    ("draft_len", -1, ["auto", "0", "64"]),
    ("draft_len", 65, ["auto", "0", "64"]),
    ("draft_len", 4.0, ["auto", "integer"]),
    ("draft_len", "4", ["auto", "integer"]),
    ("draft_len", True, ["auto", "integer"]),
    ("draft_len", None, ["auto", "integer"]),
    ("prefix_host_gb", -1, [">= 0"]),
    ("prefix_host_gb", None, [">= 0"]),
    ("prefix_hbm_fraction", 0.91, ["0", "0.9"]),
    ("prefix_hbm_fraction", None, ["0", "0.9"]),
    (
        "prefix_hbm_fraction",
        0.1,
        ["no effect without --kvspec-prefix-host-gb", "--kvspec-prefix-dir"],
    ),
    ("prefix_gb", 0, ["> 0"]),
    ("prefix_gb", float("inf"), ["> 0", "finite"]),
    ("prefix_gb", 4, ["no effect without --kvspec-prefix-dir"]),
    ("prefix_dir", "", ["folder"]),
    ("prefix_dir", 3, ["folder"]),
    ("prefix_server", "", ["empty"]),
    ("prefix_server_keys", 3, ["empty"]),
    ("prefix_publish_gbps", -0.5, [">= 0", "GB/s"]),
    ("prefix_publish_gbps", 1.5, ["no effect without --kvspec-prefix-server"]),
    ("prefix_wait_ms", math.nan, [">= 0", "ms"]),
    ("prefix_wait_ms", 5, ["no effect without --kvspec-prefix-server"]),
    ("recent_pages", 0, ["1", "64"]),
    ("recent_pages", 65, ["1", "64"]),
    ("recent_pages", 1.5, ["integer"]),
    ("recent_pages", True, ["integer"]),
    ("recent_pages", "auto", ["integer"]),
    ("host_gb", -0.5, [">= 0"]),
    ("host_gb", math.nan, [">= 0"]),
    ("host_gb", -math.inf, [">= 0"]),
    ("host_gb", math.inf, [">= 0"]),
    ("residual_hbm_fraction", -0.01, ["0", "0.9"]),
    ("residual_hbm_fraction", 0.91, ["0", "0.9"]),
    ("residual_hbm_fraction", math.nan, ["0", "0.9"]),
]


@pytest.mark.parametrize(("option", "value", "allowed"), BAD)
def test_a_bad_value_is_named_with_its_flag_and_what_is_allowed(option, value, allowed):
    with pytest.raises(ConfigError) as caught:
        KVSpecConfig(**{option: value})
    message = str(caught.value)
    assert message.startswith("--kvspec-" + option.replace("_", "-"))
    assert repr(value) in message
    for word in allowed:
        assert word in message


@pytest.mark.parametrize("option", ["host_gb", "residual_hbm_fraction"])
def test_a_word_where_a_number_belongs_is_a_config_error(option):
    # `--kvspec-host-gb auto` gets here as a string.
    with pytest.raises(ConfigError, match="--kvspec-" + option.replace("_", "-")):
        KVSpecConfig(**{option: "auto"})


def test_a_switch_is_no_size():
    with pytest.raises(ConfigError, match="--kvspec-host-gb"):
        KVSpecConfig(host_gb=True)


@given(configs)
def test_survives_a_round_trip_through_json(config):
    values = json.loads(json.dumps(config.to_dict()))
    assert KVSpecConfig.from_dict(values) == config


def test_missing_options_take_their_defaults():
    assert KVSpecConfig.from_dict({}) == KVSpecConfig()
    assert KVSpecConfig.from_dict({"codec": "uniform4"}) == KVSpecConfig(codec="uniform4")


def test_an_unknown_option_is_named_beside_the_known_ones():
    with pytest.raises(ConfigError) as caught:
        KVSpecConfig.from_dict({"codec": "log4", "anchor_bits": 4})
    message = str(caught.value)
    assert "'anchor_bits'" in message
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
