"""Simulate draft lengths by the draft's top probability, and compare with the server's lengths.

Requests are recorded drafts from every token of their answers. Policies are a fixed length (the
best one in hindsight), the server's lengths by each request's own acceptance, stopping by the top
probabilities of the drafts made, and an oracle that stops before the first rejected draft. What a
policy learns is learnt from one half of the requests and judged on the other, both ways. Costs of
rounds are the planner's forecast.

usage: python benchmarks/bench_views.py --views all --at-every-token --draft-len 31 \
           --weights own_text --length 2048 --new-tokens 222 --prompts 12 --recall-budget 0 \
           --out benchmarks/results/draft_traces_eval31m_2k.json
       python benchmarks/bench_views.py .kvspec/models/smollm2-135m --text english --views all \
           --at-every-token --draft-len 31 --length 2048 --new-tokens 126 --prompts 8 --batch 1 \
           --recall-budget 0 --out benchmarks/results/draft_traces_smollm2_2k.json
       python benchmarks/bench_draft_lengths.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path

import torch
from acceptance import report
from acceptance.report import Z95, Figure
from draft_lengths.points import (
    BUDGET,
    CODEC,
    CONTEXT_LEN,
    GPU,
    LINE_DRAFTS,
    MODEL,
    POINTS,
    Point,
)
from draft_lengths.policies import FixedLength, Oracle, OwnAcceptance, Policy, TopProbability
from draft_lengths.simulation import Outcome, simulate
from draft_lengths.traces import SIGNALS, Trace, chances, separation, traces_of
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"
# Result files of recorded drafts, by the name of their model. Those of eval-31m read 4-bit weights;
# the weights of SmolLM2 are 4-bit values already.
TRACES = {"eval31m": "draft_traces_eval31m_2k", "smollm2": "draft_traces_smollm2_2k"}
# Prices of time to try, relative to the rate that the server's lengths reach. At the last one no
# draft pays.
PRICES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.6, inf)
# Milliseconds that a draft step takes longer if the CPU reads its probabilities before the next: an
# event and a copy, and that with a bubble until the next step is launched.
WAITS_MS = {"waits_0.03ms": 0.03, "waits_0.1ms": 0.1}
BASELINE = "today"


@dataclass(frozen=True, slots=True)
class Way:
    """Policy that is chosen for a half of the requests. make: policies to choose from, by the
    requests to learn from, and the rate of the server's lengths there. in_hindsight: choose by the
    requests that it is judged on."""

    make: Callable[[Sequence[Trace], float], list[Policy]]
    in_hindsight: bool = False
    signal: str = "top"
    sync_ms: float = 0.0


def main() -> None:
    args = parse_arguments()
    figures: list[Figure] = []
    raw: dict[str, dict] = {}
    table = Table(title="tokens a second, against the server's lengths today")
    for heading in ("point", "drafts", "policy", "tokens/s", "ratio", "drafts a round", "rejected"):
        table.add_column(heading)
    named = {name: read_traces(file) for name, file in TRACES.items()}
    for name, traces in named.items():
        figures += trace_figures(name, traces)
    for point in POINTS:
        for name, traces in named.items():
            found = compare(point, traces)
            raw[f"{name}.{point.name}"] = {way: asdict(each) for way, each in found.items()}
            figures += point_figures(point, name, found, traces)
            for way, each in found.items():
                table.add_row(*cells_of(point, name, way, each, found[BASELINE]))
    settings = {
        "traces": TRACES,
        "costs": {
            "from": "forecast of the planner",
            "gpu": GPU,
            "model": MODEL.stem,
            "context_len": CONTEXT_LEN,
            "codec": CODEC,
            "target": "exact",
            "draft_weights": "int4",
            "draft_budget": BUDGET,
            "line_drafts": LINE_DRAFTS,
            "points": [asdict(point) for point in POINTS],
        },
        "prices": [str(price) for price in PRICES],
        "spread": "95% half width over requests, by the jackknife",
        "raw": raw,
    }
    device = torch.device("cpu")
    report.write_json(args.out, "draft_lengths", device, settings, figures, commit=args.commit)
    Console(width=140).print(table)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", help="commit to record (default: what git reports)")
    parser.add_argument("--out", type=Path, default=RESULTS / "draft_lengths.json")
    return parser.parse_args()


def read_traces(name: str) -> list[Trace]:
    return traces_of(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def ways_of(point: Point, traces: Sequence[Trace]) -> dict[str, Way]:
    """Return the ways to compare at a point, by name."""
    cost = point.cost()
    longest = traces[0].draft_len

    def top(signal: str, late: int) -> Callable[[Sequence[Trace], float], list[Policy]]:
        def make(learn: Sequence[Trace], rate: float) -> list[Policy]:
            by_signal = chances(learn, signal)
            return [TopProbability(cost, by_signal, share * rate, late) for share in PRICES]

        return make

    def stops(name: str, signal: str) -> dict[str, Way]:
        return {
            name: Way(top(signal, 0), signal=signal),
            **{
                f"{name}.{at}": Way(top(signal, 0), signal=signal, sync_ms=ms)
                for at, ms in WAITS_MS.items()
            },
            f"{name}.one_late": Way(top(signal, 1), signal=signal),
        }

    return {
        BASELINE: Way(lambda learn, rate: [OwnAcceptance(cost)]),
        # The request's own acceptance alone, with a learnt price: no signal is ever known.
        "today_priced": Way(top("top", longest)),
        "fixed": Way(lambda learn, rate: [FixedLength(n) for n in range(longest + 1)], True),
        **stops("top_probability", "top"),
        **stops("lead", "lead"),
        "oracle": Way(lambda learn, rate: [Oracle(cost, share * rate) for share in PRICES], True),
    }


def compare(point: Point, traces: Sequence[Trace]) -> dict[str, Outcome]:
    """Return the outcome of each way, summed over both halves of the requests."""
    cost, found = point.cost(), {}
    halves = (traces[::2], traces[1::2])
    for name, way in ways_of(point, traces).items():
        found[name] = Outcome()
        for learn, judge in (halves, halves[::-1]):

            def run(requests: Sequence[Trace], policy: Policy, way: Way = way) -> Outcome:
                return simulate(
                    requests,
                    point.num_requests,
                    policy,
                    cost,
                    signal=way.signal,
                    sync_s=way.sync_ms / 1e3,
                )

            rate = run(learn, OwnAcceptance(cost)).rate
            choose_by = judge if way.in_hindsight else learn
            policies = way.make(learn, rate)
            best = policies[0]
            if len(policies) > 1:
                best = max(policies, key=lambda policy: run(choose_by, policy).rate)
            found[name].add(run(judge, best))
    return found


def point_figures(
    point: Point, name: str, found: Mapping[str, Outcome], traces: Sequence[Trace]
) -> list[Figure]:
    """Return tokens a second of the server's lengths, and of each way against them."""
    where = f"{point.name}.{name}"
    left_out = [compare(point, [*traces[:i], *traces[i + 1 :]]) for i in range(len(traces))]
    base = found[BASELINE].rate
    figures = [Figure(f"lengths.tokens_per_s.{BASELINE}.{where}", base, "tokens/s")]
    for way, outcome in found.items():
        if way == BASELINE:
            continue
        ratios = [each[way].rate / each[BASELINE].rate for each in left_out]
        figures.append(
            Figure(
                f"lengths.vs_today.{way}.{where}", outcome.rate / base, "x", half_width(ratios), 1.0
            )
        )
    return figures


