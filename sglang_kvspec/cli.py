"""The command `sglang-kvspec`. `plan` imports neither torch nor sglang: it answers at once."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from math import inf, nan
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_kvspec.core.config import (
    AUTO_BUDGET,
    AUTO_RESIDUAL,
    DEFAULT_PAGE_SIZE,
    ExactResidual,
    Target,
    Weights,
)
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.flags import FLAG_OF
from sglang_kvspec.planning.costs import AcceptanceCurve
from sglang_kvspec.planning.devices import DEVICES, GB, MEMORY_SHARE, find_device
from sglang_kvspec.planning.forecast import (
    MEASURED_ACCEPTANCE,
    Deployment,
    Forecast,
    forecast,
    read_acceptance,
    sweep,
    sweep_contexts,
)
from sglang_kvspec.planning.launch import recommend
from sglang_kvspec.planning.model_shape import ModelShape
from sglang_kvspec.planning.report import (
    SUMMARY_COLUMNS,
    SWEEP_COLUMNS,
    plan_json,
    remarks,
    summary_rows,
    sweep_rows,
)
from sglang_kvspec.planning.residual_choice import choose_residual

DEFAULT_ACCEPTANCE = "default"
ACCEPTANCE_REMARK = (
    "The acceptance was measured on a model of 31M parameters after 4096-token prompts; no large "
    "model has been measured. To try another acceptance, set --acceptance to a probability such as "
    "0.95, or to a result file of benchmarks/bench_acceptance.py."
)
# Characters in a line where no terminal gives a width, so that tables keep their columns.
PIPE_WIDTH = 120


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0; 1 where `doctor` finds a problem; 2 after one sentence about what
    is wrong with the input."""
    parser = _parser()
    args, others = parser.parse_known_args(arguments)
    if args.command == "doctor":
        return doctor(others)
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if args.command == "compressors":
        print_compressors(as_json=args.json)
        return 0
    try:
        plan(args)
    except ConfigError as error:
        print(f"sglang-kvspec: {error}", file=sys.stderr)
        return 2
    return 0


def doctor(arguments: Sequence[str]) -> int:
    """Print each check as it ends. Return 1 where one found a problem."""
    # Late: `plan` needs none of what the checks import.
    from sglang_kvspec.doctor import diagnose

    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    num_problems = 0
    for check in diagnose(arguments):
        mark = "[red]no[/]" if check.problem else "[green]ok[/]"
        console.print(f"{mark}  {check.name}: {escape(check.found)}")
        if check.problem:
            num_problems += 1
            console.print(f"    {check.problem}", markup=False)
    if num_problems:
        console.print(f"KVSpec cannot serve here. Problems found: {num_problems}.")
        return 1
    console.print("KVSpec can serve here.")
    return 0


def print_compressors(*, as_json: bool) -> None:
    """Print every scorer and codec with what it keeps, and the flag that chooses it."""
    # Late: scorers import torch, which `plan` does without.
    from sglang_kvspec.compressors import list_methods

    methods = list_methods()
    if as_json:
        print(json.dumps(methods, indent=1))
        return
    table = Table(title="Methods that choose, or compress, what drafts read")
    for heading in ("flag", "method", "what drafts read", "cost", "options", "accepted"):
        table.add_column(heading, no_wrap=heading == "flag")
    for method in methods:
        if "problem" in method:
            table.add_row(method["flag"], escape(method["problem"]), "", "", "", "")
            continue
        options = ", ".join(f"{key}={value}" for key, value in method["options"].items())
        known = (method["flag"], method["paper"], method["keeps"], method["cost"], options)
        cells = (*known, accepted_text(method["kind"], method["measured"]))
        table.add_row(*map(escape, cells))
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False).print(table)


def accepted_text(kind: str, measured: Sequence[Mapping[str, Any]]) -> str:
    """Return the accepted drafts that a study measured of one method, the mean over its models and
    prompts: by budget of a scorer, by width of a codec."""
    parts = []
    for each in measured:
        at = f"{each['budget']:.0%}" if kind == "scorer" else f"{each['bits']} bits"
        mean = fmean(each["accepted"].values())
        parts.append(f"{at}: {mean:.1f} of {each['draft_len']}")
    return ", ".join(parts)


