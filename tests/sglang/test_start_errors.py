"""Bad input stops the start with one sentence, before any weight is read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from harness.models import DEMO_MODEL
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.environ import envs
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args
from zmq.auth import create_certificates

from sglang_kvspec.adapters import activation
from sglang_kvspec.adapters.early_refusal import check_arguments
from sglang_kvspec.adapters.environment import ENVIRONMENT_NAME
from sglang_kvspec.core.errors import ConfigError, HookError, KVSpecError, UnsupportedError
from sglang_kvspec.core.sglang_releases import UNTESTED_NAME, parse_version

BASE = ("--model-path", str(DEMO_MODEL), "--device", "cpu")

DECODE = "--disaggregation-mode decode --disaggregation-transfer-backend kvspec"

PREFIX_SERVER = "--kvspec-prefix-server tcp://127.0.0.1:5"

PREFILL_FLAGS = DECODE.replace("decode", "prefill")


@pytest.fixture(scope="module", autouse=True)
def _plugins() -> Iterator[None]:
    load_plugins()
    yield
    activation.switch_off()


def engine_args(**arguments: Any) -> Any:
    """Build the ServerArgs of a sglang.Engine with these arguments."""
    return Engine.server_args_class(None, **arguments)


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return the one line with which a command line with these flags is refused."""
    with pytest.raises(SystemExit) as stop:
        prepare_server_args([*BASE, *flags])
    assert stop.value.code == 2
    text = capsys.readouterr().err
    (line,) = [line for line in text.splitlines() if line.startswith("sglang-kvspec: error:")]
    assert "Traceback" not in text
    return line


def early_refusal_of(*arguments: str) -> str | None:
    """Return the line with which the same command line is refused while SGLang is being
    imported."""
    try:
        check_arguments(arguments)
    except ConfigError as error:
        return f"sglang-kvspec: error: {error}"
    return None