def half_width(left_out: Sequence[float]) -> float:
    """Return the 95% half width of a value, from its values with one request left out."""
    count = len(left_out)
    mean = sum(left_out) / count
    variance = (count - 1) / count * sum((value - mean) ** 2 for value in left_out)
    return float(Z95 * variance**0.5)


def trace_figures(name: str, traces: Sequence[Trace]) -> list[Figure]:
    """Return the mean accept length, and how well each signal tells drafts apart."""
    longest = traces[0].draft_len
    means = torch.tensor([sum(each.accepted) / len(each.accepted) for each in traces])
    accepted = report.Estimate.of(means)
    return [
        Figure(f"lengths.mean_of_{longest}.{name}", accepted.mean, "drafts", accepted.half_width),
        *(
            Figure(
                f"lengths.separation.{signal}.{name}",
                separation(traces, signal),
                "chance",
                None,
                0.5,
            )
            for signal in SIGNALS
        ),
    ]


def cells_of(point: Point, name: str, way: str, outcome: Outcome, base: Outcome) -> list[str]:
    rounds = max(outcome.rounds * point.num_requests, 1)
    return [
        point.name,
        name,
        way,
        f"{outcome.rate:.0f}",
        f"{outcome.rate / base.rate:.3f}",
        f"{outcome.drafts / rounds:.1f}",
        f"{(outcome.drafts - outcome.accepted) / rounds:.2f}",
    ]


if __name__ == "__main__":
    main()
