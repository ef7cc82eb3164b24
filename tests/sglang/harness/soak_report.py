"""Figures of a soak, in the JSON form of benchmarks/results."""

from __future__ import annotations

from pathlib import Path

from harness.run_record import figure, write_record
from harness.soak import SoakResult


def write_soak_report(path: Path, result: SoakResult, elapsed_s: float) -> None:
    """Write the figures so far, so that an interrupted run leaves a report."""
    settings = {
        "device": "cpu",
        "dtype": "float32",
        "baseline": "plain SGLang, one request at a time",
        "leaks": "rounds after which, once idle, pages were allocated and not encoded, encoded and "
        "not allocated, or in the window",
    }
    figures = [
        figure("soak.requests", result.requests, "requests"),
        figure("soak.mismatches", len(result.mismatches), "requests"),
        figure("soak.leaks", len(result.leaks), "rounds"),
        figure("soak.rounds", result.rounds, "rounds"),
        figure("soak.cut_short", result.cut_short, "requests"),
        figure("soak.retractions", result.retractions, "retractions"),
        figure("soak.peak_encoded_pages", result.peak_encoded, "pages"),
        figure("soak.cache_pages", result.cache_pages, "pages"),
        figure("soak.bytes_fetched", result.bytes_fetched, "bytes"),
        figure("soak.elapsed", round(elapsed_s, 1), "s"),
    ]
    write_record(
        path,
        "soak",
        settings,
        figures,
        mismatches=result.mismatches,
        leaks=result.leaks,
    )