def certificates(folder: Path, *peers: str) -> str:
    """Make a folder of keys in the form that --kvspec-transfer-keys takes."""
    (folder / "peers").mkdir()
    create_certificates(folder, "own")
    for peer in peers:
        create_certificates(folder / "peers", peer)
    return str(folder)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--kvspec-target fp8", ["--kvspec-target", "fp8", "exact, int8"]),
        ("--kvspec-target-attention zip", ["--kvspec-target-attention", "zip", "exact, int8"]),
        ("--kvspec-target-attention exact", ["--kvspec-target-attention exact", "needs a GPU"]),
        ("--kvspec-codec zip", ["--kvspec-codec", "zip", "log4", "uniform4"]),
        ("--kvspec-draft-len 65", ["--kvspec-draft-len", "65", "0 to 64", "auto"]),
        ("--kvspec-draft-len many", ["--kvspec-draft-len", "many", "0 to 64", "auto"]),
        ("--kvspec-recent-pages 0", ["--kvspec-recent-pages", "0", "1 to 64"]),
        ("--kvspec-recent-pages x", ["--kvspec-recent-pages", "'x'", "integer"]),
        ("--kvspec-host-gb -1", ["--kvspec-host-gb", "-1", ">= 0"]),
        ("--kvspec-host-gb 1e9", ["--kvspec-host-gb", "1e+09", "this machine"]),
        ("--kvspec-residual-hbm-fraction 1", ["--kvspec-residual-hbm-fraction", "1", "0.9"]),
        ("--kvspec-schedule now", ["--kvspec-schedule", "now", "auto, rounds, staggered"]),
        ("--enable-lmcache", ["--enable-lmcache", "leave it unset"]),
        ("--page-size 48", ["--page-size", "48", "multiple of 32"]),
        ("--page-size 1", ["--page-size", "1", "multiple of 32"]),
        ("--enable-hierarchical-cache", ["--enable-hierarchical-cache", "leave it unset"]),
        ("--enable-mixed-chunk", ["--enable-mixed-chunk", "leave it unset"]),
        ("--speculative-algorithm NGRAM", ["--speculative-algorithm", "NGRAM", "leave it unset"]),
        ("--speculative-algorithm EAGLE", ["--speculative-algorithm", "EAGLE", "leave it unset"]),
        ("--kv-cache-dtype fp8_e4m3", ["--kv-cache-dtype", "fp8_e4m3", "auto"]),
        ("--attention-backend triton", ["--attention-backend", "triton", "kvspec"]),
        ("--tp-size 3", ["--tp-size 3", "4 heads", "2 KV heads", "divide both"]),
        ("--tp-size 4", ["--tp-size 4", "4 heads", "2 KV heads", "divide both"]),
        ("--attn-cp-size 2", ["--attn-cp-size", "2", "allowed: 1"]),
        ("--grammar-backend outlines", ["--grammar-backend", "outlines", "xgrammar"]),
        (
            "--disaggregation-mode prefill",
            ["--disaggregation-transfer-backend mooncake", "allowed: kvspec"],
        ),
        (
            f"{DECODE} --tp-size 2 --nnodes 2",
            ["--nnodes 2", "--disaggregation-mode decode", "allowed: 1"],
        ),
        (
            f"{PREFILL_FLAGS} --dp-size 2",
            ["--dp-size 2", "--disaggregation-mode prefill", "allowed: 1"],
        ),
        (
            f"{PREFIX_SERVER} --dp-size 2",
            ["--dp-size 2", "--kvspec-prefix-server", "allowed: 1"],
        ),
        (f"{DECODE} --kvspec-prefix-dir x", ["--kvspec-prefix-dir", "keeps no prefixes"]),
        (f"{DECODE} --kvspec-transfer zip", ["--kvspec-transfer", "zip", "split, full"]),
        (
            f"{DECODE} --kvspec-transfer int4 --kvspec-draft-len 8",
            ["--kvspec-draft-len 8", "--kvspec-transfer int4", "allowed: auto, 0"],
        ),
        (
            f"{DECODE} --kvspec-transfer full --kvspec-target int8",
            ["--kvspec-transfer full", "--kvspec-target int8", "allowed: exact"],
        ),
        (f"{DECODE} --kvspec-link-gbps 0", ["--kvspec-link-gbps", "0", "> 0"]),
        ("--kvspec-transfer full", ["--kvspec-transfer full", "no effect without"]),
        ("--kvspec-transfer-host 0.0.0.0", ["--kvspec-transfer-host", "no effect without"]),
        ("--kvspec-prefix-host-gb 1e9", ["--kvspec-prefix-host-gb", "1e+09", "this machine"]),
        (
            "--kvspec-prefix-dir /dev/null/x",
            ["--kvspec-prefix-dir", "/dev/null/x", "Not a directory", "folder"],
        ),
        ("--kvspec-prefix-gb 4", ["--kvspec-prefix-gb", "4", "--kvspec-prefix-dir"]),
        (
            "--kvspec-prefix-hbm-fraction 0.1",
            ["--kvspec-prefix-hbm-fraction 0.1", "no effect", "--kvspec-prefix-host-gb"],
        ),
        ("--kvspec-prefix-hbm-fraction half", ["--kvspec-prefix-hbm-fraction", "a number"]),
        (
            "--kvspec-prefix-dir x --disable-radix-cache",
            ["--disable-radix-cache", "--kvspec-prefix-dir", "leave it unset"],
        ),
        (
            "--kvspec-prefix-host-gb 1 --radix-cache-backend lmcache",
            ["--radix-cache-backend lmcache", "--kvspec", "allowed: kvspec"],
        ),
        ("--kvspec-prefix-server 127.0.0.1:5", ["--kvspec-prefix-server", "tcp://host:port"]),
        ("--kvspec-prefix-server tcp://127.0.0.1", ["--kvspec-prefix-server", "tcp://host:port"]),
        ("--kvspec-prefix-server tcp://10.0.0.1:5", ["10.0.0.1:5", "without CURVE keys"]),
        (
            "--kvspec-prefix-server tcp://10.0.0.1:5 --kvspec-prefix-server-keys /nowhere",
            ["--kvspec-prefix-server-keys", "/nowhere"],
        ),
        (
            "--kvspec-prefix-publish-gbps 1",
            ["--kvspec-prefix-publish-gbps 1", "no effect without --kvspec-prefix-server"],
        ),
        (
            f"{PREFIX_SERVER} --kvspec-prefix-publish-gbps -1",
            ["--kvspec-prefix-publish-gbps", "-1", ">= 0"],
        ),
        (f"{PREFIX_SERVER} --kvspec-prefix-wait-ms soon", ["--kvspec-prefix-wait-ms", "a number"]),
        (
            f"{PREFIX_SERVER} --disable-radix-cache",
            ["--disable-radix-cache", "--kvspec-prefix-server", "leave it unset"],
        ),
        (f"{DECODE} {PREFIX_SERVER}", ["--kvspec-prefix-server", "keeps no prefixes"]),
        ("--enable-session-radix-cache", ["--enable-session-radix-cache", "no sessions"]),
        ("--enable-streaming-session", ["--enable-streaming-session", "partial pages"]),
        ("--enable-deterministic-inference", ["--enable-deterministic-inference", "needs a GPU"]),
        ("--kvspec-arithmetic exact", ["--kvspec-arithmetic", "exact", "fast, deterministic"]),
        ("--kvspec-arithmetic deterministic", ["--kvspec-arithmetic", "needs a GPU"]),
        (
            "--kvspec-arithmetic fast --enable-deterministic-inference",
            ["--kvspec-arithmetic fast", "--enable-deterministic-inference", "deterministic"],
        ),
        ("--rl-on-policy-target fsdp", ["--rl-on-policy-target", "fsdp", "leave it unset"]),
        ("--radix-cache-backend lmcache", ["--radix-cache-backend lmcache", "allowed: kvspec"]),
        ("--max-running-requests 0", ["--max-running-requests 0", "allowed: 1 or more"]),
        ("--max-running-requests -1", ["--max-running-requests -1", "allowed: 1 or more"]),
        ("--chunked-prefill-size 1", ["--chunked-prefill-size 1", "multiples of the page size 64"]),
        (
            "--chunked-prefill-size 64 --page-size 128",
            ["--chunked-prefill-size 64", "multiples of the page size 128"],
        ),
        ("--max-total-tokens 1", ["--max-total-tokens 1", "allowed: 128 or more", "whole pages"]),
        ("--max-total-tokens 127", ["--max-total-tokens 127", "allowed: 128 or more"]),
        (
            "--max-total-tokens 63 --kvspec-draft-len 0",
            ["--max-total-tokens 63", "allowed: 64 or more"],
        ),
        ("--max-queued-requests 0", ["--max-queued-requests 0", "allowed: 1 or more"]),
        ("--prefill-max-requests 0", ["--prefill-max-requests 0", "allowed: 1 or more"]),
        ("--detokenizer-worker-num 2", ["--detokenizer-worker-num 2", "allowed: 1"]),
        ("--quantization fp8", ["--quantization fp8", "needs a GPU", "leave it unset"]),
        ("--context-length 1", ["--context-length 1", "allowed: 2 or more"]),
        ("--page-size 0", ["--page-size", "0", "multiple of 32"]),
        ("--tokenizer-worker-num 2", ["--tokenizer-worker-num 2", "allowed: 1", "no plugins"]),
        ("--grpc-mode", ["--grpc-mode", "leave it unset"]),
        ("--smg-grpc-mode", ["--smg-grpc-mode", "leave it unset"]),
        (
            "--speculative-num-draft-tokens 5",
            ["--speculative-num-draft-tokens 5", "leave it unset", "--kvspec-draft-len"],
        ),
        ("--speculative-num-steps 5", ["--speculative-num-steps 5", "--kvspec-draft-len"]),
        ("--speculative-eagle-topk 4", ["--speculative-eagle-topk 4", "leave it unset"]),
        ("--tokenizer-worker-num 0", ["--tokenizer-worker-num 0", "allowed: 1"]),
        ("--tp-size 0", ["--tp-size 0", "allowed: 1 or more"]),
        ("--dp-size 0", ["--dp-size 0", "allowed: 1 or more"]),
        ("--mem-fraction-static 0", ["--mem-fraction-static 0", "above 0", "at most 1"]),
        ("--mem-fraction-static 2", ["--mem-fraction-static 2", "above 0", "at most 1"]),
        ("--use-ray", ["--use-ray", "leave it unset", "no plugins"]),
        ("--encoder-only", ["--encoder-only", "leave it unset"]),
        (
            f"{DECODE} --kvspec-transfer-host 0.0.0.0",
            ["--kvspec-transfer-host 0.0.0.0", "without CURVE keys", "--kvspec-transfer-keys"],
        ),
        (
            f"{PREFILL_FLAGS} --kvspec-transfer-host 0.0.0.0",
            ["--kvspec-transfer-host 0.0.0.0", "without CURVE keys", "--kvspec-transfer-keys"],
        ),
        (
            f"{PREFILL_FLAGS} --kvspec-transfer-keys /nowhere",
            ["--kvspec-transfer-keys /nowhere", "own.key_secret and peers/*.key"],
        ),
        (
            f"{DECODE} --kvspec-transfer-keys /nowhere",
            ["--kvspec-transfer-keys /nowhere", "own.key_secret and peers/*.key"],
        ),
    ],
)
def test_bad_flags(capsys: pytest.CaptureFixture[str], flags: str, expected: list[str]) -> None:
    line = refusal(capsys, "--kvspec", *flags.split())
    for part in expected:
        assert part in line
    # The check during SGLang's import gives the same line, or leaves the refusal to this check.
    assert early_refusal_of(*BASE, "--kvspec", *flags.split()) in (None, line)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kvspec: 'yes'", "--kvspec must be true or false, or have no value, got 'yes'"),
        ("kvspec: 1", "got '1'"),
        ("kvspec: 'off'", "got 'off'"),
        ("kvspec:", "got 'None'"),
        ("kvspec: {a: 1}", "got "),
        ("kvspec: false\nkvspec-codec: log4", "--kvspec-codec has no effect without --kvspec"),
    ],
)
def test_a_wrong_yaml_switch_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, expected: str
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(text + "\n")
    line = refusal(capsys, "--config", str(path))
    assert expected in line
    assert early_refusal_of(*BASE, "--config", str(path)) == line


