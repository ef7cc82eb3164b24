"""Counters, the report built from them, and what Prometheus sees of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from prometheus_client import REGISTRY

from sglang_kvspec.core.config import KVSpecConfig
from sglang_kvspec.runtime.metrics import MetricsExporter, SpecCounters
from sglang_kvspec.runtime.pressure import Pressure
from sglang_kvspec.runtime.report import build_report, resolved_values
from sglang_kvspec.runtime.speeds import Speeds


@pytest.fixture
def counters():
    counters = SpecCounters()
    for num_piggyback in (2, 0, 0, 0):
        counters.iterations += 1
        counters.observe_piggyback(num_piggyback)
    counters.waits = 3
    for num_drafts, num_accepted in ((5, 5), (5, 2), (3, 2), (0, 0)):
        counters.observe_verification(num_drafts, num_accepted)
    for hits in ((64, 0, 128), (0, 192, 0), (64, 0, 0)):
        counters.observe_hits(*hits)
    counters.observe_kept_anchors(host=64, disk=32)
    return counters


@pytest.fixture
def kv(make_kv):
    """KV cache with two pages in the store, one of them in the cache, and some bytes moved."""
    kv = make_kv(cache_pages=1)
    pages = torch.randn((2, 32, 2, 16), generator=torch.Generator().manual_seed(0))
    kv.begin_encode([1, 2])
    kv.encode(0, torch.tensor([1, 2]), pages, pages)
    kv.finish_encode([1, 2])
    kv.read_target(0, torch.tensor([1, 2]))
    kv.open_pages([3])
    return kv


@pytest.fixture
def exporter():
    """Exporter whose metrics leave the default registry after the test."""
    before = set(REGISTRY._collector_to_names)
    yield MetricsExporter("toy")
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def test_counters_add_up(counters):
    assert (counters.iterations, counters.mixed_iterations, counters.waits) == (4, 1, 3)
    assert (counters.drafted, counters.accepted, counters.rejected) == (13, 9, 4)
    assert (counters.verifications, counters.emitted) == (4, 13)
    assert counters.accept_histogram == {5: 1, 2: 2, 0: 1}
    assert counters.mean_accept_len == 9 / 4
    assert SpecCounters().mean_accept_len == 0


def test_report_is_plain_json_and_agrees_with_its_sources(counters, kv):
    config = KVSpecConfig(draft_len=5, host_gb=1.5)
    report = json.loads(json.dumps(build_report(config, kv, counters, 3), allow_nan=False))
    assert KVSpecConfig.from_dict(report["config"]) == config
    assert report["max_draft_len"] == 5
    pools = report["pools"]
    assert pools["num_pages"] == 12
    assert pools["num_pages_allocated"] == 3
    assert pools["window_pages_used"] == 1
    assert pools["residual_cache_pages"] == 1
    assert pools["max_total_num_tokens"] == 12 * 32
    assert pools["bytes_per_token_plain"] == 2 * 2 * 16 * 4
    assert pools["bytes_per_token_anchor"] * 32 == 2 * kv.codec.anchor_bytes
    assert pools["kv_bytes_allocated"] == kv.hbm_nbytes
    assert pools["kv_bytes"] == kv.plan.hbm_bytes
    assert pools["limited_by"] == "KV memory"
    assert report["page_states"] == {
        "ABSENT": 11,
        "IN_FLIGHT": 0,
        "STORED": 1,
        "FETCHING": 0,
        "RESIDENT": 1,
    }
    assert report["bytes_streamed"] == kv.plan.page_bytes.residual
    assert report["counters"]["accept_histogram"] == {"0": 1, "2": 2, "5": 1}
    assert report["counters"]["rejected"] == 4
    assert report["counters"]["hit_tokens"] == {
        "resident": 128,
        "host": 192,
        "disk": 128,
        "remote": 0,
    }
    assert report["counters"]["kept_anchors"] == {"host": 64, "disk": 32}
    assert report["counters"]["verification_wait_iterations"] == 3
    assert report["anchor_bits_per_element"] == kv.codec.anchor_bits_per_element


def test_report_of_an_idle_server(make_kv):
    report = build_report(KVSpecConfig(), make_kv(store=False), SpecCounters(), 0)
    assert report["ngram"] == {
        "steps": 0,
        "proposing": 0,
        "proposed": 0,
        "kept": 0,
        "tokens_per_step": None,
        "step_ms": {},
    }
    assert report["counters"]["mean_accept_len"] == 0
    assert report["pools"]["residual_store_pages"] == report["pools"]["host_bytes"] == 0
    json.dumps(report, allow_nan=False)


def test_resolved_values_are_in_the_units_of_the_flags(kv):
    config = KVSpecConfig(draft_len=5, prefix_server="tcp://h:1", prefix_publish_gbps=0.5)
    plan = kv.plan
    resolved = resolved_values(config, plan, schedule="rounds", view="all", num_sharing=2)
    json.dumps(resolved, allow_nan=False)
    assert (resolved["schedule"], resolved["draft_view"]) == ("rounds", "all")
    assert resolved["max_draft_len"] == 5
    assert resolved["host_bytes"] == 2 * 12 * plan.page_bytes.residual
    assert resolved["host_gb"] * 2**30 == resolved["host_bytes"]
    assert resolved["residual_cache_bytes"] == plan.page_bytes.residual
    assert resolved["residual_hbm_fraction"] == plan.page_bytes.residual / plan.hbm_bytes
    assert resolved["recent_window_bytes"] == plan.window_pages * plan.page_bytes.plain
    assert (resolved["prefix_publish_gbps"], resolved["prefix_wait_ms"]) == (0.5, 1000)
    assert resolved["prefix_gb"] is None
    assert resolved["prefix_host_gb"] is None


def test_resolved_values_of_prefix_tiers(kv):
    config = KVSpecConfig(prefix_dir="/somewhere", prefix_host_gb=2.5)
    resolved = resolved_values(config, kv.plan, schedule="rounds", view="all", num_sharing=1)
    assert (resolved["prefix_gb"], resolved["prefix_host_gb"]) == (16, 2.5)
    assert resolved["prefix_publish_gbps"] is resolved["prefix_wait_ms"] is None


def value(name, **labels):
    return REGISTRY.get_sample_value(f"sglang:kvspec_{name}", {"model_name": "toy"} | labels)


def test_published_values(exporter, counters, kv):
    exporter.publish(counters, kv, Speeds(kv.residuals), Pressure())
    assert value("drafted_tokens_total") == 13
    assert value("accepted_tokens_total") == 9
    assert value("rejected_tokens_total") == 4
    assert value("verifications_total") == 4
    assert value("verification_wait_iterations_total") == 3
    assert value("accept_length_count") == 4
    assert value("accept_length_sum") == 9
    assert value("accept_length_bucket", le="2.0") == 3
    assert value("residual_bytes_total", path="streamed") == kv.plan.page_bytes.residual
    assert value("residual_bytes_total", path="fetched") == 0
    assert value("prefix_hit_tokens_total", tier="resident") == 128
    assert value("prefix_hit_tokens_total", tier="host") == 192
    assert value("prefix_hit_tokens_total", tier="disk") == 128
    assert value("prefix_kept_anchor_tokens_total", tier="host") == 64
    assert value("prefix_kept_anchor_tokens_total", tier="disk") == 32
    assert value("pages", state="stored") == 1
    assert value("pages", state="resident") == 1
    assert value("pages", state="absent") == 11
    assert value("anchor_bits_per_element") == pytest.approx(kv.codec.anchor_bits_per_element)


def test_publishing_again_adds_only_what_is_new(exporter, counters, kv):
    exporter.publish(counters, kv, Speeds(kv.residuals), Pressure())
    exporter.publish(counters, kv, Speeds(kv.residuals), Pressure())
    assert value("accepted_tokens_total") == 9
    assert value("residual_bytes_total", path="streamed") == kv.plan.page_bytes.residual
    assert value("accept_length_count") == 4
    counters.observe_verification(8, 5)
    counters.drafts.observe_step(num_proposed=4, num_kept=1)
    counters.waits += 1
    counters.observe_hits(0, 64, 0)
    counters.observe_kept_anchors(host=0, disk=64)
    kv.residuals.evict([1])
    kv.residuals.start_fetch([2])
    exporter.publish(counters, kv, Speeds(kv.residuals), Pressure())
    assert value("prefix_hit_tokens_total", tier="host") == 256
    assert value("prefix_hit_tokens_total", tier="disk") == 128
    assert value("prefix_kept_anchor_tokens_total", tier="host") == 64
    assert value("prefix_kept_anchor_tokens_total", tier="disk") == 96
    assert value("ngram_draft_steps_total") == 1
    assert value("ngram_proposed_tokens_total") == 4
    assert value("ngram_kept_tokens_total") == 1
    assert value("accepted_tokens_total") == 14
    assert value("rejected_tokens_total") == 7
    assert value("accept_length_count") == 5
    assert value("accept_length_bucket", le="8.0") - value("accept_length_bucket", le="4.0") == 2
    assert value("verification_wait_iterations_total") == 4
    assert value("residual_bytes_total", path="fetched") == kv.plan.page_bytes.residual
    assert value("pages", state="resident") == 0
    assert value("pages", state="fetching") == 1


def test_metric_names_are_unique_and_ours(exporter):
    names = [metric.name for metric in REGISTRY.collect() if "kvspec" in metric.name]
    assert len(names) == len(set(names)) == 23
    assert all(name.startswith("sglang:kvspec_") for name in names)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        MetricsExporter("toy")


def test_every_possible_accept_length_has_a_finite_bucket(exporter, kv):
    counters = SpecCounters()
    for accepted in range(65):
        counters.observe_verification(64, accepted)
    exporter.publish(counters, kv, Speeds(kv.residuals), Pressure())
    assert value("accept_length_count") == value("accept_length_bucket", le="64.0") == 65


class MeasuredFetches:
    """Residuals whose fetches took these (bytes, seconds)."""

    def __init__(self, *times):
        self.times = times

    def take_fetch_times(self):
        return self.times


def test_speeds_are_no_metric_before_they_are_observed(exporter, counters, kv):
    speeds = Speeds(MeasuredFetches((1 << 21, 0.001)))
    exporter.publish(counters, kv, speeds, Pressure())
    assert value("link_bytes_per_second") is None
    assert value("iteration_seconds") is None
    speeds.note_iteration(0.25)
    exporter.publish(counters, kv, speeds, Pressure())
    assert value("link_bytes_per_second") is None
    assert value("iteration_seconds") == pytest.approx(0.25)
    speeds.note_fetches()
    exporter.publish(counters, kv, speeds, Pressure())
    assert value("link_bytes_per_second") == pytest.approx((1 << 21) / 0.001)


def test_speeds_are_reported_without_their_guesses():
    speeds = Speeds(MeasuredFetches((1 << 21, 0.001), (1 << 21, 0.002), (1 << 21, 0.004)))
    assert speeds.report() == {
        "link_bytes_per_s": None,
        "link_observations": 0,
        "iteration_s": None,
        "iteration_observations": 0,
    }
    speeds.note_fetches()
    assert speeds.report()["link_bytes_per_s"] == pytest.approx((1 << 21) / 0.002)
    assert speeds.report()["link_observations"] == 3


PUBLISH_IN_ONE_OF_SEVERAL_PROCESSES = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from types import SimpleNamespace
from collections import Counter
from sglang_kvspec.runtime.metrics import MetricsExporter, SpecCounters
from sglang_kvspec.runtime.pressure import Pressure

residuals = SimpleNamespace(
    bytes_fetched=0, bytes_streamed=0, table=SimpleNamespace(counts=lambda: {})
)
kv = SimpleNamespace(residuals=residuals, codec=SimpleNamespace(anchor_bits_per_element=4.5))
exporter, pressure = MetricsExporter("toy"), Pressure()
pressure.note_retraction("test", 1)
for iteration_s in (None, 0.25):
    speeds = SimpleNamespace(observed_link_bytes_per_s=None, observed_iteration_s=iteration_s)
    exporter.publish(SpecCounters(), kv, speeds, pressure)
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    print(generate_latest(registry).decode())
    print("=====")
"""


