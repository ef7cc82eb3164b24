"""Plug-ins of other packages in a real server. tests/plugins has one file for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from harness.client import GenerateClient
from harness.models import DEMO_MODEL
from harness.plugin_folders import PLUGINS, python_path_with
from harness.references import PlainReference, Setting, Workload
from harness.servers import ServerSwitch
from harness.suite import run_one_by_one

from sglang_kvspec.adapters.model_check import check_model, model_config_of
from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.core.errors import UnsupportedError
from sglang_kvspec.core.registry import forget_entries

pytestmark = pytest.mark.server

# Lengths that end a page, that begin one, and of several pages.
WORKLOAD = Workload(DEMO_MODEL, (128, 193, 700, 1500), max_new_tokens=64)
FAMILIES = False


def test_a_codec_of_another_package_serves_losslessly(
    servers: ServerSwitch, reference: PlainReference
) -> None:
    spec = Setting("exact", "toy").server(DEMO_MODEL)
    client = servers.use(replace(spec, environment=(("PYTHONPATH", python_path_with(PLUGINS)),)))
    reference.check(run_one_by_one(client, reference.suite.prompts, lambda: None))
    report = client.kvspec_report()
    assert report["config"]["codec"] == "toy"
    # Drafts read the codec's anchors: a sign for each value, and 64 bits of metadata for each
    # channel and page.
    assert report["anchor_bits_per_element"] == 2
    assert report["counters"]["drafted"] > report["counters"]["accepted"] > 0


def served_with(servers: ServerSwitch, *flags: str) -> GenerateClient:
    """Return a client of a server of demo-5m that finds the plug-ins. Without other flags it works
    in rounds, with the default codec."""
    spec = Setting("exact", "uniform4", "rounds").server(DEMO_MODEL, *flags)
    return servers.use(replace(spec, environment=(("PYTHONPATH", python_path_with(PLUGINS)),)))


def test_a_drafter_of_another_package_serves_losslessly(
    servers: ServerSwitch, reference: PlainReference
) -> None:
    client = served_with(servers, "--kvspec-drafter=output_lookup")
    reference.check(run_one_by_one(client, reference.suite.prompts, lambda: None))
    report = client.kvspec_report()
    assert report["config"]["drafter"] == "output_lookup"
    assert report["counters"]["drafted"] > report["counters"]["accepted"] > 0


@pytest.mark.parametrize("schedule", ["rounds", "staggered"])
@pytest.mark.parametrize("view", ["sinks_recent", "sinks_recent_by_head"])
def test_a_draft_view_of_another_package_serves_losslessly(
    servers: ServerSwitch, reference: PlainReference, view: str, schedule: str
) -> None:
    flags = (f"--kvspec-draft-view={view}", f"--kvspec-schedule={schedule}")
    client = served_with(servers, *flags)
    reference.check(run_one_by_one(client, reference.suite.prompts, lambda: None))
    report = client.kvspec_report()
    assert report["config"]["draft_view"] == view
    assert report["counters"]["drafted"] > report["counters"]["accepted"] > 0


@pytest.mark.parametrize("drafter", ["self", "output_lookup"])
def test_a_scheduler_of_another_package_serves_losslessly(
    servers: ServerSwitch, reference: PlainReference, drafter: str
) -> None:
    flags = ("--kvspec-schedule=fixed_lengths", f"--kvspec-drafter={drafter}")
    client = served_with(servers, *flags)
    reference.check(run_one_by_one(client, reference.suite.prompts, lambda: None))
    report = client.kvspec_report()
    assert report["resolved"]["schedule"] == "fixed_lengths"
    assert report["counters"]["drafted"] > report["counters"]["accepted"] > 0
    # The schedule drafts four tokens at a time, and all requests verify in every round.
    longest = max(int(length) for length in report["counters"]["accept_histogram"])
    assert longest <= 4
    assert not report["counters"]["drafted_piggyback"]


def test_anchors_of_two_bits_serve_losslessly(
    servers: ServerSwitch, reference: PlainReference
) -> None:
    client = served_with(servers, "--kvspec-anchor-bits=2")
    reference.check(run_one_by_one(client, reference.suite.prompts, lambda: None))
    report = client.kvspec_report()
    assert 2 < report["anchor_bits_per_element"] < 3
    assert report["counters"]["accepted"] > 0


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the plug-ins in this process, too."""
    monkeypatch.syspath_prepend(str(PLUGINS))
    forget_entries()
    yield
    forget_entries()


@pytest.mark.usefixtures("_installed")
def test_a_codec_without_kernels_is_refused_on_a_gpu() -> None:
    model = model_config_of({"model_path": str(DEMO_MODEL), "dtype": "bfloat16"})
    config = KVSpecConfig(codec="toy")
    check_model(config, model, 64)
    told = "--kvspec-codec toy has no GPU kernels .*allowed on a GPU: log4, uniform4"
    with pytest.raises(UnsupportedError, match=told):
        check_model(config, model, 64, on_gpu=True)