@pytest.mark.parametrize(
    ("text", "is_on"),
    [("true", True), ("'true'", True), ("'True'", True), ("yes", True), ("off", False)],
)
def test_a_yaml_switch(tmp_path: Path, text: str, is_on: bool) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(f"kvspec: {text}\n")
    args = prepare_server_args([*BASE, "--config", str(path)])
    assert (activation.config_of(args) is not None) == is_on


@pytest.mark.parametrize(
    ("since", "flags", "expected"),
    [
        ("0.5.21", f"{PREFILL_FLAGS} --enable-pd-role-switch", "keep their role"),
        ("0.5.21", f"{DECODE} --disaggregation-enable-kv-checksum", "checksums"),
        ("0.5.21", f"{DECODE} --disaggregation-decode-host-receive-threshold 0.5", "its own tiers"),
        ("0.5.22", f"{DECODE} --disaggregation-decode-host-receive-threshold 0", "its own tiers"),
        (
            "0.5.22",
            f"{DECODE} --disaggregation-decode-allocation-policy prefill_complete",
            "sends pages during the prefill",
        ),
        ("0.5.17", "--cuda-graph-backend-prefill full", "captures its own graphs"),
        ("0.5.17", '--cuda-graph-config {"prefill":{"backend":"full"}}', "captures its own graphs"),
        ("0.5.22", "--attn-dp-size 2", "data-parallel attention"),
        ("0.5.22", "--enable-kv-cache-sharding", "its own KV pool"),
        ("0.5.22", "--enable-watermark", "samples tokens itself"),
        ("0.5.22", "--speculative-use-block-verification", "its own rules"),
        ("0.5.23", "--enable-return-aux-hidden-states", "hidden states"),
        ("0.5.23", "--enable-nvidia-megakernel", "its own forwards"),
        ("0.5.23", "--enable-amd-monokernel", "its own forwards"),
        ("0.5.23", "--enable-paged-experts", "all experts in GPU memory"),
    ],
)
def test_flags_of_later_releases(
    capsys: pytest.CaptureFixture[str], since: str, flags: str, expected: str
) -> None:
    if parse_version(metadata.version("sglang")) < parse_version(since):
        pytest.skip("SGLang lacks this flag")
    line = refusal(capsys, "--kvspec", *flags.split())
    assert flags.removeprefix(DECODE).removeprefix(PREFILL_FLAGS).split()[0] in line
    assert re.search(r"\(allowed: (leave it unset|disabled|0\.0|1\.0|1|early)\)", line)
    assert expected in line