def plan(args: argparse.Namespace) -> None:
    """Print what to expect of a deployment, and draw a plot if --plot asks for one."""
    deployment = deployment_of(args)
    residuals = None
    if args.exact_residual == AUTO_RESIDUAL:
        residuals = choose_residual(deployment)
        deployment = replace(deployment, exact_residual=residuals.value)
    chosen = forecast(deployment, args.context)
    swept = sweep(deployment, sweep_contexts(args.context, deployment.model.max_context))
    if args.plot is not None:
        draw(args.plot, deployment, swept)
    launch = recommend(deployment, chosen, args.model)
    if args.json:
        command = {"launch": list(launch.arguments) if launch else None}
        print(json.dumps(plan_json(deployment, chosen, swept) | command, indent=1))
        return
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    gpus = f"{args.tp} x " if args.tp > 1 else ""
    title = f"{args.model} on {gpus}{deployment.device.name}, {args.context:,} tokens of context"
    codec = f"codec {args.codec}, target {args.target}"
    per_gpu = "; bytes are per GPU" if args.tp > 1 else ""
    console.print(
        table_of(f"{title}\n{codec}{per_gpu}", SUMMARY_COLUMNS, summary_rows(deployment, chosen))
    )
    console.print(table_of("By context length", SWEEP_COLUMNS, sweep_rows(swept)))
    if residuals is not None:
        told = f"Residuals in host memory are {residuals.value}, because {residuals.reason}."
        console.print(told, markup=False)
    for line in remarks(deployment, chosen):
        console.print(line, markup=False)
    if args.acceptance == DEFAULT_ACCEPTANCE:
        console.print(ACCEPTANCE_REMARK, markup=False)
    if args.plot is not None:
        console.print(f"Plot written to {args.plot}", markup=False)
    if launch is not None:
        console.print(f"Recommended command. {launch.reason}", markup=False)
        # On one line, however wide the terminal is, so that it can be copied.
        console.print(f"    {shlex.join(launch.arguments)}", markup=False, soft_wrap=True)


def deployment_of(args: argparse.Namespace) -> Deployment:
    """Return the deployment that the arguments describe, with raw residuals where their form is yet
    to be chosen. Raises ConfigError."""
    device = find_device(args.gpu)
    if args.link_gbps is not None:
        device = device.with_link(args.link_gbps * GB)
    return Deployment(
        model=ModelShape.from_config(read_model_config(args.model)),
        device=device,
        curve=acceptance_curve(args.acceptance, args.codec),
        codec=args.codec,
        target=args.target,
        tp=args.tp,
        host_bytes=inf if args.host_memory_gb is None else args.host_memory_gb * GB,
        page_size=args.page_size,
        max_requests=args.max_running_requests,
        memory_share=args.mem_fraction_static,
        draft_budget=draft_budget(args.draft_budget),
        draft_weights=args.draft_weights,
        exact_residual="raw" if args.exact_residual == AUTO_RESIDUAL else args.exact_residual,
    )


def draft_budget(value: str) -> float | None:
    """Return the share of pages that `value` names, None for auto. Raises ConfigError."""
    flag = FLAG_OF["draft_budget"]
    try:
        budget = flag.kind.parse(value)
    except ValueError:
        budget = None
    if not flag.kind.allows(budget):
        raise ConfigError(f"--draft-budget {flag.kind.demand(budget)}, got {value!r}")
    return None if budget == AUTO_BUDGET else float(budget)


def read_model_config(path: Path) -> dict[str, Any]:
    """Return the model's config.json. Raises ConfigError for a path that is not on this machine."""
    if not path.exists():
        raise ConfigError(
            f"--model {path} cannot be read: No such file or directory (allowed: a local "
            "config.json or the folder that contains it; download the config of a hub model first)"
        )
    return read_json(path / "config.json" if path.is_dir() else path, "--model")


def acceptance_curve(value: str, codec: str) -> AcceptanceCurve:
    """Return the curve that `value` names: the measured default of a codec, one probability for
    each draft, or a file of a benchmark. Raises ConfigError for a file that cannot be read."""
    if value == DEFAULT_ACCEPTANCE:
        return MEASURED_ACCEPTANCE[codec]
    try:
        probability = float(value)
    except ValueError:
        return read_acceptance(read_json(Path(value), "--acceptance"), codec)
    return AcceptanceCurve.geometric(probability)


