"""Measure the speed of the transport where each end shares a process with a computation.

    python benchmarks/bench_transfer_loops.py [--rounds N] [--transfers N]

Runs take turns with runs whose ends are alone in their processes, as in bench_transfer.py. Each
process has one core for all its threads. A computation shares that core with a loop, so at most
half of the speed is left. Prints the results, and writes nothing.
"""

from __future__ import annotations

import argparse
from functools import partial
from statistics import median

from bench_transfer import BY_LAYER, WHOLE_PAGES
from rich.console import Console
from transfer.ends import Offers, receive_all, run_pair, send_all
from transfer.loop_ends import NEIGHBOURS, receive_by_loop, send_by_loop

console = Console(width=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--transfers", type=int, default=8, help="transfers of 128 MiB each")
    arguments = parser.parse_args()
    gbps: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        for shape_name, shape in (("whole pages", WHOLE_PAGES), ("by layer", BY_LAYER)):
            offers = Offers(shape, [0.0] * arguments.transfers)
            ends = {"no loop": (send_all, receive_all)}
            for neighbour in NEIGHBOURS:
                pair = (send_by_loop, receive_by_loop)
                bound = tuple(partial(end, neighbour=neighbour) for end in pair)
                ends[f"loops, {neighbour} neighbour"] = bound
            for name, pair in ends.items():
                _, received = run_pair(*pair, offers)
                measured = received.num_bytes / received.seconds / 1e9
                gbps.setdefault(f"{shape_name}, {name}", []).append(measured)
    for name, values in gbps.items():
        spread = f"{min(values):.2f} to {max(values):.2f}"
        console.print(f"{name:36} {median(values):.2f} GB/s ({spread})")


if __name__ == "__main__":
    main()