@pytest.mark.parametrize("flags", ["--kvspec true", "--kvspec=true", "--kvspec", "--kvspec false"])
def test_the_switch_may_have_a_value(flags: str) -> None:
    args = prepare_server_args([*BASE, *flags.split()])
    assert (activation.config_of(args) is not None) == ("false" not in flags)
    assert early_refusal_of(*BASE, *flags.split()) is None


def test_a_host_that_is_not_this_machine_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = certificates(tmp_path, "one")
    flags = (*PREFILL_FLAGS.split(), "--kvspec-transfer-keys", keys)
    line = refusal(capsys, "--kvspec", *flags, "--kvspec-transfer-host", "192.0.2.1")
    assert "--kvspec-transfer-host 192.0.2.1: " in line
    assert "allowed: an address of this machine" in line
    prepare_server_args([*BASE, "--kvspec", *flags, "--kvspec-transfer-host", "0.0.0.0"])


def test_a_decode_server_has_one_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = certificates(tmp_path, "one", "two")
    line = refusal(capsys, "--kvspec", *DECODE.split(), "--kvspec-transfer-keys", keys)
    assert f"--kvspec-transfer-keys {keys}" in line
    assert "one key on a decode server" in line
    prefill = (*PREFILL_FLAGS.split(), "--kvspec-transfer-keys", keys)
    prepare_server_args([*BASE, "--kvspec", *prefill])


