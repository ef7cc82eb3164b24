"""Forecasts as tables, remarks and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from sglang_kvspec.planning.forecast import Deployment, Forecast
from sglang_kvspec.planning.throughput import Expectation

GB = 10**9

SUMMARY_COLUMNS = (
    "expected at saturation",
    "plain",
    "residuals in HBM",
    "residuals in host memory",
)
SWEEP_COLUMNS = (
    "context",
    "plain fits",
    "KVSpec fits",
    "drafts",
    "running (fetch)",
    "tokens/s",
    "in HBM",
    "with host",
    "limited by",
)


def summary_rows(deployment: Deployment, chosen: Forecast) -> list[tuple[str, ...]]:
    """Rows of SUMMARY_COLUMNS: plain decoding, KVSpec without and with a host store."""
    setting, page = chosen.fetched.setting, deployment.page_bytes
    tokens = deployment.page_size
    codes, hosted = (
        f"{page.anchor / tokens:,.0f} + {each / tokens:,.0f}"
        for each in (page.residual, page.stored)
    )
    both = (chosen.resident, chosen.fetched)
    plain_ms = f"{setting.plain_seconds * 1e3:.2f}"
    return [
        ("KV bytes per token (anchor + residual)", f"{page.plain / tokens:,.0f}", codes, hosted),
        (
            "requests that fit",
            str(setting.plain_requests),
            str(setting.resident_requests),
            str(setting.most_requests),
        ),
        ("requests running", str(setting.plain_requests), *(str(_running(e)) for e in both)),
        ("requests that fetch residuals", "-", *(_of_cycle(e, "num_fetching") for e in both)),
        ("best draft length", "-", *(_of_cycle(e, "draft_len") for e in both)),
        ("weights that drafts read", "-", *(_weights(e) for e in both)),
        ("pages that drafts read", "-", *(_share(e, "pages_read") for e in both)),
        ("attention mass on these pages", "-", *(_share(e, "mass_read") for e in both)),
        ("scoring pages, per iteration (ms)", "-", *(f"{_score_s(e) * 1e3:.2f}" for e in both)),
        ("accepted drafts", "-", *(_accepted(e) for e in both)),
        ("iterations per fetch", "-", *(_of_cycle(e, "cycles_per_load") for e in both)),
        ("forward (ms)", plain_ms, *(_milliseconds(e, "gpu_s") for e in both)),
        ("link, per iteration (ms)", "-", *(_milliseconds(e, "link_s") for e in both)),
        (
            "tokens/s",
            f"{setting.plain_tokens_per_s:,.0f}",
            *(f"{e.tokens_per_s:,.0f}" for e in both),
        ),
        ("speed-up", "1.00", *(_speed_up(e) for e in both)),
        ("limited by", "", *(e.binds for e in both)),
    ]


def sweep_rows(swept: Sequence[Forecast]) -> list[tuple[str, ...]]:
    """Rows of SWEEP_COLUMNS. All but the speed-up `in HBM` belong to the plan with a host store."""
    return [
        (
            f"{row.context_len:,}",
            str(row.fetched.setting.plain_requests),
            str(row.fetched.setting.most_requests),
            _of_cycle(row.fetched, "draft_len"),
            f"{_running(row.fetched)} ({_of_cycle(row.fetched, 'num_fetching')})",
            f"{row.fetched.tokens_per_s:,.0f}",
            _speed_up(row.resident),
            _speed_up(row.fetched),
            row.fetched.binds,
        )
        for row in swept
    ]


def remarks(deployment: Deployment, chosen: Forecast) -> list[str]:
    """Return what the table omits: where speculation does not pay, the size of the host store, and
    the assumptions."""
    lines = []
    for place, expected in (("HBM", chosen.resident), ("host memory", chosen.fetched)):
        if expected.cycle is None and expected.tokens_per_s:
            lines.append(
                f"With residuals in {place}, speculation does not pay: speculative decoding would "
                f"reach {expected.speculative_speed_up:.2f} of the throughput of plain decoding. "
                "The plan uses plain decoding."
            )
        elif expected.cycle is None:
            lines.append(f"With residuals in {place}, no request fits.")
    cycle, setting = chosen.fetched.cycle, chosen.fetched.setting
    if cycle is not None:
        stored = cycle.num_requests * setting.request.stored * deployment.tp / GB
        lines.append(f"With residuals in host memory, the residual store holds {stored:,.0f} GB.")
    lines.append(
        "Figures are expected, not measured. Attention reaches the shares of bandwidth measured "
        "on one H200. Matrix products at 60 % of peak and the memory left for KV are assumptions. "
        "Prefill and the server's own work between iterations are not counted."
    )
    return lines


def forecast_json(row: Forecast) -> dict[str, Any]:
    setting = row.fetched.setting
    return {
        "context_len": row.context_len,
        "plain": {
            "requests_fit": setting.plain_requests,
            "iteration_s": setting.plain_seconds,
            "tokens_per_s": setting.plain_tokens_per_s,
        },
        "resident": {"requests_fit": setting.resident_requests, **_expectation(row.resident)},
        "fetched": {"requests_fit": setting.most_requests, **_expectation(row.fetched)},
    }


def plan_json(
    deployment: Deployment, chosen: Forecast, swept: Sequence[Forecast]
) -> dict[str, Any]:
    page, tokens = deployment.page_bytes, deployment.page_size
    return {
        "gpu": deployment.device.name,
        "codec": deployment.codec,
        "target": deployment.target,
        "tp": deployment.tp,
        "kv_bytes_per_token": {
            "plain": page.plain / tokens,
            "anchor": page.anchor / tokens,
            "residual": page.residual / tokens,
            "stored": page.stored / tokens,
        },
        "plan": forecast_json(chosen),
        "sweep": [forecast_json(row) for row in swept],
    }


def _expectation(expected: Expectation) -> dict[str, Any]:
    cycle = expected.cycle
    return {
        "speculates": cycle is not None,
        "draft_len": cycle.draft_len if cycle else 0,
        "draft_weights_bytes": expected.setting.copies_bytes if cycle else 0,
        "pages_read": expected.setting.pages_read if cycle else None,
        "mass_read": expected.setting.mass_read if cycle else None,
        "score_s": _score_s(expected),
        "accepted": cycle.tokens_per_cycle - 1 if cycle else 0.0,
        "requests": _running(expected),
        "fetching": cycle.num_fetching if cycle else 0,
        "cycles_per_load": cycle.cycles_per_load if cycle else 0,
        "iteration_s": cycle.iteration_s if cycle else expected.setting.plain_seconds,
        "link_s": cycle.link_s if cycle else 0.0,
        "tokens_per_s": expected.tokens_per_s,
        # JSON has no infinity: null where plain decoding cannot serve even one request.
        "speed_up": expected.speed_up if expected.speed_up < inf else None,
        "binds": expected.binds,
    }


def _running(expected: Expectation) -> int:
    cycle = expected.cycle
    return cycle.num_requests if cycle else expected.setting.plain_requests


def _of_cycle(expected: Expectation, field: str) -> str:
    return str(getattr(expected.cycle, field)) if expected.cycle else "-"


def _milliseconds(expected: Expectation, field: str) -> str:
    return f"{getattr(expected.cycle, field) * 1e3:.2f}" if expected.cycle else "-"


def _accepted(expected: Expectation) -> str:
    return f"{expected.cycle.tokens_per_cycle - 1:.1f}" if expected.cycle else "-"


def _share(expected: Expectation, field: str) -> str:
    return f"{100 * getattr(expected.setting, field):.0f} %" if expected.cycle else "-"


def _weights(expected: Expectation) -> str:
    if expected.cycle is None:
        return "-"
    copies = expected.setting.copies_bytes
    return f"4 bits ({copies / GB:.1f} GB)" if copies else "the model's"


def _score_s(expected: Expectation) -> float:
    """Return the seconds of scoring pages in an average iteration."""
    cycle, setting = expected.cycle, expected.setting
    if cycle is None:
        return 0.0
    num_verify = cycle.num_requests / (cycle.draft_len + 1)
    return num_verify * setting.context_len * setting.costs.score_kv_token_s


def _speed_up(expected: Expectation) -> str:
    if expected.cycle is None:
        return "plain" if expected.tokens_per_s else "none fits"
    return f"{expected.speed_up:.2f}" if expected.speed_up < inf else "only KVSpec"
