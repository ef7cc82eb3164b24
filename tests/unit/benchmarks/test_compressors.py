"""Methods of bench_compressors.py, their bytes and their expected speed."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import bench_compressors
import pytest
import torch
from acceptance.model import LlamaShape
from acceptance.report import Figure
from acceptance.rounds import Rounds
from collect_compressors import (
    RESULTS,
    freed_figure,
    place_figures,
    serving_figures,
    summary,
)
from compressors.costs import (
    CONTEXT_LEN,
    MODEL,
    NUM_REQUESTS,
    accepted_curve,
    expected_tokens_per_s,
    plain_tokens_per_s,
    residency,
)
from compressors.doc_table import accepted_table, compressor_tables
from compressors.figures import DENSE4_METHOD, figures_of
from compressors.measured import MODULE, measured_of, source_of
from compressors.methods import all_anchors, all_choosers, anchors_of, chooser_of
from compressors.names import DENSE4, DENSE4_LABEL, PLAIN, Method
from compressors.plot import draw
from compressors.points import WHATS, Point, cheapest, front, points_of, read_places, title_of

from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.seams import CODECS, SCORERS
from sglang_kvspec.planning.compressor_choice import Measured
from sglang_kvspec.planning.costs import AcceptanceCurve
from sglang_kvspec.planning.devices import find_device
from sglang_kvspec.planning.forecast import Deployment
from sglang_kvspec.planning.measured_compressors import DRAFT_LEN, MEASURED, PLACES
from sglang_kvspec.planning.model_shape import ModelShape
from sglang_kvspec.planning.throughput import cycle_of

CURVE = AcceptanceCurve.geometric(0.97, 16)
SHAPE = LlamaShape(3, 4, 2, 64, 1e-5, 1e6)


def deployment():
    model = ModelShape.from_config(json.loads(MODEL.read_text(encoding="utf-8")))
    return Deployment(model, find_device("H200"), CURVE, "uniform4")


def test_all_anchors_of_4_bits_are_as_fast_as_the_planner_says():
    setting = deployment().setting(CONTEXT_LEN)
    best = max(cycle_of(setting, n, NUM_REQUESTS, 0).tokens_per_s for n in range(1, 17))
    found = expected_tokens_per_s(anchors_of(DENSE4, 64), 1.0, CURVE, rescored=False)
    assert found == pytest.approx(best)
    assert plain_tokens_per_s() < found


def test_a_share_of_the_anchors_costs_what_the_planner_says_for_pages():
    base = deployment()
    costs = replace(base.costs(0.1), score_kv_token_s=0.0)
    setting = replace(base.setting(CONTEXT_LEN), costs=costs)
    best = max(cycle_of(setting, n, NUM_REQUESTS, 0).tokens_per_s for n in range(1, 17))
    found = expected_tokens_per_s(anchors_of(DENSE4, 64), 0.1, CURVE, rescored=False)
    assert found == pytest.approx(best)


def test_fewer_bytes_are_faster_and_new_scores_are_slower():
    def rate(text, share, rescored=False):
        return expected_tokens_per_s(anchors_of(text, 64), share, CURVE, rescored=rescored)

    assert rate(PLAIN, 1.0) < rate(DENSE4, 1.0) < rate("uniform4:2", 1.0)
    assert rate(DENSE4, 1.0) < rate(DENSE4, 0.2) < rate(DENSE4, 0.1)
    assert rate(DENSE4, 0.1, rescored=True) < rate(DENSE4, 0.1)


def test_the_curve_of_rounds_counts_shorter_rounds():
    curve = accepted_curve([0, 2, 16], 16)
    assert curve.accepted[0] == pytest.approx(2 / 3)
    assert curve.accepted[1] == pytest.approx(4 / 3)
    assert curve.accepted[-1] == pytest.approx(6)


def test_residency_counts_anchors_and_residuals():
    quarter = residency(25, 100, 0.1)
    assert (quarter.resident, quarter.hosted, quarter.freed) == pytest.approx((0.8, 4, 40))
    plain = residency(100, 100, 0.5)
    assert (plain.resident, plain.hosted, plain.freed) == pytest.approx((1, 1, 2))


def test_names_of_methods_are_read_back():
    for method in (
        Method("snapkv", "uniform4_2bit", 0.05),
        Method("random", PLAIN, 0.125),
        DENSE4_METHOD,
    ):
        assert Method.of(method.name) == method


def test_anchors_are_named_by_codec_and_bits():
    assert anchors_of(DENSE4, 64).label == DENSE4_LABEL
    assert anchors_of("uniform4", 64).label == DENSE4_LABEL
    assert anchors_of(PLAIN, 64).page_bytes(64) == 2 * 64 * 64 * 2
    found, refused = all_anchors(64)
    whole = [each.label for each in found if each.is_before_rotary]
    assert whole == [f"kvquant_before_rotary_{bits}bit" for bits in (3, 2, 4)]
    assert {each.text.split(":")[0] for each in found} | {
        text.split(":")[0] for text in refused
    } == set(CODECS.names())
    k = torch.randn(2, 64, 1, 64)
    two, four = (anchors_of(f"uniform4:{bits}", 64).page_map(k, k)[0] for bits in (2, 4))
    assert (two - k).norm() > (four - k).norm() > 0


@pytest.mark.parametrize("text", ["uniform4:x", "uniform4:5", "nothing"])
def test_codecs_that_do_not_exist_are_refused(text):
    with pytest.raises(ConfigError):
        anchors_of(text, 64)


def test_scorers_are_named_by_their_options():
    by_default = chooser_of("random", "pages")
    assert (by_default.label, by_default.unit, by_default.allocation) == ("random", 64, "head")
    other = chooser_of("random:seed=3,heads=model", "tokens")
    assert (other.label, other.unit, other.allocation) == ("random_seed_3_heads_model", 1, "model")
    assert other.scorer.seed == 3
    assert chooser_of("random:by=tokens", "pages").label == "random_by_tokens"
    found, refused = all_choosers("pages")
    assert {each.label for each in found} | set(refused) == set(SCORERS.names())


def test_figures_compare_a_method_with_all_tokens():
    anchors = {each.label: each for each in (anchors_of(DENSE4, 64), anchors_of("uniform4:2", 64))}
    some = Method("random", "uniform4_2bit", 0.1)
    results = {
        DENSE4_METHOD: [Rounds(accepted=[16, 8], tokens_read=[1.0, 1.0])],
        Method("all", "uniform4_2bit", 1.0): [Rounds(accepted=[8], tokens_read=[1.0])],
        some: [Rounds(accepted=[4, 8], tokens_read=[0.1, 0.3])],
    }
    figures = {f.name: f for f in figures_of(results, anchors, frozenset(), SHAPE, 16)}
    prefix = f"compressors.{some.name}"
    assert prefix == "compressors.random.uniform4_2bit.10pct"
    assert figures[f"{prefix}.accepted"].value == 6
    assert figures[f"{prefix}.accepted"].baseline == 8
    assert figures[f"{prefix}.vs_dense"].value == pytest.approx(6 / 8)
    assert figures[f"{prefix}.vs_dense4"].value == pytest.approx(6 / 12)
    assert figures[f"{prefix}.read"].value == pytest.approx(0.2)
    four, two = (anchors[label].page_bytes(64) for label in (DENSE4_LABEL, "uniform4_2bit"))
    assert figures[f"{prefix}.bytes_vs_dense4"].value == pytest.approx(0.2 * two / four)
    assert figures[f"{prefix}.bytes_per_token"].value == pytest.approx(0.2 * two / 64 * 6)
    assert figures["compressors.all.uniform4_4bit.bytes_vs_dense4"].value == 1
    assert figures[f"{prefix}.tokens_per_s"].baseline == pytest.approx(
        figures["compressors.all.uniform4_4bit.tokens_per_s"].value
    )


def point(scorer, anchors, budget, bytes_, accepted, vs_dense4):
    values = dict.fromkeys(WHATS, 1.0)
    values |= {"bytes_vs_dense4": bytes_, "accepted": accepted, "vs_dense4": vs_dense4}
    method = Method(scorer, anchors, budget)
    rows = {
        what: asdict(Figure(f"compressors.{method.name}.{what}", value, "x", 0.5))
        for what, value in values.items()
    }
    return Point(method, rows)


FEW = [
    point("all", DENSE4_LABEL, 1.0, 1.0, 12.0, 1.0),
    point("snapkv", DENSE4_LABEL, 0.05, 0.05, 9.0, 0.75),
    point("snapkv", DENSE4_LABEL, 0.1, 0.1, 11.0, 0.92),
    point("random", DENSE4_LABEL, 0.1, 0.1, 2.0, 0.17),
    point("kvzip", "uniform4_2bit", 0.2, 0.12, 10.0, 0.83),
    point("kvzip", PLAIN, 0.2, 0.8, 14.0, 1.17),
]


def test_the_front_has_every_method_that_no_other_beats():
    names = [p.method.name for p in front(FEW)]
    assert names == [
        f"snapkv.{DENSE4_LABEL}.5pct",
        f"snapkv.{DENSE4_LABEL}.10pct",
        f"kvzip.{PLAIN}.20pct",
    ]
    for p in FEW:
        beaten = any(
            q["bytes_vs_dense4"] <= p["bytes_vs_dense4"] and q["accepted"] > p["accepted"]
            for q in FEW
        )
        assert beaten == (p.method.name not in names)


def test_the_best_method_keeps_nine_tenths_at_every_place():
    worse = [replace(p, rows=p.rows | {"vs_dense4": {"value": p["vs_dense4"] / 1.2}}) for p in FEW]
    assert cheapest(FEW).method.name == f"snapkv.{DENSE4_LABEL}.10pct"
    assert cheapest(worse).method.name == f"kvzip.{PLAIN}.20pct"
    assert cheapest(FEW[1:2]) is None
    figures, best = summary({"one": FEW, "two": worse})
    values = {figure.name: figure.value for figure in figures}
    assert best == {
        "all": f"kvzip.{PLAIN}.20pct",
        "one": f"snapkv.{DENSE4_LABEL}.10pct",
        "two": f"kvzip.{PLAIN}.20pct",
    }
    assert values["compressors.best.bytes_vs_dense4"] == 0.8
    assert values["compressors.one.best.bytes_vs_dense4"] == 0.1
    # Three scorers, and one codec with any number of bits.
    assert values["compressors.methods"] == 4
    ways = [
        point("all", f"kvquant{way}_2bit", 1.0, 0.6, 9.0, 0.8) for way in ("", "_before_rotary")
    ]
    assert summary({"one": FEW + ways})[0][0].value == 5


def test_points_are_read_back_from_figures():
    rows = [asdict(figure) for figure in place_figures("here", FEW)]
    rows += [{"name": "compressors.here.best.bytes_vs_dense4", "value": 0.1}]
    found = points_of(rows, "compressors.here.")
    assert [p.method for p in found] == [p.method for p in FEW]
    assert [p["accepted"] for p in found] == [p["accepted"] for p in FEW]


def test_tables_and_plot_follow_the_result(tmp_path):
    path = tmp_path / "compressors.json"
    assert compressor_tables(path) == {}
    place = {"model": "some-model", "prompt_len": 16384, "text": "code", "by": "pages"}
    other = place | {"text": "english", "by": "tokens"}
    assert title_of(other) == "some-model, 16,384 tokens, English, by tokens"
    rows = [asdict(figure) for figure in place_figures("here", FEW)]
    result = {"settings": {"places": {"here": place}}, "figures": rows}
    path.write_text(json.dumps(result), encoding="utf-8")
    tables = compressor_tables(path)
    assert "| `snapkv` | `uniform4_4bit` | 9.0 / 11.0 |" in tables["compressors"]
    assert "| scorer | codec | some-model, 16,384 tokens |" in tables["compressors"]
    assert tables["compressors_front"].count("\n") == 1 + len(front(FEW))
    assert tables["compressors"].startswith(
        "Accepted drafts at 5 / 10 / 20 % of the prompt, or over"
    )
    alone = accepted_table({"some-model": FEW[:1]})
    assert alone.startswith("Accepted drafts over all tokens:")
    draw(path.with_suffix(".png"), {"some-model": FEW, "other": FEW[:3]}, 16)
    assert path.with_suffix(".png").stat().st_size > 10_000


def test_a_run_records_every_method(tmp_path, monkeypatch):
    model = Path(__file__).resolve().parents[3] / "models" / "demo-5m"
    out = tmp_path / "run.json"
    text = f"bench {model} --out {out} --length 128 --prompts 3 --batch 2 --new-tokens 9"
    text += " --draft-len 4 --budgets 0.5 1 --codecs uniform4:2 --scorers random:seed=1"
    text += " --alone kvquant:2 kvquant:2:before_rotary"
    monkeypatch.setattr("sys.argv", text.split())
    bench_compressors.main()
    result = json.loads(out.read_text(encoding="utf-8"))
    names = [f"random_seed_1.uniform4_2bit.{share}pct" for share in (50, 100)]
    assert list(result["settings"]["raw"]) == [
        "all.uniform4_4bit",
        "all.uniform4_2bit",
        *names,
        "all.kvquant_2bit",
        "all.kvquant_before_rotary_2bit",
    ]
    assert all(len(requests) == 3 for requests in result["settings"]["raw"].values())
    assert result["settings"]["prompts"] == 3
    raw = result["settings"]["raw"]
    assert raw[names[1]] == raw["all.uniform4_2bit"]
    assert raw["all.kvquant_2bit"] != raw["all.kvquant_before_rotary_2bit"]
    found = points_of(result["figures"], "compressors.")
    assert [p.method.name for p in found] == list(raw)
    settings = result["settings"]["scorers"]["random_seed_1"]
    assert settings == {"scorer": "RandomTokens", "unit": 64, "allocation": "head", "seed": 1}


def test_the_package_knows_the_newest_study():
    result = RESULTS / "compressors.json"
    places = read_places(result)
    draft_lens = {
        place["draft_len"]
        for place in json.loads(result.read_text())["settings"]["places"].values()
    }
    assert {DRAFT_LEN} == draft_lens
    assert tuple(places) == PLACES
    assert list(MEASURED) == measured_of(places)
    assert MODULE.read_text(encoding="utf-8") == source_of(places, DRAFT_LEN)


def test_the_package_knows_default_scorers_and_whole_codecs_of_every_place():
    def points(*methods):
        return [Point(method, {what: {"value": 0.51239} for what in WHATS}) for method in methods]

    everywhere = [
        Method("snapkv", DENSE4_LABEL, 0.1),
        Method("all", "kivi_2bit", 1.0),
        # Neither default options, nor the model's own KV, nor other anchors, nor what only a study
        # encodes.
        Method("snapkv_by_tokens", DENSE4_LABEL, 0.1),
        Method("all", PLAIN, 1.0),
        Method("snapkv", "uniform4_2bit", 0.1),
        Method("all", "kvquant_before_rotary_2bit", 1.0),
    ]
    found = measured_of(
        {"a": points(*everywhere, Method("tova", DENSE4_LABEL, 0.1)), "b": points(*everywhere)}
    )
    assert found == [
        Measured("snapkv", "uniform4", 4, 0.1, (0.51, 0.51), (0.512, 0.512), (0.512, 0.512)),
        Measured("all", "kivi", 2, 1.0, (0.51, 0.51), (0.512, 0.512), (0.512, 0.512)),
    ]


def test_rates_of_servers_are_compared_with_those_of_the_first():
    def row(name, value):
        return {"name": name, "value": value, "unit": "x", "spread": value / 10, "baseline": None}

    at = "serve.8b.32k.bs16"
    pages = [row(f"{at}.exact.decode.tokens_per_s", 800), row(f"{at}.exact.start_seconds", 60)]
    scorer = [
        row(f"{at}.exact.decode.tokens_per_s", 1600),
        row(f"{at}.exact.accepted", 9),
        row(f"{at}.exact.decode_pass.output_tokens_per_s", 1),
        row("serve.8b.4k.bs1.exact.decode.tokens_per_s", 400),
    ]
    found = serving_figures({"pages": pages, "streaming": scorer})
    head, alone = (f"compressors.serving.8b.{point}" for point in ("32k.bs16", "4k.bs1"))
    # Both intervals count in that of the ratio.
    assert {each.name: (each.value, each.spread, each.baseline) for each in found} == {
        f"{head}.pages.tokens_per_s": (800, 80, None),
        f"{head}.streaming.tokens_per_s": (1600, 160, None),
        f"{head}.streaming.vs_pages": (2, pytest.approx(0.4), 800),
        f"{head}.streaming.accepted": (9, 0.9, None),
        f"{alone}.streaming.tokens_per_s": (400, 40, None),
    }
    assert serving_figures({}) == []


def test_tokens_that_fit_with_freed_anchors_are_compared_with_plain_sglang():
    names = {"exact": 700, "bf16": 100}
    rows = [
        {"name": f"serve.8b.32k.bs16.{system}.max_total_num_tokens", "value": value}
        for system, value in names.items()
    ]
    found = freed_figure([*rows, {"name": "serve.8b.32k.bs16.exact.accepted", "value": 3}])
    assert (found.name, found.value) == ("compressors.freed.tokens_vs_plain", 7)
    assert found.baseline == 100
    with pytest.raises(ValueError, match=r"got \['exact'\]"):
        freed_figure(rows[:1])
