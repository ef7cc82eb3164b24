"""Every declared need of a flag: one combination without it, and the sentence of the refusal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.errors import ConfigError, KVSpecError, UnsupportedError
from sglang_kvspec.core.flag_needs import Need, Server, ServerNeed
from sglang_kvspec.core.flags import FLAGS
from sglang_kvspec.core.registry import forget_entries

MEMORY_GIB = 64.0

Options = dict[str, Any]

# Options of KVSpec, and the sentence of their refusal.
PLUGINS = Path(__file__).parents[2] / "plugins"


@pytest.fixture(autouse=True)
def _plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let flags find the plug-ins that tests/plugins registers."""
    monkeypatch.syspath_prepend(str(PLUGINS))
    forget_entries()
    yield
    forget_entries()


LACKING: list[tuple[Options, str]] = [
    (
        {"draft_len": 8, "transfer": "int4"},
        "--kvspec-draft-len 8 has no effect with --kvspec-transfer int4 (allowed: auto, 0): after "
        "a lossy transfer there is no exact KV to verify drafts against",
    ),
    (
        {"drafter": "output_lookup", "schedule": "staggered"},
        "--kvspec-drafter output_lookup cannot be combined with --kvspec-schedule staggered "
        "(allowed: auto, rounds): this schedule piggybacks the model's own drafts on verifications",
    ),
    (
        {"drafter": "output_lookup", "draft_view": "sinks_recent"},
        "--kvspec-drafter output_lookup cannot be combined with --kvspec-draft-view sinks_recent "
        "(allowed: auto, all): a draft view applies to drafts of the model itself only",
    ),
    (
        {"drafter": "output_lookup", "draft_weights": "int4"},
        "--kvspec-draft-weights int4 has no effect with --kvspec-drafter output_lookup (allowed: "
        "self, ngram)",
    ),
    (
        {"compressor": "random", "draft_view": "pages"},
        "--kvspec-compressor random cannot be combined with --kvspec-draft-view pages (allowed: "
        "auto): both choose what drafts read",
    ),
    (
        {"compressor": "random", "drafter": "output_lookup"},
        "--kvspec-compressor random cannot be combined with --kvspec-drafter output_lookup "
        "(allowed: self, ngram): a compressor applies to drafts of the model itself only",
    ),
    (
        {"compressor": "random:seed=1", "draft_len": 0},
        "--kvspec-compressor random:seed=1 has no effect with --kvspec-draft-len 0 (allowed: auto, "
        "1 or more)",
    ),
    (
        {"ngram_always": True},
        "--kvspec-ngram-always true has no effect with --kvspec-drafter self (allowed: ngram)",
    ),
    (
        {"ngram_shared": True},
        "--kvspec-ngram-shared true has no effect with --kvspec-drafter self (allowed: ngram)",
    ),
    (
        {"draft_len": 0, "draft_weights": "int4"},
        "--kvspec-draft-weights int4 has no effect with --kvspec-draft-len 0 (allowed: auto, 1 or "
        "more)",
    ),
    (
        {"draft_view": "all", "draft_budget": 0.2},
        "--kvspec-draft-budget 0.2 has no effect with --kvspec-draft-view all (allowed: auto, "
        "pages, recent)",
    ),
    (
        {"prefix_hbm_fraction": 0.1},
        "--kvspec-prefix-hbm-fraction 0.1 has no effect without --kvspec-prefix-host-gb or "
        "--kvspec-prefix-dir, which hold the residuals of kept anchors",
    ),
    (
        {"prefix_gb": 4},
        "--kvspec-prefix-gb 4 has no effect without --kvspec-prefix-dir",
    ),
    (
        {"prefix_server_keys": "keys"},
        "--kvspec-prefix-server-keys keys has no effect without --kvspec-prefix-server",
    ),
    (
        {"prefix_publish_gbps": 1.5},
        "--kvspec-prefix-publish-gbps 1.5 has no effect without --kvspec-prefix-server",
    ),
    (
        {"prefix_wait_ms": 5.0},
        "--kvspec-prefix-wait-ms 5 has no effect without --kvspec-prefix-server",
    ),
    (
        {"transfer": "full", "target": "int8"},
        "--kvspec-transfer full cannot be combined with --kvspec-target int8 (allowed: exact): "
        "such a transfer sends KV in the model's dtype, or lossy KV",
    ),
    (
        {"exact_residual": "packed", "target": "int8"},
        "--kvspec-exact-residual packed cannot be combined with --kvspec-target int8 (allowed: "
        "exact)",
    ),
    (
        {"compressor": "snapkv:keep_anchors=false", "target": "int8"},
        "--kvspec-compressor snapkv:keep_anchors=false frees anchors, which verifications at "
        "--kvspec-target int8 read (allowed: exact)",
    ),
    (
        {"compressor": "snapkv:keep_anchors=false", "prefix_host_gb": 1},
        "--kvspec-compressor snapkv:keep_anchors=false frees anchors, which --kvspec-prefix-host-gb"
        ", --kvspec-prefix-dir and --kvspec-prefix-server store (allowed: keep_anchors=true)",
    ),
    (
        {"compressor": "snapkv:keep_anchors=false", "draft_budget": 0.9},
        "--kvspec-compressor snapkv:keep_anchors=false frees no anchors with --kvspec-draft-budget "
        "0.9 (allowed: auto, less than 0.9)",
    ),
    (
        {"exact_residual": "packed", "anchor_bits": 2},
        "--kvspec-exact-residual packed needs --kvspec-codec uniform4 with --kvspec-anchor-bits 4",
    ),
]

