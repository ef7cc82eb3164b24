"""Compare planned verifications with plain decoding in simulated time.

    python benchmarks/bench_planner.py [--quick] [--trace PATH] [--out PATH]

The planner's own code runs with costs measured on one H200 (sglang_kvspec/planning/devices.py).
Model shapes are interpolated linearly through Qwen3-8B and Qwen3-32B. No GPU is used. With --trace,
one server runs a recorded trace (JSON lines of arrival_s, prompt_len, output_len), and nothing is
written.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median

import torch
from acceptance.report import Figure, write_json
from planner.cases import OUTPUT_LEN, PROMPT_SPREAD, Case, Outcome, run_case, run_link_bound
from planner.loads import load_figures
from planner.operating_point import LINK_SHARE, choose_operating_point
from planner.plots import draw_sweep
from planner.schedules import LockStep, PlainDecoding, Sequential
from planner.simulation import simulate
from planner.staggered import Staggered
from planner.traces import TraceRequest, read_trace
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"
BUDGETS = (0.20, 0.30, 0.40, 0.50, 0.60, 0.75)
RATIOS = (10, 20, 40, 60, 80)
CONTEXTS = tuple(4096 * 2**n for n in range(8))
SEEDS = (0, 1, 2)
GRID_CONTEXTS, GRID_BUDGETS, GRID_RATIOS = (
    CONTEXTS[::2] + CONTEXTS[-1:],
    (0.2, 0.4, 0.75, 0.88),
    (10, 40, 80),
)
# Target and record sizes of a Case, by their prefix in the names of figures.
KINDS = {
    "": ("exact", "log4"),
    "int8.": ("int8", "log4"),
    "paper_sizes.": ("exact", "paper"),
}
LABELS = {"": "log4, exact", "int8.": "log4, 8-bit target", "paper_sizes.": "VeriCache's sizes"}

console = Console(width=120)


@dataclass(frozen=True, slots=True)
class Sweep:
    name: str
    label: str
    points: tuple[tuple[str, float, Case], ...]


def sweeps(target: str, sizes: str) -> list[Sweep]:
    """Return the three sweeps. Budget and ratio vary at 16K tokens, where even the smallest budget
    holds several plain requests."""

    def case(gpu: str, context_len: int, kv_share: float, ratio: float) -> Case:
        return Case(gpu, context_len, kv_share, ratio, target, sizes)

    return [
        Sweep(
            "budget_sweep",
            "share of HBM for KV (HBM/link ratio 28)",
            tuple((f"{b:.2f}", b, case("RTX-PRO-6000", 16384, b, 28)) for b in BUDGETS),
        ),
        Sweep(
            "ratio_sweep",
            "HBM bandwidth over link bandwidth (half of HBM for KV)",
            tuple((str(r), float(r), case("H200", 16384, 0.5, r)) for r in RATIOS),
        ),
        Sweep(
            "context_sweep",
            "context length in tokens (0.88 of HBM for KV, an 8B model; HBM/link ratio 75)",
            tuple((f"{c // 1024}k", float(c), case("H200", c, 0.88, 75)) for c in CONTEXTS),
        ),
    ]


def main() -> None:
    args = parse_arguments()
    if args.trace:
        compare_on(read_trace(args.trace))
        return
    seeds = SEEDS[:1] if args.quick else SEEDS
    figures: list[Figure] = []
    outcomes: list[Outcome] = []
    plots: list[Callable[[], None]] = []
    with ProcessPoolExecutor(args.jobs) as pool:
        for prefix, (target, sizes) in KINDS.items():
            for sweep in sweeps(target, sizes):
                made, runs, plot = run_sweep(pool, prefix, sweep, seeds, args.out.parent)
                figures += made
                outcomes += runs
                plots.append(plot)
        grid = [] if args.quick else run_grid(pool)
        outcomes += grid
        cases = dict.fromkeys(outcome.case for outcome in outcomes)
        loads = load_figures(pool, cases)
        figures = [*summary(outcomes), *link_figures(pool), *loads, *figures]
    settings = {
        "simulated": "planner code in simulated time; costs from shares measured on one H200",
        "devices": "budget sweep: RTX-PRO-6000 at its own ratio; other sweeps: H200",
        "model": "layers and heads on a line through Qwen3-8B and Qwen3-32B; weights fill the part "
        "of HBM that is not for KV",
        "acceptance": "log4 on eval-31m (acceptance.json); no larger model has been measured",
        "trace": f"all requests arrive at once, outputs {OUTPUT_LEN} tokens +-50%, prompts "
        f"+-{PROMPT_SPREAD:.0%}; throughput between 20% and 80% of all tokens; prefill not counted",
        "link": "fast enough for every plan: a chosen point demands at most "
        f"{LINK_SHARE:.0%} of the link; link_utilisation and link_stall come from servers that "
        "demand more",
        "spread": f"half the range over {len(seeds)} seeds",
        "baseline": "for a sweep: the better of lock-step and sequential verification, each with "
        "its best draft length and batch; for link_utilisation: demand over capacity of the link",
        "paper": "VeriCache figure 13: 1.61 at budget 0.74 to 2.71 at 0.2; 1.92 at ratio 60 to "
        "3.01 at 10",
    }
    # Write the figures before the plots: plots change the working tree, which marks its commit as
    # dirty.
    write_json(args.out, "planner", torch.device("cpu"), settings, figures)
    for plot in plots:
        plot()
    console.print(f"written: {args.out}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "tiers.json")
    parser.add_argument(
        "--trace", type=Path, help="recorded trace, as JSON lines of planner/traces.py"
    )
    parser.add_argument("--quick", action="store_true", help="simulate one seed and no grid")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    return parser.parse_args()


def run_sweep(
    pool: ProcessPoolExecutor, prefix: str, sweep: Sweep, seeds: Sequence[int], folder: Path
) -> tuple[list[Figure], list[Outcome], Callable[[], None]]:
    """Return figures and all outcomes of one sweep, and a function that draws its plot into
    `folder`."""
    jobs = {
        name: [pool.submit(run_case, case, seed, baselines=seed == seeds[0]) for seed in seeds]
        for name, _, case in sweep.points
    }
    figures, outcomes = [], []
    curves: dict[str, list[tuple[float, float]]] = {
        "staggered": [],
        "lock-step": [],
        "sequential": [],
    }
    table = Table(title=f"{sweep.name}, {LABELS[prefix]}")
    for column in (
        "at",
        "speed-up",
        "expected",
        "lock-step",
        "sequential",
        "stall",
        "link",
        "plan",
    ):
        table.add_column(column)
    for name, at, _ in sweep.points:
        runs = [run for job in jobs[name] if (run := job.result()) is not None]
        if not runs:
            console.print(f"{sweep.name} {name}: no request fits with plain decoding")
            continue
        outcomes += runs
        ups = [run.speed_up for run in runs]
        others = [
            mean(x / run.plain for run in runs if (x := getattr(run, key)) is not None)
            for key in ("lock_step", "sequential")
        ]
        for curve, value in zip(curves.values(), (mean(ups), *others), strict=True):
            curve.append((at, value))
        half_range = (max(ups) - min(ups)) / 2
        figures.append(
            Figure(
                f"plan.{prefix}{sweep.name}.{name}",
                mean(ups),
                "x plain decoding",
                half_range,
                max(others),
            )
        )
        first = runs[0]
        point = first.point
        table.add_row(
            name,
            f"{mean(ups):.2f}",
            f"{first.expected:.2f}",
            *(f"{x:.2f}" for x in others),
            f"{first.stall_share:.3f}",
            f"{first.link_utilisation:.2f}",
            "plain"
            if point is None
            else f"x={point.draft_len}, {point.num_requests} requests, "
            f"{point.num_fetching} fetch, {point.rooms} rooms",
        )
    console.print(table)
    plot = partial(
        draw_sweep,
        folder / f"tiers_{prefix.replace('.', '_')}{sweep.name}.png",
        curves,
        title=f"{LABELS[prefix]}: simulated throughput",
        label=sweep.label,
        log2=sweep.name != "budget_sweep",
    )
    return figures, outcomes, plot


def run_grid(pool: ProcessPoolExecutor) -> list[Outcome]:
    """Simulate every combination of a coarser grid, for the least speed-up and the most stall."""
    cases = [
        Case("H200", context_len, budget, ratio, target, "log4")
        for target in ("exact", "int8")
        for context_len in GRID_CONTEXTS
        for budget in GRID_BUDGETS
        for ratio in GRID_RATIOS
    ]
    jobs = [pool.submit(run_case, case, 0, baselines=False) for case in cases]
    outcomes = [outcome for job in jobs if (outcome := job.result()) is not None]
    console.print(
        f"grid: {len(outcomes)} of {len(cases)} points; no request fits on the other points with "
        "plain decoding"
    )
    worst = sorted(outcomes, key=lambda outcome: outcome.speed_up)[:5]
    for outcome in worst:
        console.print(f"  {outcome.speed_up:.3f} {outcome.case} {outcome.point}")
    return outcomes


def summary(outcomes: Iterable[Outcome]) -> list[Figure]:
    outcomes = list(outcomes)
    least = min(outcomes, key=lambda outcome: outcome.speed_up)
    fallen_back = sum(outcome.point is None for outcome in outcomes)
    hidden = [outcome.stall_share for outcome in outcomes if outcome.link_suffices]
    stalls = [outcome.stall_share for outcome in outcomes]
    errors = [abs(o.plan / o.point.tokens_per_s - 1) for o in outcomes if o.point]
    peak = max(outcome.peak_share for outcome in outcomes)
    console.print(f"smallest speed-up {least.speed_up:.3f}: {least.case}")
    return [
        Figure("plan.points", len(outcomes), "simulated servers"),
        Figure("plan.min_vs_plain", least.speed_up, "x plain decoding", None, 1.0),
        Figure("plan.fallbacks", fallen_back, "servers that decode plainly"),
        Figure("plan.stall_share", max(hidden), "of step time, maximum with fetches", None, 0.03),
        Figure("plan.stall_share.points", len(hidden), "servers that fetch residuals"),
        Figure("plan.stall_share.median", median(hidden), "of step time", None, 0.03),
        Figure("plan.stall_share.all", max(stalls), "of step time, maximum of all points"),
        Figure("plan.peak_hbm_share", peak, "of the KV budget, maximum of all points", None, 1.0),
        Figure("plan.expected_error.median", median(errors), "of the expected throughput"),
        Figure("plan.expected_error.most", max(errors), "of the expected throughput"),
    ]


def link_figures(pool: ProcessPoolExecutor) -> list[Figure]:
    """Simulate servers whose requests demand more than the link can carry. Return how much of the
    link they use, and the share of step time that waits for it."""
    cases = {
        f"{target}.{context_len // 1024}k": Case("H200", context_len, 0.5, 80, target)
        for target in ("exact", "int8")
        for context_len in (4096, 8192, 16384, 32768)
    }
    jobs = {name: pool.submit(run_link_bound, case, 0) for name, case in cases.items()}
    figures, bound = [], []
    for name, job in jobs.items():
        run = job.result()
        console.print(f"link bound {name}: {run}")
        used = (f"plan.link_utilisation.{name}", run.utilisation, "of the link")
        figures.append(Figure(*used, baseline=run.demand))
        figures.append(Figure(f"plan.link_stall.{name}", run.stall_share, "of step time"))
        if run.demand > 1:
            bound.append(run.utilisation)
    return [
        Figure("plan.link_utilisation", min(bound), "of the link, minimum", None, 0.9),
        *figures,
    ]


def compare_on(trace: Sequence[TraceRequest]) -> None:
    """Run all schedules on a recorded trace, on an H200 with half its memory for KV."""
    context_len = round(mean(request.total_len for request in trace))
    output_len = mean(request.output_len for request in trace)
    machine = Case("H200", context_len, 0.5, 75, "exact").machine()
    point = choose_operating_point(machine, context_len, output_len)
    plain = simulate(PlainDecoding(machine), trace)
    console.print(f"plain: {plain.tokens_per_s():.1f} tokens/s, {plain.end.now_s:.1f} s")
    if point is None:
        console.print("speculation does not pay; the plan is plain decoding")
        return
    for kind in (Staggered, LockStep, Sequential):
        report = simulate(kind(machine, point.draft_len, point.num_requests, point.rooms), trace)
        console.print(
            f"{kind.__name__}: {report.tokens_per_s():.1f} tokens/s, {report.end.now_s:.1f} s, "
            f"stall {report.stall_share():.1%}"
        )


if __name__ == "__main__":
    main()
