"""Measure speed, anchor delay and fault tolerance of the transport on loopback.

    python benchmarks/bench_transfer.py [--quick] [--out PATH]
    python benchmarks/bench_transfer.py --throughput --commit HASH --out PATH

Two processes run, each pinned to one core with all its threads if the machine has two cores. Other
load on the machine shows in the spread. Bytes are payload bytes; GB and MB are 10^9 and 10^6.
--throughput measures only speed, in two minutes or less, for a machine that is lent.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch
import zmq
from acceptance.report import Figure, write_json
from rich.console import Console
from transfer.bare_tcp import bare_tcp_gbps
from transfer.ends import Offers, ReceiverReport, SenderReport, receive_all, run_pair, send_all
from transfer.fault_runs import Outcome, run_in_memory, run_on_loopback
from transfer.fuzz_runs import fuzz_decoder, fuzz_port
from xxhash import xxh3_64_intdigest

from sglang_kvspec.transport import CurveKeys, Stream, TransferShape

OUT = Path(__file__).resolve().parent / "results" / "transfer.json"
# 16 pages of an 8B model: 64 KiB of anchors per layer and page, and 192 KiB of residuals.
WHOLE_PAGES = TransferShape(16, 1, 2 << 20, 6 << 20)
BY_LAYER = TransferShape(16, 32, 64 << 10, 192 << 10)
SMALL_ANCHORS = TransferShape(2, 1, 200 << 10, 8 << 20)
GOAL_GBPS, GOAL_INVERSION_MB = 1.5, 1.0
STALL_S = 2.0

Keys = tuple[CurveKeys | None, CurveKeys | None]

console = Console(width=120)


def throughput(rounds: int, num_transfers: int) -> list[Figure]:
    """Measure payload bytes per second between the first and the last arrival. Runs take turns with
    a bare socket, so that other load on the machine affects all cases alike."""
    cases = {
        "": Offers(WHOLE_PAGES, [0.0] * num_transfers),
        ".by_layer": Offers(BY_LAYER, [0.0] * num_transfers),
        ".curve": Offers(WHOLE_PAGES, [0.0] * (num_transfers // 4), keys=_keys()),
    }
    bare: list[float] = []
    runs: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        bare.append(bare_tcp_gbps(num_transfers * (128 << 20)))
        for name, offers in cases.items():
            _, received = run_pair(send_all, receive_all, offers)
            runs[name].append(received.num_bytes / received.seconds / 1e9)
    console.print(f"bare TCP: {_spread(bare)} GB/s")
    figures = []
    for name, measured in runs.items():
        console.print(f"transfer.gbps_one_core{name}: {_spread(measured)} GB/s")
        full_name = f"transfer.gbps_one_core{name}"
        spread = _half_range(measured)
        figures.append(Figure(full_name, median(measured), "GB/s", spread, GOAL_GBPS))
    return [
        *figures,
        Figure("transfer.gbps_one_core.best", max(runs[""]), "GB/s, best run", None, GOAL_GBPS),
        Figure("transfer.gbps_bare_tcp", median(bare), "GB/s", _half_range(bare)),
        Figure("transfer.gbps_bare_tcp.best", max(bare), "GB/s, best run"),
    ]


def inversions(link: float | None, num_anchors: int) -> list[float]:
    """Return for each anchor the MB of residuals that arrived between the anchor's offer and its
    first piece. A backlog of residuals keeps the link busy meanwhile."""
    every_s = 0.05 if link is None else 0.2
    backlog = round(num_anchors * every_s * (link or 2e9) / (2 * SMALL_ANCHORS.residual_bytes)) + 2
    streams = [(Stream.RESIDUAL,)] * backlog + [(Stream.ANCHOR,)] * num_anchors
    at_s = [0.0] * backlog + [0.1 + every_s * i for i in range(num_anchors)]
    offers = Offers(SMALL_ANCHORS, at_s, link=link, streams=streams)
    sent, received = run_pair(send_all, receive_all, offers)
    return [
        inverted
        for transfer in range(backlog, backlog + num_anchors)
        if (inverted := _inversion(transfer, sent, received)) is not None
    ]


def _inversion(transfer: int, sent: SenderReport, received: ReceiverReport) -> float | None:
    """Return the MB of residuals that arrived before the anchor of `transfer`. Return None if no
    residual arrived after it either: then nothing was in its way."""
    offered_s = sent.offered_s[transfer]
    first = next(i for i, entry in enumerate(received.log) if entry[2] == transfer)
    if all(entry[1] == Stream.ANCHOR for entry in received.log[first:]):
        return None
    before = [e for e in received.log[:first] if e[0] > offered_s and e[1] == Stream.RESIDUAL]
    return sum(entry[3] for entry in before) / 1e6


def inversion_figures(num_anchors: int) -> list[Figure]:
    figures = []
    for suffix, link in (("", None), (".at_1_gbps", 125e6)):
        measured = inversions(link, num_anchors)
        name = f"transfer.inversion_mb{suffix}"
        console.print(f"{name}: {_spread(measured)} over {len(measured)} anchors")
        assert len(measured) >= num_anchors // 2, (
            f"only {len(measured)} of {num_anchors} anchors met a backlog of residuals"
        )
        figures += [
            Figure(name, max(measured), "MB, maximum", None, GOAL_INVERSION_MB),
            Figure(f"{name}.median", median(measured), "MB", None, GOAL_INVERSION_MB),
        ]
    return figures


def stall_figures() -> list[Figure]:
    """Measure the memory growth of both ends while the receiver reads nothing for STALL_S and
    0.5 GB waits for it."""
    stalled = partial(receive_all, stall_s=STALL_S)
    sent, received = run_pair(send_all, stalled, Offers(WHOLE_PAGES, [0.0] * 4))
    growth = [end.rss_growth / 1e6 for end in (sent, received)]
    console.print(
        f"stall of {STALL_S} s: memory of the sender grew by {growth[0]:.1f} MB, of the receiver "
        f"by {growth[1]:.1f} MB"
    )
    return [
        Figure("transfer.stall_growth_mb.sender", growth[0], "MB of resident memory"),
        Figure("transfer.stall_growth_mb.receiver", growth[1], "MB of resident memory"),
    ]


def fault_figures(num_in_memory: int, num_on_loopback: int) -> list[Figure]:
    outcomes: list[Outcome] = [run_in_memory(seed) for seed in range(num_in_memory)]
    outcomes += [run_on_loopback(seed) for seed in range(num_on_loopback)]
    for outcome in outcomes:
        if outcome.wrong is not None:
            console.print(f"[red]failed[/red] {outcome}")
    survived = sum(outcome.wrong is None for outcome in outcomes)
    completed = sum(outcome.completed for outcome in outcomes)
    failed = sum(outcome.failed for outcome in outcomes)
    console.print(
        f"faults: {survived} of {len(outcomes)} runs survived, {completed} transfers complete, "
        f"{failed} transfers ended with a reason"
    )
    return [
        Figure("faults.tried", len(outcomes), "runs with random faults"),
        Figure("faults.survived", survived, "runs that survived", None, len(outcomes)),
        Figure("faults.transfers_complete", completed, "complete transfers, compared byte by byte"),
        Figure("faults.transfers_ended", failed, "transfers that were aborted or cancelled"),
    ]


def fuzz_figures(num_decoded: int, num_sent: int) -> list[Figure]:
    report = fuzz_decoder(num_decoded, seed=7)
    dropped = fuzz_port(num_sent, seed=8)
    console.print(f"fuzz: {report}; {num_sent} messages sent to a live port, {dropped} dropped")
    return [
        Figure("fuzz.inputs", report.inputs + num_sent, "messages"),
        Figure("fuzz.accepted", report.decoded, "damaged messages decoded as frames", None, 0),
        Figure("fuzz.leaked_kb", report.leaked_bytes / 1e3, "kB of Python's memory"),
    ]


def checksum_figure() -> Figure:
    piece, rounds = os.urandom(240 << 10), 2000
    start_s = time.perf_counter()
    for _ in range(rounds):
        xxh3_64_intdigest(piece)
    gbps = rounds * len(piece) / (time.perf_counter() - start_s) / 1e9
    console.print(f"checksum: {gbps:.1f} GB/s")
    return Figure("transfer.checksum_gbps", gbps, "GB/s, in cache")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="do a tenth of all runs, and write no file"
    )
    parser.add_argument(
        "--throughput", action="store_true", help="measure only throughput, in 3 short rounds"
    )
    parser.add_argument("--commit", help="commit to record (default: what git reports)")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    if arguments.throughput and arguments.out == OUT:
        parser.error(f"--throughput must not replace {OUT}: give another --out")
    share = 10 if arguments.quick else 1
    rounds, num_transfers = max(1, 8 // share), max(4, 16 // share)
    if arguments.throughput:
        rounds, num_transfers = 3, 8
    figures = throughput(rounds, num_transfers)
    if not arguments.throughput:
        figures += [
            checksum_figure(),
            *inversion_figures(max(10, 40 // share)),
            *stall_figures(),
            *fault_figures(1000 // share, 100 // share),
            *fuzz_figures(200_000 // share, 20_000 // share),
        ]
    if arguments.quick:
        return
    settings = {
        "cores": len(os.sched_getaffinity(0)),
        "rounds": rounds,
        "bytes_per_run": num_transfers * 16 * (8 << 20),
        **({} if arguments.throughput else {"stall_s": STALL_S}),
        "load_average": os.getloadavg()[0],
    }
    write_json(
        arguments.out,
        "bench_transfer",
        torch.device("cpu"),
        settings,
        figures,
        commit=arguments.commit,
    )
    console.print(f"written: {arguments.out}")


def _keys() -> Keys:
    sender, receiver = zmq.curve_keypair(), zmq.curve_keypair()
    return (
        CurveKeys(*sender, peers=frozenset({receiver[0]})),
        CurveKeys(*receiver, peers=frozenset({sender[0]})),
    )


def _half_range(values: list[float]) -> float:
    return (max(values) - min(values)) / 2


def _spread(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
