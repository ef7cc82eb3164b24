"""The command line that argparse builds from the declared flags."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from sglang_kvspec.adapters.early_refusal import check_arguments
from sglang_kvspec.adapters.flags import PREFIX, add_flags, flag_values, parse_config
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.flags import FLAGS, SWITCH

# For each flag a valid value other than the default, with the flags that it needs.
EXAMPLES: dict[str, tuple[str, Any, str]] = {
    "target": ("int8", "int8", ""),
    "target_attention": ("exact", "exact", ""),
    "arithmetic": ("fast", "fast", ""),
    "kernels": ("triton", "triton", ""),
    "codec": ("log4", "log4", ""),
    "anchor_bits": ("2", 2, ""),
    "draft_len": ("7", 7, ""),
    "recent_pages": ("2", 2, ""),
    "host_gb": ("1.5", 1.5, ""),
    "residual_hbm_fraction": ("0.5", 0.5, ""),
    "schedule": ("rounds", "rounds", ""),
    "drafter": ("ngram", "ngram", ""),
    "ngram_always": ("true", True, "--kvspec-drafter ngram"),
    "ngram_shared": ("true", True, "--kvspec-drafter ngram"),
    "draft_weights": ("int4", "int4", ""),
    "draft_view": ("all", "all", ""),
    "compressor": ("random:seed=3", "random:seed=3", ""),
    "draft_budget": ("0.2", 0.2, ""),
    "stream": ("burst", "burst", ""),
    "prefix_host_gb": ("2", 2.0, ""),
    "prefix_hbm_fraction": ("0.1", 0.1, "--kvspec-prefix-dir x"),
    "prefix_dir": ("x", "x", ""),
    "prefix_gb": ("4", 4.0, "--kvspec-prefix-dir x"),
    "prefix_server": ("tcp://127.0.0.1:5", "tcp://127.0.0.1:5", ""),
    "prefix_server_keys": ("x", "x", "--kvspec-prefix-server tcp://127.0.0.1:5"),
    "prefix_publish_gbps": ("0", 0.0, "--kvspec-prefix-server tcp://127.0.0.1:5"),
    "prefix_wait_ms": ("5", 5.0, "--kvspec-prefix-server tcp://127.0.0.1:5"),
    "transfer": ("full", "full", ""),
    "exact_residual": ("packed", "packed", ""),
    "link_gbps": ("1", 1.0, ""),
    "transfer_host": ("0.0.0.0", "0.0.0.0", ""),
    "transfer_keys": ("x", "x", ""),
}


def parsed(*arguments: str) -> KVSpecConfig | None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parse_config(flag_values(vars(parser.parse_args(arguments))))


@pytest.mark.parametrize("option", [flag.option for flag in FLAGS])
def test_each_flag_reaches_the_configuration(option: str) -> None:
    text, value, others = EXAMPLES[option]
    flag = f"--kvspec-{option.replace('_', '-')}"
    config = parsed("--kvspec", flag, text, *others.split())
    assert getattr(config, option) == value
    # Keyword arguments of sglang.Engine are values, not strings.
    needed = {PREFIX + name: getattr(config, name) for name in KVSpecConfig.__dataclass_fields__}
    assert parse_config({"kvspec": True} | needed) == config


@pytest.mark.parametrize("option", [flag.option for flag in FLAGS])
def test_each_flag_needs_the_switch(option: str) -> None:
    flag = f"--kvspec-{option.replace('_', '-')}"
    for switch in ((), ("--kvspec", "false")):
        with pytest.raises(ConfigError, match=f"^{flag} has no effect without --kvspec$"):
            parsed(*switch, flag, EXAMPLES[option][0])


def test_no_flags_are_no_configuration() -> None:
    assert parsed() is None
    assert parsed("--kvspec") == KVSpecConfig()


@pytest.mark.parametrize(
    "flag", [flag for flag in FLAGS if not flag.kind.allows("x")], ids=lambda flag: flag.name
)
def test_a_wrong_value_is_refused_while_sglang_is_imported(flag: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        check_arguments(["--model-path", "m", "--kvspec", flag.name, "x"])
    assert str(caught.value) == f"{flag.name} {flag.kind.demand('x')}, got 'x'"


def test_help_names_each_flag_with_its_default() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawTextHelpFormatter)
    add_flags(parser)
    lines = " ".join(parser.format_help().split())
    for flag in (SWITCH, *FLAGS):
        assert f" {flag.name} " in lines or f"[{flag.name} " in lines
        assert f"default: {flag.default_text()})".replace("`", "") in lines
    assert "`" not in lines