def test_unobserved_values_are_no_metric_of_several_processes(tmp_path):
    """SGLang collects metrics of its processes from files. A sample enters its file together with
    its labels."""
    run = subprocess.run(
        [sys.executable, "-c", PUBLISH_IN_ONE_OF_SEVERAL_PROCESSES],
        env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    before, after, _ = run.stdout.split("=====")
    assert "sglang:kvspec_link_bytes_per_second{" not in before + after
    assert "sglang:kvspec_iteration_seconds{" not in before
    assert 'sglang:kvspec_iteration_seconds{model_name="toy"} 0.25' in after
    assert 'reason="memory"' in after
    assert 'reason="test"' not in after


def test_pressure_is_published(exporter, counters, kv):
    pressure = Pressure()
    pressure.note_decision(lacks_pages=True)
    pressure.note_queue(5)
    pressure.note_retraction("memory", 2)
    pressure.note_retraction("test", 1)
    for _ in range(2):
        exporter.publish(counters, kv, Speeds(kv.residuals), pressure)
    assert value("requests_waiting_for_pages") == 5
    assert value("retracted_requests_total", reason="memory") == 2
    assert value("retracted_requests_total", reason="priority") == 0
    assert value("retracted_requests_total", reason="test") is None
    # The queue empties without a decision, so no request waits for pages.
    pressure.note_queue(0)
    pressure.note_retraction("memory", 1)
    exporter.publish(counters, kv, Speeds(kv.residuals), pressure)
    assert value("requests_waiting_for_pages") == 0
    assert value("retracted_requests_total", reason="memory") == 3
    assert pressure.report()["most_waiting_for_pages"] == 5


def test_requests_that_wait_for_something_else_do_not_wait_for_pages():
    pressure = Pressure()
    pressure.note_decision(lacks_pages=False)
    pressure.note_queue(3)
    assert (pressure.waiting, pressure.held_back) == (0, 0)