def read_json(path: Path, flag: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{flag} {path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{flag} {path} must hold a JSON object, got a {type(content).__name__}")
    return content


def table_of(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def draw(path: Path, deployment: Deployment, swept: Sequence[Forecast]) -> None:
    """Write a plot of speed-up and of requests that fit against context length."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(
        f"{deployment.device.name}, {deployment.codec}, target {deployment.target}: "
        "expected, not measured"
    )
    settings = [row.fetched.setting for row in swept]
    panels: dict[str, dict[str, list[float]]] = {
        "speed-up over plain decoding": {
            "plain": [1.0] * len(swept),
            "KVSpec, residuals in HBM": [_drawn(row.resident.speed_up) for row in swept],
            "KVSpec, residuals in host memory": [_drawn(row.fetched.speed_up) for row in swept],
        },
        "requests that fit": {
            "plain": [_drawn(s.plain_requests) for s in settings],
            "KVSpec, residuals in HBM": [_drawn(s.resident_requests) for s in settings],
            "KVSpec, residuals in host memory": [_drawn(s.most_requests) for s in settings],
        },
    }
    contexts = [row.context_len for row in swept]
    labels = [f"{n // 1024}K" if n % 1024 == 0 else f"{n:,}" for n in contexts]
    for axes, (name, lines) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for label, values in lines.items():
            axes.plot(contexts, values, marker="o", label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, labels)
        axes.set_xlabel("tokens of context")
        axes.set_ylabel(name)
    speed_up, fitting = figure.axes
    speed_up.set_ylim(bottom=0)
    speed_up.legend(loc="lower left")
    fitting.set_yscale("log")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path} cannot be written: {error}") from error


def _drawn(value: float) -> float:
    """Return the value, or NaN for a gap: nothing fits, or there is nothing to compare with."""
    return value if 0 < value < inf else nan


def _version() -> str:
    try:
        return metadata.version("sglang-kvspec")
    except metadata.PackageNotFoundError:
        return "(checkout, not installed)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-kvspec", description="Plans and checks for KVSpec servers."
    )
    parser.add_argument("--version", action="version", version=f"sglang-kvspec {_version()}")
    commands = parser.add_subparsers(required=True, dest="command", metavar="command")
    commands.add_parser(
        "doctor",
        help="check this machine, its SGLang and a model, and print each problem",
        usage="%(prog)s [--model-path MODEL] [flags of sglang.launch_server]",
    )
    listing = commands.add_parser(
        "compressors", help="list the methods that choose, or compress, what drafts read"
    )
    listing.add_argument("--json", action="store_true", help="print JSON instead of a table")
    planning = commands.add_parser("plan", help="forecast throughput of a model on a GPU")
    add = planning.add_argument
    add("--model", type=Path, required=True, help="local config.json of a model, or its folder")
    add("--gpu", default="H200", help=f"GPU: one of {', '.join(DEVICES)} (default: %(default)s)")
    add("--context", type=int, default=32768, help="tokens per request (default: %(default)s)")
    for option, choices in (("codec", tuple(MEASURED_ACCEPTANCE)), ("target", get_args(Target))):
        flag = FLAG_OF[option]
        add(f"--{option}", choices=choices, default=flag.default, help=flag.help_line())
    add("--tp", type=int, default=1, help="number of tensor-parallel GPUs (default: %(default)s)")
    add(
        "--host-memory-gb",
        type=float,
        help="host memory for the residual store, in GB of 1e9 bytes (default: as much as needed)",
    )
    add(
        "--link-gbps",
        type=float,
        help="measured GB/s from host memory to a GPU (default: 86 %% of the published speed)",
    )
    add(
        "--acceptance",
        default=DEFAULT_ACCEPTANCE,
        metavar="PATH|PROBABILITY",
        help="result file of benchmarks/bench_acceptance.py, or probability that a draft is "
        "accepted",
    )
    flag = FLAG_OF["draft_budget"]
    add("--draft-budget", metavar=flag.kind.metavar, default=flag.default, help=flag.help_line())
    add(
        "--draft-weights",
        choices=get_args(Weights),
        default=FLAG_OF["draft_weights"].default,
        help="weights that drafts read: the model's (target), copies in 4 bits (int4), or those "
        "with the most tokens a second (auto) (default: %(default)s)",
    )
    add(
        "--exact-residual",
        choices=get_args(ExactResidual),
        default=FLAG_OF["exact_residual"].default,
        help="form of residuals in host memory: all bits (raw), only what anchors do not tell "
        "(packed), or that for which clearly more tokens/s are expected (auto) (default: "
        "%(default)s)",
    )
    add("--page-size", type=int, default=DEFAULT_PAGE_SIZE, help="page size (default: %(default)s)")
    add(
        "--max-running-requests",
        type=int,
        default=256,
        help="highest number of running requests (default: %(default)s)",
    )
    add(
        "--mem-fraction-static",
        type=float,
        default=MEMORY_SHARE,
        help="share of HBM for weights and KV (default: %(default)s)",
    )
    add("--plot", type=Path, metavar="PATH", help="draw the sweep over context lengths as PNG")
    add("--json", action="store_true", help="print JSON instead of tables")
    return parser


if __name__ == "__main__":
    sys.exit(main())