PREFILL = {"disaggregation_mode": "prefill"}
DECODE = {"disaggregation_mode": "decode"}
PREFIX_TIERS = {"prefix_host_gb": 1, "prefix_dir": "x", "prefix_server": "tcp://127.0.0.1:5"}

# Options of KVSpec, SGLang's arguments, whether on a GPU only, and the sentence of the refusal.
LACKING_ON_A_SERVER: list[tuple[Options, Options, bool, str]] = [
    (
        {"arithmetic": "fast"},
        {"enable_deterministic_inference": True},
        False,
        "--kvspec-arithmetic fast cannot be combined with --enable-deterministic-inference "
        "(allowed: deterministic)",
    ),
    (
        {"target": "int8"},
        {"page_size": 128},
        True,
        "--page-size 128 cannot be combined with --kvspec-target int8 on a GPU (allowed: 64)",
    ),
    (
        {"compressor": "random"},
        DECODE,
        False,
        "--kvspec-compressor random is not supported on a decode server, which sees no prefill",
    ),
    (
        {"compressor": "snapkv:keep_anchors=false"},
        PREFILL,
        False,
        "--kvspec-compressor snapkv:keep_anchors=false frees anchors, which a prefill server sends "
        "(allowed: keep_anchors=true)",
    ),
    (
        {"host_gb": 64.5},
        {},
        False,
        "--kvspec-host-gb 64.5 is more than the host memory of this machine (allowed: at most "
        "64.0 GiB)",
    ),
    (
        {"host_gb": 4},
        {"prefill_max_requests": 2},
        True,
        "--prefill-max-requests 2 cannot be combined with --kvspec-host-gb on a GPU (allowed: 1): "
        "the residual cache is only guaranteed to hold the prefix of one request",
    ),
    (
        {"prefix_host_gb": 1e9},
        {},
        False,
        "--kvspec-prefix-host-gb 1e+09 is more than the host memory of this machine (allowed: at "
        "most 64.0 GiB)",
    ),
    *(
        (
            {option: value},
            arguments,
            False,
            sentence.format(flag="--kvspec-" + option.replace("_", "-"), value=value),
        )
        for option, value in PREFIX_TIERS.items()
        for arguments, sentence in (
            (
                DECODE,
                "{flag} {value} has no effect on a decode server, which keeps no prefixes: set "
                "{flag} on the prefill server",
            ),
            (
                {"disable_radix_cache": True},
                "--disable-radix-cache cannot be combined with {flag} (allowed: leave it unset)",
            ),
            ({"dp_size": 2}, "--dp-size 2 cannot be combined with {flag} (allowed: 1)"),
        )
    ),
    *(
        (
            {option: value},
            {"disaggregation_mode": "null"},
            False,
            f"--kvspec-{option.replace('_', '-')} {value} has no effect without "
            "--disaggregation-mode prefill or decode",
        )
        for option, value in (
            ("transfer", "full"),
            ("link_gbps", 1.5),
            ("transfer_host", "0.0.0.0"),
            ("transfer_keys", "keys"),
        )
    ),
    (
        {"exact_residual": "packed", "transfer": "full"},
        PREFILL,
        False,
        "--kvspec-exact-residual packed has no effect without --kvspec-host-gb on a GPU, a prefix "
        "tier, or --kvspec-transfer split with --disaggregation-mode prefill or decode",
    ),
]

