"""The floor of a round, the time above it, and the report of a profile."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from serving.breakdown import IDLE, Breakdown
from serving.floor import arithmetic_ms, copy_bandwidth, device_of, floor_ms, work_of
from serving.points import Model
from serving.profile_report import DRAFTING, PLAIN, ProfileReport
from serving.profile_table import profile_lines
from serving.profiled_run import ProfiledRun
from serving.trace import GpuEvent
from serving.trace_rounds import Phase, Round

from sglang_kvspec.planning.model_shape import ModelShape

CONFIG = json.loads((Model.find("8b").folder / "config.json").read_text(encoding="utf-8"))
SHAPE = ModelShape.from_config(CONFIG)
# Llama-3.1-8B: all parameters except the embedding, 2 bytes each.
WEIGHTS = 2 * (8_030_261_248 - 128_256 * 4096 - 65 * 4096)
# uniform4 over all layers and heads: K and V of 64 tokens, with codes, and scales and zeros of 2
# bytes.
ANCHOR = 32 * 8 * (64 * 128 + 4 * (128 + 64)) / 64
PLAIN_KV = 2 * 32 * 8 * 128 * 2


def run(**changed: Any) -> ProfiledRun:
    made = ProfiledRun(
        label="8b.32k.bs16",
        model_config=CONFIG,
        system="exact",
        target="exact",
        codec="uniform4",
        acceptance="replayed",
        requests=16,
        prompt_len=32768,
        output_len=512,
        context_len=33000.0,
        num_steps=5,
        iteration_ms=40.0,
        page_size=64,
        tp_size=1,
        kvspec_config={"recent_pages": 1},
        counters={"drafted": 600, "accepted": 500, "verifications": 100},
        server_timing={"draft_iter_ms": 8.0, "verify_ms": 9.0},
        acceptance_source="CURVE",
        machine="NVIDIA H200",
        commit="abc",
    )
    return replace(made, **changed)


def test_drafts_read_weights_and_anchors_a_step_and_verification_the_target():
    # A request takes part in 6 of 8 steps.
    read = work_of(run(), SHAPE, steps=8).bytes_read()
    past, window = 33000 - 64, 64 * PLAIN_KV
    assert read == pytest.approx(
        {
            (Phase.STEPS, "matrix products"): 8 * WEIGHTS,
            (Phase.STEPS, "attention"): 8 * 12 * (past * ANCHOR + window),
            (Phase.REST, "matrix products"): WEIGHTS,
            (Phase.REST, "attention"): 16 * (past * PLAIN_KV + window),
        }
    )


def test_an_8_bit_target_is_anchors_and_as_many_codes():
    work = work_of(run(target="int8", system="int8"), SHAPE, steps=8)
    codes = 32 * 8 * 128
    assert work.verify_kv_bytes == pytest.approx((33000 - 64) * (ANCHOR + codes) + 64 * PLAIN_KV)


@pytest.mark.parametrize(("arguments", "element"), [([], 2), (["--kv-cache-dtype=fp8_e4m3"], 1)])
def test_plain_sglang_reads_all_kv_every_step(arguments, element):
    plain = run(target=None, system="bf16", server_arguments=arguments, counters={})
    assert work_of(plain, SHAPE, steps=1).bytes_read() == pytest.approx(
        {
            (Phase.STEPS, "matrix products"): WEIGHTS,
            (Phase.STEPS, "attention"): 16 * 33000 * PLAIN_KV * element / 2,
        }
    )


def test_a_rank_reads_its_share():
    whole, half = (
        work_of(run(), shape, steps=8).bytes_read() for shape in (SHAPE, SHAPE.of_rank(2))
    )
    assert half == pytest.approx({place: count / 2 for place, count in whole.items()})


def test_floor_and_arithmetic_in_milliseconds():
    work = work_of(run(), SHAPE, steps=8)
    found = floor_ms(work, bandwidth=4e12)
    assert found[Phase.REST, "matrix products"] == pytest.approx(WEIGHTS / 4e9)
    device = device_of("NVIDIA H200")
    assert device is not None
    arithmetic = arithmetic_ms(work, SHAPE, device)
    tokens = 16 * 7
    assert arithmetic[Phase.REST, "matrix products"] == pytest.approx(WEIGHTS * tokens / 989e9)
    assert arithmetic[Phase.REST, "attention"] == pytest.approx(
        4 * 32 * 32 * 128 * tokens * 33000 / 989e9
    )


def test_gpus_are_known_by_name():
    found = [device_of(name) for name in ("2 x NVIDIA H200", "NVIDIA H100 80GB HBM3", "x86 CPU")]
    assert [device and device.name for device in found] == ["H200", "H100", None]


def test_bandwidth_is_that_of_the_same_gpu():
    results = Path(__file__).parents[3] / "benchmarks" / "results" / "attention_h200.json"
    assert copy_bandwidth(results, "NVIDIA H200") == pytest.approx(4.295e12, rel=1e-3)
    assert copy_bandwidth(results, "2 x NVIDIA H200") == copy_bandwidth(results, "NVIDIA H200")
    assert copy_bandwidth(results, "NVIDIA H100 80GB HBM3") is None


def a_round(scale: float) -> Round:
    """Make a round of two draft steps of 5 ms and a verification of 8 ms, then 3 ms idle, all times
    `scale`."""
    times: list[tuple[str, str, float, float, int | None]] = [
        ("nvjet", "matrix products", 0, 4, 1),
        ("draft_attention", "attention", 4, 5, 1),
        ("nvjet", "matrix products", 5, 9, 2),
        ("draft_attention", "attention", 9, 10, 2),
        ("nvjet", "matrix products", 10, 12, None),
        ("verify_attention", "attention", 12, 16.5, None),
        ("odd_kernel", "other", 16.5, 17, None),
        ("odder_kernel", "other", 17, 18, None),
    ]
    events = tuple(
        GpuEvent(begin * 1e3 * scale, end * 1e3 * scale, name, category, replay)
        for name, category, begin, end, replay in times
    )
    return Round(0.0, 10e3 * scale, 21e3 * scale, events, frozenset((1, 2)))


FLOOR = {
    (Phase.STEPS, "matrix products"): 4.5,
    (Phase.STEPS, "attention"): 1.9,
    (Phase.REST, "matrix products"): 2.5,
    (Phase.REST, "attention"): 4.0,
}


@pytest.fixture
def breakdown() -> Breakdown:
    # The means of these two rounds are those of a round of scale 1.
    arithmetic = {(Phase.REST, "attention"): 3.25}
    return Breakdown([a_round(0.9), a_round(1.1)], FLOOR, arithmetic, DRAFTING)


def test_the_largest_gaps_to_the_floor_are_named(breakdown):
    found = breakdown.largest_losses(5)
    assert [(loss.place, round(loss.ms, 6)) for loss in found] == [
        ((Phase.STEPS, "matrix products"), 3.5),
        ((Phase.REST, IDLE), 3.0),
        ((Phase.REST, "other"), 1.5),
        ((Phase.REST, "attention"), 0.5),
        ((Phase.STEPS, "attention"), 0.1),
    ]
    assert [breakdown.sentence(loss) for loss in found[:4]] == [
        "drafting, matrix products: 8.00 ms a round, 3.50 ms above the byte floor of 4.50 ms, 1.78 "
        "times this floor (nvjet 8.00).",
        "verifying and housekeeping, idle: 3.00 ms a round in which nothing runs on the GPU, in 1 "
        "gaps, the largest of 3.30 ms between odder_kernel and the next round.",
        "verifying and housekeeping, other: 1.50 ms a round, all above a floor that counts weights "
        "and KV alone (odder_kernel 1.00, odd_kernel 0.50).",
        "verifying and housekeeping, attention: 4.50 ms a round, 0.50 ms above the byte floor of "
        "4.00 ms, 1.12 times this floor; the arithmetic takes 3.25 ms at the published speed "
        "(verify_attention 4.50).",
    ]


def test_what_no_category_claims_is_listed(breakdown):
    assert breakdown.other_kernels() == [
        "verifying and housekeeping: odder_kernel 1.000 ms a round",
        "verifying and housekeeping: odd_kernel 0.500 ms a round",
    ]
    assert breakdown.missing() == []


def test_a_floor_without_kernels_is_reported():
    round = a_round(1)
    events = tuple(e for e in round.events if e.name != "verify_attention")
    found = Breakdown([replace(round, events=events)], FLOOR, {}, DRAFTING)
    assert found.missing() == [
        "verifying and housekeeping: no kernel was found in the category 'attention'"
    ]


def test_report_says_that_acceptance_is_replayed(breakdown, tmp_path):
    found = ProfileReport(run(), breakdown, bandwidth=4.295e12)
    found.write(tmp_path / "profile.json")
    record = json.loads((tmp_path / "profile.json").read_text())
    assert record["bench"] == "profile"
    assert record["machine"] == "NVIDIA H200"
    assert record["settings"]["acceptance"] == "acceptance is REPLAYED from CURVE"
    assert len(record["settings"]["largest_gaps_to_the_floor"]) == 3
    figures = {figure["name"]: figure for figure in record["figures"]}
    assert len(figures) == len(record["figures"])

    expected = {
        "round_ms": (21.0, sum(FLOOR.values())),
        "round_unprofiled_ms": (40.0, None),
        "idle_ms": (3.0, 0.0),
        "draft_steps": (2.0, None),
        "draft_step_ms": (5.0, 3.2),
        "accepted": (5.0, None),
        "verify.gpu_ms": (8.0, 6.5),
        "verify.matrix_products_ms": (2.0, 2.5),
        "draft.idle_ms": (0.0, 0.0),
    }
    for name, (value, floor) in expected.items():
        figure = figures[f"profile.8b.32k.bs16.exact.{name}"]
        assert figure["value"] == pytest.approx(value), name
        assert figure["baseline"] == (None if floor is None else pytest.approx(floor)), name

    console = Console(width=150, file=StringIO())
    with console.capture() as capture:
        for line in found.console():
            console.print(line, markup=False)
    text = capture.get()
    assert text.splitlines()[0] == "acceptance is REPLAYED from CURVE"
    assert text.count("REPLAYED") == 2
    assert "a round takes 0.53 times as long as the 40.00 ms" in text
    assert "Infinity" not in (tmp_path / "profile.json").read_text()

    lines = profile_lines(record, "acceptance is REPLAYED from CURVE")
    assert lines[0].startswith("| acceptance is REPLAYED from CURVE: a round of 16 requests at ")
    assert {line.count("|") for line in lines if line.startswith("|")} == {5}
    assert "| verifying, housekeeping: matrix products | 2.0 | 2.5 | 0.80 |" in lines
    assert "| a draft step | 5.0 | 3.2 | 1.56 |" in lines
    numbered = [line for line in lines if line[:2] in ("1.", "2.", "3.")]
    assert len(numbered) == 3
    assert not any("between" in line or "(" in line for line in numbered)


def test_report_of_plain_sglang(tmp_path):
    plain = run(target=None, system="bf16", acceptance="", counters={}, server_timing={})
    step = replace(a_round(1), steps=frozenset((1, 2)))
    found = ProfileReport(plain, Breakdown([step], FLOOR, {}, PLAIN), bandwidth=4e12)
    found.write(tmp_path / "profile.json")
    record = json.loads((tmp_path / "profile.json").read_text())
    names = {figure["name"] for figure in record["figures"]}
    assert "profile.8b.32k.bs16.bf16.step.matrix_products_ms" in names
    assert not any("draft" in name for name in names)
    assert all(figure["spread"] is None for figure in record["figures"])


def test_a_run_is_read_as_it_was_written(tmp_path):
    run().write(tmp_path / "a.run.json")
    assert ProfiledRun.read(tmp_path / "a.run.json") == run()