@pytest.mark.parametrize("value", ["yes", "2", ""])
def test_a_wrong_debug_switch_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    monkeypatch.setenv("SGLANG_KVSPEC_DEBUG", value)
    line = refusal(capsys, "--kvspec")
    assert f"SGLANG_KVSPEC_DEBUG must be one of 1, true, 0, false, got {value!r}" in line
    # A plain server ignores the variable.
    prepare_server_args([*BASE])


@pytest.mark.parametrize(
    ("value", "is_on"),
    [("1", True), ("true", True), ("TRUE", True), ("0", False), ("False", False)],
)
def test_the_debug_switch(monkeypatch: pytest.MonkeyPatch, value: str, is_on: bool) -> None:
    monkeypatch.setenv("SGLANG_KVSPEC_DEBUG", value)
    assert activation.debug_mode() is is_on


def test_a_server_that_passes_requests_unchecked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not hasattr(envs, "SGLANG_RUST_SERVER"):
        pytest.skip("SGLang lacks this server")
    monkeypatch.setenv("SGLANG_RUST_SERVER", "true")
    line = refusal(capsys, "--kvspec")
    assert "SGLANG_RUST_SERVER=1 cannot be combined with --kvspec" in line
    assert "leave it unset" in line


@pytest.mark.parametrize("size", ["-1", "0", "64", "4096"])
def test_chunks_of_whole_pages(size: str) -> None:
    args = prepare_server_args([*BASE, "--kvspec", "--chunked-prefill-size", size])
    assert args.chunked_prefill_size == int(size)


def test_prefix_cache_without_the_switch(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "--radix-cache-backend", "kvspec")
    assert "--radix-cache-backend kvspec needs --kvspec" in line


def test_options_without_the_switch(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no effect without --kvspec" in refusal(capsys, "--kvspec-codec", "log4")


def test_transfer_backend_without_the_switch(capsys: pytest.CaptureFixture[str]) -> None:
    assert "needs --kvspec" in refusal(capsys, "--disaggregation-transfer-backend", "kvspec")


def test_algorithm_without_the_switch(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--kvspec" in refusal(capsys, "--speculative-algorithm", "kvspec")


def test_unknown_engine_option() -> None:
    with pytest.raises(ConfigError, match=r"'colour'.*allowed.*codec"):
        engine_args(model_path=str(DEMO_MODEL), device="cpu", kvspec=True, kvspec_colour=1)


MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "mla": (
        {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 4,
        },
        "MLA attention, which would need anchors of latents",
    ),
    "sliding": (
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 512},
        "sliding-window attention, which would need a second pool",
    ),
    "alternating": (
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "sliding_window": 512,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
        "sliding-window attention, which would need a second pool",
    ),
    "soft_caps": (
        {"attn_logit_softcapping": 50.0},
        "soft-capped attention logits, which would need the cap",
    ),
    "mamba": (
        {
            "architectures": ["FalconH1ForCausalLM"],
            "model_type": "falcon_h1",
            "mamba_d_ssm": 256,
            "mamba_n_heads": 4,
            "mamba_d_state": 16,
        },
        "Mamba or linear attention, which would need a snapshot",
    ),
    "encoder_decoder": (
        {"architectures": ["MllamaForConditionalGeneration"], "model_type": "mllama"},
        "encoder-decoder architecture, which would need cross attention",
    ),
    "head_size": ({"head_dim": 20}, "head size must be a multiple of 16"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_models_it_cannot_serve(tmp_path: Path, kind: str) -> None:
    changes, expected = MODELS[kind]
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((DEMO_MODEL / name).read_bytes())
    with pytest.raises(KVSpecError, match=expected):
        engine_args(model_path=str(tmp_path), device="cpu", kvspec=True)


def test_unsupported_sglang_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation.metadata, "version", lambda name: "0.5.99")
    monkeypatch.delenv(UNTESTED_NAME, raising=False)
    with pytest.raises(UnsupportedError, match=r"0\.5\.17, .*on a CPU, but SGLang 0\.5\.99"):
        engine_args(model_path=str(DEMO_MODEL), device="cpu", kvspec=True)


def test_a_release_that_was_tested_on_a_cpu_only_is_refused_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(activation.metadata, "version", lambda name: "0.5.20")
    monkeypatch.delenv(UNTESTED_NAME, raising=False)
    activation.check_sglang_version(on_gpu=False)
    with pytest.raises(UnsupportedError, match=r"SGLang 0\.5\.17 on a GPU, but SGLang 0\.5\.20"):
        activation.check_sglang_version(on_gpu=True)


def test_an_untested_release_is_tried_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(activation.metadata, "version", lambda name: "0.5.99")
    monkeypatch.setenv(UNTESTED_NAME, "1")
    activation.check_sglang_version(on_gpu=False)
    assert "SGLang 0.5.99 was not tested with --kvspec here" in caplog.text
    monkeypatch.setenv(UNTESTED_NAME, "maybe")
    with pytest.raises(ConfigError, match=f"{UNTESTED_NAME} must be one of 1, true, 0, false"):
        activation.check_sglang_version(on_gpu=False)


def test_an_engine_without_kvspec_switches_it_off_again() -> None:
    engine_args(model_path=str(DEMO_MODEL), device="cpu", kvspec=True)
    plain = engine_args(model_path=str(DEMO_MODEL), device="cpu")
    assert ENVIRONMENT_NAME not in os.environ
    kvspec = engine_args(model_path=str(DEMO_MODEL), device="cpu", kvspec=True)
    assert ENVIRONMENT_NAME in os.environ
    # Each may start child processes later.
    activation.follow(plain)
    assert ENVIRONMENT_NAME not in os.environ
    activation.follow(kvspec)
    assert ENVIRONMENT_NAME in os.environ


def test_a_hook_that_did_not_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    engine_args(model_path=str(DEMO_MODEL), device="cpu", kvspec=True)
    target = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {target})
    monkeypatch.setattr(HookRegistry, "apply_hooks", lambda: None)
    with pytest.raises(HookError, match=r"Req\.update_finish_state"):
        engine_args(model_path=str(DEMO_MODEL), device="cpu", kvspec=True)


