"""Target attention of a server on a GPU: KVSpec's by default, and any that another package
registers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_kvspec.adapters.target_choice import load_target_attention
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.errors import ConfigError, UnsupportedError
from sglang_kvspec.core.registry import forget_entries

PLUGINS = Path(__file__).parents[2] / "plugins"


@pytest.fixture
def _plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the flag find the attention of tests/plugins."""
    monkeypatch.syspath_prepend(str(PLUGINS))
    forget_entries()
    yield
    forget_entries()


@pytest.mark.parametrize(
    ("options", "deterministic", "expected"),
    [
        ({}, False, "ExactTargetAttention"),
        ({"target": "int8"}, False, "Int8TargetAttention"),
        ({}, True, "DeterministicAttention"),
        ({"target_attention": "deterministic"}, False, "DeterministicAttention"),
        ({"target_attention": "deterministic"}, True, "DeterministicAttention"),
        ({"target": "int8"}, True, "DeterministicInt8Attention"),
    ],
)
def test_what_a_server_takes(options, deterministic, expected) -> None:
    found = load_target_attention(KVSpecConfig(**options), deterministic=deterministic)
    assert found.__name__ == expected


@pytest.mark.usefixtures("_plugins")
def test_an_attention_of_another_package_is_selected_by_name() -> None:
    config = KVSpecConfig(target_attention="plain_torch")
    assert load_target_attention(config, deterministic=False).__name__ == "PlainTorchAttention"


def test_a_name_that_no_package_registers_is_refused() -> None:
    known = "deterministic, exact, int8, int8_deterministic"
    told = f"--kvspec-target-attention must be one of {known}, got 'plain_torch'"
    with pytest.raises(ConfigError, match=told):
        KVSpecConfig(target_attention="plain_torch")


@pytest.mark.parametrize(
    ("options", "deterministic", "told"),
    [
        (
            {"target_attention": "int8"},
            False,
            r"int8 cannot be combined with --kvspec-target exact \(allowed: int8\)",
        ),
        (
            {"target_attention": "deterministic", "target": "int8"},
            False,
            r"deterministic cannot be combined with --kvspec-target int8 \(allowed: exact\)",
        ),
        (
            {"target_attention": "exact"},
            True,
            r"exact cannot be combined with --enable-deterministic-inference "
            r"\(allowed: deterministic\)",
        ),
        (
            {"target_attention": "int8", "target": "int8"},
            True,
            r"int8 cannot be combined with --enable-deterministic-inference "
            r"\(allowed: int8_deterministic\)",
        ),
    ],
)
def test_an_attention_that_serves_something_else_is_refused(options, deterministic, told) -> None:
    with pytest.raises(UnsupportedError, match=f"^--kvspec-target-attention {told}"):
        load_target_attention(KVSpecConfig(**options), deterministic=deterministic)
