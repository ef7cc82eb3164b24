"""Compile every Triton launch for GPUs that are not here, and compare the compiler's figures with
what these GPUs have.

    python benchmarks/check_triton_targets.py [--capabilities 8.6 12.0] [--out RESULT.json]

Needs no GPU. Nothing runs, so this says whether a kernel can be launched, not whether it is right
or fast.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

import torch
import triton
from acceptance.report import Figure, write_json
from rich.console import Console

from kvspec_testkit.kernels.ahead_of_time import SHARED_LIMITS, Compiled, compile_all
from kvspec_testkit.kernels.launches import LAUNCHES

ROOT = Path(__file__).resolve().parents[1]
console = Console(width=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    by_name = {".".join(map(str, capability)): capability for capability in SHARED_LIMITS}
    parser.add_argument("--capabilities", nargs="+", choices=by_name, default=list(by_name))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/triton_targets.json")
    args = parser.parse_args()
    figures, kernels, num_failed = [], [], 0
    for name in args.capabilities:
        capability = by_name[name]
        compiled = list(compile_all(LAUNCHES, [capability]))
        failed = [each for each in compiled if not each.fits]
        for each in failed:
            console.print(f"{name}: {each.launch} ({each.kernel}) takes {each.shared_bytes} bytes")
        figures += figures_of(name, compiled, SHARED_LIMITS[capability])
        kernels += [asdict(each) for each in compiled]
        num_failed += len(failed)
        console.print(f"{name}: {len(compiled)} kernels, {len(failed)} do not fit")
    settings = {"triton": triton.__version__, "kernels": kernels}
    write_json(args.out, "check_triton_targets", torch.device("cpu"), settings, figures)
    return 1 if num_failed else 0


def figures_of(name: str, compiled: list[Compiled], limit: int) -> list[Figure]:
    label = f"triton.sm_{name.replace('.', '')}"
    largest = max(each.shared_bytes for each in compiled)
    spilling = sum(each.local_bytes > 0 for each in compiled)
    return [
        Figure(f"{label}.kernels", len(compiled), "kernels"),
        Figure(f"{label}.do_not_fit", sum(not each.fits for each in compiled), "kernels", None, 0),
        Figure(f"{label}.most_shared_bytes", largest, "bytes a block", None, limit),
        Figure(f"{label}.most_registers", max(each.registers for each in compiled), "a thread"),
        Figure(f"{label}.spilling", spilling, "kernels"),
        Figure(f"{label}.most_local_bytes", max(e.local_bytes for e in compiled), "a thread"),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
