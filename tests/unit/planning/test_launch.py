"""The command that `sglang-kvspec plan` recommends."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.flags import FLAGS
from sglang_kvspec.core.units import GIB
from sglang_kvspec.planning.costs import AcceptanceCurve
from sglang_kvspec.planning.devices import find_device
from sglang_kvspec.planning.forecast import MEASURED_ACCEPTANCE, Deployment, forecast
from sglang_kvspec.planning.launch import LEAST_HOST_GAIN, Launch, model_path, recommend, store_gib
from sglang_kvspec.planning.model_shape import ModelShape

MODELS = Path(__file__).resolve().parents[3] / "examples" / "models"
LLAMA = ModelShape.from_config(json.loads((MODELS / "llama-3.1-8b.json").read_text("utf-8")))


def deployment(gpu="H200", target="int8", **changes):
    curve = MEASURED_ACCEPTANCE[changes.get("codec", "uniform4")]
    return replace(Deployment(LLAMA, find_device(gpu), curve, target=target), **changes)


def launch_of(plan, context_len=32768) -> Launch:
    found = recommend(plan, forecast(plan, context_len), Path("folder/config.json"))
    assert found is not None
    return found


def value(launch, flag):
    return launch.arguments[launch.arguments.index(flag) + 1]


def test_residuals_stay_in_hbm_where_host_memory_brings_little():
    plan = deployment()
    chosen = forecast(plan, 32768)
    assert chosen.resident.tokens_per_s < chosen.fetched.tokens_per_s
    assert chosen.fetched.tokens_per_s < LEAST_HOST_GAIN * chosen.resident.tokens_per_s
    launch = launch_of(plan)
    assert launch.arguments == (
        *("python", "-m", "sglang.launch_server", "--model-path", "folder"),
        *("--mem-fraction-static", "0.88", "--kvspec", "--kvspec-target", "int8"),
        *("--max-running-requests", str(chosen.resident.cycle.num_requests)),
    )


def test_a_host_store_holds_all_requests_of_its_plan():
    # On this fast link fetching pays.
    plan = deployment("GH200", "exact", tp=2)
    chosen = forecast(plan, 32768)
    assert chosen.fetched.tokens_per_s > LEAST_HOST_GAIN * chosen.resident.tokens_per_s
    launch = launch_of(plan)
    cycle = chosen.fetched.cycle
    stored = cycle.num_requests * chosen.fetched.setting.request.residual * 2
    assert int(value(launch, "--kvspec-host-gb")) * GIB >= stored
    assert int(value(launch, "--kvspec-host-gb")) == store_gib(plan, chosen.fetched)
    assert value(launch, "--max-running-requests") == str(cycle.num_requests)
    assert value(launch, "--tp") == "2"


def test_settings_that_are_no_default_are_named():
    launch = launch_of(
        deployment(target="exact", codec="log4", page_size=128, memory_share=0.8), 8192
    )
    assert value(launch, "--kvspec-codec") == "log4"
    assert value(launch, "--page-size") == "128"
    assert value(launch, "--mem-fraction-static") == "0.8"


def test_a_draft_length_that_auto_never_reaches_is_named():
    plan = deployment("GH200", "exact", curve=AcceptanceCurve.geometric(1.0), draft_budget=1.0)
    chosen = forecast(plan, 131072)
    assert chosen.fetched.cycle.draft_len == 64
    launch = launch_of(plan, 131072)
    assert "--kvspec-host-gb" in launch.arguments
    assert value(launch, "--kvspec-draft-len") == "64"
    assert "--kvspec-draft-len" not in launch_of(deployment()).arguments


@pytest.mark.parametrize(
    ("budget", "flags"),
    [
        (None, ()),
        (0.05, ("--kvspec-draft-budget", "0.05")),
        (1.0, ("--kvspec-draft-view", "all")),
    ],
)
def test_a_budget_of_the_plan_is_one_of_the_server(budget, flags):
    launch = launch_of(deployment(draft_budget=budget), 8192)
    given = [each for each in launch.arguments if each.startswith("--kvspec-draft")]
    assert given == list(flags[:1])
    assert not flags or value(launch, flags[0]) == flags[1]


@pytest.mark.parametrize(("weights", "asked"), [("target", False), ("int4", True)])
def test_weights_of_the_plan_are_those_of_the_server(weights, asked):
    launch = launch_of(deployment(draft_weights=weights), 8192)
    assert ("--kvspec-draft-weights" in launch.arguments) == asked
    assert not asked or value(launch, "--kvspec-draft-weights") == weights


def test_where_speculation_does_not_pay_it_is_plain_sglang():
    launch = launch_of(deployment(target="exact", curve=AcceptanceCurve.geometric(0.1)))
    assert not any(argument.startswith("--kvspec") for argument in launch.arguments)
    assert "does not pay" in launch.reason


def test_a_host_store_is_no_larger_than_the_host():
    # Not a whole number of GiB.
    plan = deployment("GH200", "exact", host_bytes=64e9)
    launch = launch_of(plan)
    assert float(value(launch, "--kvspec-host-gb")) * GIB <= 64e9
    assert float(value(launch, "--kvspec-host-gb")) == pytest.approx(64e9 / GIB, abs=0.01)


@pytest.mark.parametrize("gpu", ["A100-80GB", "B200", "L40S", "RTX-PRO-6000"])
def test_a_gpu_without_figures_gets_plain_sglang(gpu):
    launch = launch_of(deployment(gpu))
    assert not any(argument.startswith("--kvspec") for argument in launch.arguments)
    assert f"never measured on {gpu}" in launch.reason


def test_pages_that_the_server_refuses_are_refused():
    with pytest.raises(ConfigError, match=r"--page-size 128 .* --target int8 .*allowed: 64"):
        deployment(page_size=128)


def test_nothing_is_recommended_where_nothing_fits():
    plan = deployment("L40S", "exact", memory_share=0.35)
    chosen = forecast(plan, 131072)
    assert not chosen.fetched.tokens_per_s
    assert recommend(plan, chosen, Path("folder")) is None


@pytest.mark.parametrize("gpu", ["H200", "GH200", "H100", "L40S"])
@pytest.mark.parametrize("context_len", [4096, 131072])
def test_every_flag_is_one_of_the_server(gpu, context_len):
    plan = deployment(gpu, "exact", host_bytes=inf)
    launch = recommend(plan, forecast(plan, context_len), Path("folder"))
    ours = {flag.name for flag in FLAGS} | {"--kvspec"}
    given = {argument for argument in launch.arguments if argument.startswith("--kvspec")}
    assert given <= ours


def test_the_model_is_the_folder_of_its_configuration(tmp_path):
    assert model_path(tmp_path) == str(tmp_path)
    assert model_path(tmp_path / "config.json") == str(tmp_path)
    assert model_path(MODELS / "llama-3.1-8b.json") == "MODEL"
