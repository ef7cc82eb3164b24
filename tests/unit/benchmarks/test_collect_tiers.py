"""Figures of several runs in one result: each belongs to a kind, and new figures replace old
ones."""

from __future__ import annotations

import pytest
from collect_tiers import collect
from collect_transfer import KINDS, named


def result(commit, **figures):
    rows = [{"name": name.replace("_", "."), "value": value} for name, value in figures.items()]
    return {"commit": commit, "date": "d", "machine": "m", "settings": {}, "figures": rows}


def values(tiers):
    return {row["name"]: row["value"] for row in tiers["figures"]}


def test_figures_of_each_kind_stay_separate():
    tiers = collect(result("a", plan_stall=1), {"soak.json": result("b", soak_leaks=0, other=3)})
    assert values(tiers) == {"plan.stall": 1, "soak.leaks": 0}
    assert tiers["commit"] == "a"
    source = tiers["settings"]["collected"]["soak"]
    assert (source["file"], source["commit"]) == ("soak.json", "b")


def test_a_later_collection_replaces_its_kind_alone():
    first = {"soak.json": result("b", soak_old=1), "fetch.json": result("c", fetch_gbps=50)}
    tiers = collect(result("a", plan_stall=1), first)
    tiers = collect(tiers, {"later.json": result("d", soak_new=2)})
    assert values(tiers) == {"plan.stall": 1, "fetch.gbps": 50, "soak.new": 2}
    collected = tiers["settings"]["collected"]
    assert {kind: source["commit"] for kind, source in collected.items()} == {
        "soak": "d",
        "fetch": "c",
    }


def test_a_result_without_such_figures_is_refused():
    with pytest.raises(ValueError, match=r"x\.json has no figure whose name begins with soak\."):
        collect(result("a"), {"x.json": result("b", plan_stall=1)})


def test_identity_of_two_servers_has_a_name_of_its_own():
    found = {
        "ttkt.json": result("b", ttkt_x=0.3),
        "identity.json": named(result("c", identity_mismatches=0)),
    }
    collected = collect(result("a", transfer_gbps=1), found, KINDS)
    assert values(collected) == {
        "transfer.gbps": 1,
        "ttkt.x": 0.3,
        "transfer.mismatches": 0,
    }