# Combinations that meet all needs.
FINE: list[tuple[Options, Options]] = [
    ({}, {}),
    ({}, {"enable_deterministic_inference": True, "page_size": 128, "prefill_max_requests": 2}),
    ({"arithmetic": "fast"}, {"enable_deterministic_inference": False}),
    ({"arithmetic": "deterministic"}, {"enable_deterministic_inference": True}),
    ({"host_gb": 64.0}, {"prefill_max_requests": 1}),
    ({"host_gb": 0}, {"prefill_max_requests": 2}),
    ({"target": "int8"}, {"page_size": 64}),
    ({"schedule": "rounds"}, {}),
    ({"schedule": "fixed_lengths", "drafter": "output_lookup"}, {}),
    ({"transfer": "int4", "draft_len": 0}, PREFILL),
    ({"transfer": "int4"}, DECODE),
    ({"transfer_host": "127.0.0.1", "transfer": "split"}, {}),
    ({"exact_residual": "packed"}, DECODE),
    ({"exact_residual": "packed", "host_gb": 8}, {}),
    ({"exact_residual": "packed"} | PREFIX_TIERS, {}),
    ({"exact_residual": "packed", "transfer": "full"} | PREFIX_TIERS, PREFILL),
    ({"exact_residual": "auto"}, {}),
    ({"exact_residual": "auto", "target": "int8", "anchor_bits": 2}, {}),
    (
        {"prefix_hbm_fraction": 0.1, "prefix_gb": 4, "prefix_wait_ms": 5} | PREFIX_TIERS,
        {"dp_size": 1, "disable_radix_cache": False},
    ),
    (PREFIX_TIERS, PREFILL),
]


def check_servers(config: KVSpecConfig, arguments: Options, *, on_gpu: bool) -> None:
    for flag in FLAGS:
        flag.check_server(config, Server(arguments, MEMORY_GIB), on_gpu=on_gpu)


@pytest.mark.parametrize(("options", "sentence"), LACKING, ids=lambda value: str(value)[:60])
def test_a_need_that_is_not_met_is_refused(options: Options, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KVSpecConfig(**options)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("options", "arguments", "on_gpu", "sentence"),
    LACKING_ON_A_SERVER,
    ids=[f"{options} {arguments}" for options, arguments, *_ in LACKING_ON_A_SERVER],
)
def test_a_server_without_what_a_flag_needs_is_refused(
    options: Options, arguments: Options, on_gpu: bool, sentence: str
) -> None:
    config = KVSpecConfig(**options)
    with pytest.raises(KVSpecError) as caught:
        check_servers(config, arguments, on_gpu=on_gpu)
    assert str(caught.value) == sentence
    # A wrong combination of flags is the user's to correct, or is not supported yet.
    assert type(caught.value) in (ConfigError, UnsupportedError)
    check_servers(config, arguments, on_gpu=not on_gpu)


@pytest.mark.parametrize(("options", "arguments"), FINE, ids=str)
def test_what_meets_all_needs_passes(options: Options, arguments: Options) -> None:
    config = KVSpecConfig(**options)
    for on_gpu in (False, True):
        check_servers(config, arguments, on_gpu=on_gpu)


def test_every_declared_need_is_tested() -> None:
    """Each sentence above belongs to one need, and each need has one."""
    needs: list[Need | ServerNeed] = [
        need for flag in FLAGS for need in (*flag.needs, *flag.server_needs)
    ]
    assert len(LACKING) + len(LACKING_ON_A_SERVER) == len(needs)
    sentences = [row[-1] for row in (*LACKING, *LACKING_ON_A_SERVER)]
    assert len(set(sentences)) == len(sentences)
