"""Gains of other ways to load residuals, by the model that chooses operating points."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Executor

from acceptance.report import Figure

from planner.cases import OUTPUT_LEN, Case
from planner.operating_point import Loading, choose_operating_point

# Ways to load by their name in the figures. The best way of a name counts.
WAYS: Mapping[str, tuple[Loading, ...]] = {
    "own": (Loading(),),
    "longer_loads": (Loading(span=2),),
    "load_serves_several": tuple(Loading(verifications=n) for n in (2, 4)),
    "keeps_pages": (Loading(keeps_pages=True),),
}
# Least gain that counts: the steps between the draft lengths that are tried cost as much.
LEAST_GAIN = 1e-3


def weigh_loads(case: Case) -> dict[str, float] | None:
    """Return the expected tokens/s by way to load, 0 if a way is no better than plain decoding.
    Return None if the schedule's own way is no better."""
    machine = case.machine()

    def expected(loading: Loading) -> float:
        point = choose_operating_point(machine, case.context_len + OUTPUT_LEN, OUTPUT_LEN, loading)
        return point.tokens_per_s if point else 0.0

    speeds = {name: max(expected(loading) for loading in ways) for name, ways in WAYS.items()}
    return speeds if speeds["own"] else None


def load_figures(pool: Executor, cases: Iterable[Case]) -> list[Figure]:
    weighed = [speeds for speeds in pool.map(weigh_loads, cases) if speeds is not None]
    figures = [Figure("plan.loads.points", len(weighed), "servers that speculate")]
    for name in WAYS:
        if name == "own":
            continue
        gains = [speeds[name] / speeds["own"] - 1 for speeds in weighed]
        pays = sum(gain > LEAST_GAIN for gain in gains)
        unit = "of the expected throughput gained, maximum over these servers"
        figures.append(Figure(f"plan.loads.{name}", max(gains), unit))
        figures.append(Figure(f"plan.loads.{name}.pays", pays, "servers that gain over 0.1 %"))
    beyond = max(s["load_serves_several"] / max(s["own"], s["keeps_pages"]) - 1 for s in weighed)
    unit = "of the expected throughput gained beyond keeping pages, maximum over these servers"
    figures.append(Figure("plan.loads.load_serves_several.beyond_pages", beyond, unit))
    return figures