def test_good_flags_from_a_yaml_file(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("kvspec: true\nkvspec-codec: uniform4\nkvspec-draft-len: 7\n")
    args = prepare_server_args([*BASE, "--config", str(path)])
    config = activation.config_of(args)
    assert config is not None
    assert (config.codec, config.draft_len) == ("uniform4", 7)
    assert (args.page_size, args.attention_backend) == (64, "kvspec")


def test_bad_flag_from_a_yaml_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("kvspec: true\nkvspec-codec: zip\n")
    assert "--kvspec-codec" in refusal(capsys, "--config", str(path))


def test_plain_arguments_are_untouched() -> None:
    args = prepare_server_args([*BASE])
    assert activation.config_of(args) is None
    assert ENVIRONMENT_NAME not in os.environ
    # Since 0.5.19, SGLang chooses later what was not given.
    chooses = parse_version(metadata.version("sglang")) < parse_version("0.5.19")
    chosen = (1, "torch_native") if chooses else (None, None)
    assert (args.page_size, args.attention_backend) == chosen
    assert args.speculative_algorithm is None


@pytest.mark.server
def test_help_lists_the_flags_as_one_group() -> None:
    command = [sys.executable, "-m", "sglang.launch_server", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    group = text[text.index("\nkvspec:") :]
    for flag in ("target", "codec", "draft-len", "recent-pages", "host-gb"):
        assert f"--kvspec-{flag}" in group
    assert "--kvspec-residual-hbm-fraction" in group


@pytest.mark.server
def test_the_launcher_prints_one_line_and_exits_2() -> None:
    launchers = ([sys.executable, "-m", "sglang.launch_server"], _serve_command())
    # Run the commands side by side: each imports for seconds, on one core.
    runs = [
        subprocess.Popen(
            [*launcher, *BASE, "--kvspec", "--kvspec-codec", "zip"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for launcher in launchers
    ]
    errors = [run.communicate()[1] for run in runs]
    for run, error in zip(runs, errors, strict=True):
        assert run.returncode == 2
        assert "Traceback" not in error
        names = "kivi, kvquant, log4, rotatekv, turboquant, uniform4"
        assert f"--kvspec-codec must be one of {names}, got 'zip'" in error


def _serve_command() -> list[str]:
    return [str(Path(sys.executable).with_name("sglang")), "serve"]
