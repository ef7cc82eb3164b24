"""Reports of runs that shared the identity matrix add up to one report, or are refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_PATH = Path(__file__).parents[3] / "benchmarks" / "merge_identity.py"
_SPEC = importlib.util.spec_from_file_location("merge_identity", _PATH)
merge_identity = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(merge_identity)


def figure(name, value):
    return {"name": name, "value": value, "unit": "x", "spread": None, "baseline": None}


def part(scenarios, *, shard="1/1", commit="abc", cores=2, prompts=44, model="demo-5m"):
    """Make the report of a run. `scenarios`: names with numbers of answers and mismatches."""
    rows = []
    for name, (answers, mismatches) in scenarios.items():
        prefix = f"identity.{model}.exact-log4.{name}"
        rows += [
            figure(f"{prefix}.prompts", prompts),
            figure(f"{prefix}.answers", answers),
            figure(f"{prefix}.mismatches", mismatches),
            figure(f"{prefix}.elapsed", 1.2),
        ]
    totals = [figure(name, -1) for name in merge_identity.TOTALS]
    return {
        "date": f"2026-01-0{cores}",
        "commit": commit,
        "machine": {"cores": cores},
        "versions": {"python": "3.12.3", "sglang": "0.5.17"},
        "settings": {"dtype": "float32"},
        "shard": shard,
        "figures": totals + rows,
        "mismatches": [
            {"in": name} for name, (_, count) in scenarios.items() for _ in range(count)
        ],
    }


def values(report):
    return {row["name"]: row["value"] for row in report["figures"]}


def test_shards_of_a_scenario_add_up():
    merged = merge_identity.merge(
        [
            part({"alone": (22, 0), "staggered": (22, 1)}, shard="1/2", prompts=22),
            part({"alone": (22, 2), "staggered": (22, 0)}, shard="2/2", prompts=22),
            part({"full_pool": (44, 0)}),
        ]
    )
    found = values(merged)
    assert [found[name] for name in merge_identity.TOTALS] == [44, 132, 3]
    assert found["identity.demo-5m.exact-log4.alone.answers"] == 44
    assert found["identity.demo-5m.exact-log4.alone.prompts"] == 44
    assert found["identity.demo-5m.exact-log4.alone.elapsed"] == 2.4
    assert found["identity.demo-5m.exact-log4.full_pool.elapsed"] == 1.2
    assert len(merged["mismatches"]) == 3
    assert merged["shard"] == "1/1"


def test_prompts_count_once_a_model():
    parts = [part({"alone": (44, 0), "staggered": (44, 0)}), part({"alone": (44, 0)}, model="eval")]
    assert values(merge_identity.merge(parts))["identity.prompts"] == 88


def test_a_merged_report_merges_again():
    once = merge_identity.merge([part({"alone": (44, 0)})])
    again = merge_identity.merge([once, part({"alone": (44, 0)}, model="eval")])
    assert values(again)["identity.answers"] == 88


def test_two_machines_are_both_named():
    parts = [part({"alone": (44, 0)}), part({"staggered": (44, 0)}, cores=3)]
    parts[1]["versions"]["python"] = "3.11.7"
    merged = merge_identity.merge(parts)
    assert merged["machine"] == [{"cores": 2}, {"cores": 3}]
    assert merged["versions"] == {"python": ["3.12.3", "3.11.7"], "sglang": "0.5.17"}
    assert merged["date"] == "2026-01-03"


@pytest.mark.parametrize("shards", [("1/2",), ("1/2", "1/2"), ("1/1", "1/1"), ("1/2", "2/3")])
def test_shards_that_do_not_make_a_whole_are_refused(shards):
    with pytest.raises(ValueError, match=r"exact-log4\.alone has the shards"):
        merge_identity.merge([part({"alone": (22, 0)}, shard=shard) for shard in shards])


def test_parts_of_two_commits_are_refused():
    with pytest.raises(ValueError, match="commit"):
        merge_identity.merge([part({"alone": (1, 0)}), part({"staggered": (1, 0)}, commit="def")])


def entry(task="a.py[:114]", position=6):
    place = {"in": "demo-5m.int8-uniform4-rounds.alone", "task": task, "position": position}
    return place | {"expected": [287, 803], "actual": [36, 1408]}


def tie(position=6, *, is_tie=True):
    place = {"model": "demo-5m", "setting": "int8-uniform4-rounds", "task": "a.py[:114]"}
    measured = {"tokens": [287, 36], "gap": 2e-6, "noise": 4e-6, "is_tie": is_tie}
    return place | measured | {"position": position}


@pytest.mark.parametrize(
    ("ties", "num_ties"),
    [([tie()], 2), ([], 0), ([tie(is_tie=False)], 0), ([tie(position=5)], 0)],
)
def test_answers_that_part_at_a_measured_tie_are_counted_apart(ties, num_ties):
    merged = merge_identity.merge([part({"alone": (44, 3)})])
    merged["mismatches"] = [entry(), entry(), entry("b.py[:127]")]
    found = merge_identity.with_ties(merged, ties)
    values = {figure["name"]: figure["value"] for figure in found["figures"]}
    assert values["identity.mismatches"] == len(found["mismatches"]) == 3 - num_ties
    assert values["identity.near_ties"] == len(found["near_ties"]) == num_ties
    assert values["identity.demo-5m.exact-log4.alone.mismatches"] == 3


def test_ties_of_another_product_are_refused():
    with pytest.raises(ValueError, match="is not that of"):
        merge_identity.check_product("c862770", "HEAD")
