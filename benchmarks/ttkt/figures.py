"""Figures, table and plot of measured requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from acceptance.report import Figure
from rich.table import Table

from ttkt.points import TOKENS, Point, of_mode

# (token, mode to compare with, largest ratio that meets the goal, name)
_GOALS = (
    (2, "full", 0.35, "ttkt.tt2t_vs_full"),
    (2, "int4", 1.1, "ttkt.tt2t_vs_int4"),
    (32, "int8", 0.9, "ttkt.tt32t_vs_int8"),
)
# (token, largest ratio of `packed` to `full` as a client sees them, name)
_PACKED_GOALS = (
    (2, 0.85, "exactres.ttkt.client_tt2t_vs_full"),
    (32, 0.7, "exactres.ttkt.client_tt32t_vs_full"),
)
_PACKED_BYTES_GOAL = 0.8
# `packed` is `split` with packed residuals, the others are values of --kvspec-transfer.
MODES = ("split", "packed", "full", "int8", "int4", "cachegen")


def figures(points: Sequence[Point]) -> list[Figure]:
    """Return the ratios of `split` to other modes (median, half range, goal) over all prompts and
    links, and for each link. Return also the shares of equal answers and of kept drafts."""
    found = []
    links = sorted({point.full_s for point in points})
    for token, mode, goal, name in _GOALS:
        ratios = _ratios(points, mode, token)
        if not ratios:
            continue
        found.append(_spread(name, ratios, goal))
        found.append(Figure(f"{name}.worst", max(ratios), "ratio", None, goal))
        for full_s in links:
            at_link = [point for point in points if point.full_s == full_s]
            if some := _ratios(at_link, mode, token):
                found.append(_spread(f"{name}.at_{full_s:g}s", some, goal))
    found += _packed_figures(points)
    for mode in MODES:
        shares = _identical(points, mode)
        if shares:
            share = sum(shares) / len(shares)
            found.append(Figure(f"ttkt.identical.{mode}", share, f"of {len(shares)} answers"))
    firsts = [p for p in points if p.mode == "split"]
    if firsts:
        drafted = sum(p.drafted_first for p in firsts)
        kept = sum(p.accepted_first for p in firsts) / max(drafted, 1)
        found.append(Figure("ttkt.accepted_at_first_verification", kept, "of drafts"))
        mean = sum(p.drafted_first for p in firsts) / len(firsts)
        found.append(Figure("ttkt.drafted_before_first_verification.mean", mean, "tokens"))
        mean = sum(p.accepted_first for p in firsts) / len(firsts)
        found.append(Figure("ttkt.accepted_at_first_verification.mean", mean, "tokens"))
    return found


def _packed_figures(points: Sequence[Point]) -> list[Figure]:
    """Return the ratios of `packed` to `full` in seconds until a client has a token, and in
    bytes."""
    full = of_mode(points, "full")
    pairs = [(p, full[key]) for key, p in of_mode(points, "packed").items() if key in full]
    if not pairs:
        return []
    found = []
    for token, goal, name in _PACKED_GOALS:
        place = TOKENS.index(token)
        ratios = [ours.seen_s[place] / theirs.seen_s[place] for ours, theirs in pairs]
        found.append(_spread(name, ratios, goal))
        found.append(Figure(f"{name}.worst", max(ratios), "ratio", None, goal))
    ratios = [ours.num_bytes / theirs.num_bytes for ours, theirs in pairs]
    found.append(_spread("exactres.wire.bytes_vs_full", ratios, _PACKED_BYTES_GOAL))
    return found


def _spread(name: str, ratios: Sequence[float], goal: float) -> Figure:
    half = (max(ratios) - min(ratios)) / 2
    return Figure(name, median(ratios), "ratio, median", half, goal)


def _ratios(points: Sequence[Point], mode: str, token: int) -> list[float]:
    place = TOKENS.index(token)
    others = of_mode(points, mode)
    return [
        point.computed_s[place] / others[key].computed_s[place]
        for key, point in of_mode(points, "split").items()
        if key in others
    ]


def _identical(points: Sequence[Point], mode: str) -> list[bool]:
    """Return for each answer of `mode` whether it equals that of `full`, which sends full-precision
    KV."""
    exact = of_mode(points, "full")
    return [
        point.output == exact[key].output
        for key, point in of_mode(points, mode).items()
        if key in exact
    ]


def table(points: Sequence[Point]) -> Table:
    """Return a table of medians over prompts, by length and link."""
    shown = Table(title="Seconds from the end of the prefill until a token was computed (received)")
    for name in ("tokens", "full takes", "mode", *(f"token {k}" for k in TOKENS), "anchors", "MB"):
        shown.add_column(name, justify="right")
    for (length, full_s, mode), group in sorted(_groups(points).items(), key=_order):
        cells = []
        for place in range(len(TOKENS)):
            computed = median(p.computed_s[place] for p in group)
            seen = median(p.seen_s[place] for p in group)
            cells.append(f"{computed:.2f} ({seen:.2f})")
        anchors = median(p.anchors_s for p in group)
        mega = median(p.num_bytes for p in group) / 1e6
        shown.add_row(f"{length:,}", f"{full_s:g} s", mode, *cells, f"{anchors:.2f}", f"{mega:.0f}")
    return shown


def _order(entry: tuple[tuple[int, float, str], list[Point]]) -> tuple[int, float, int]:
    (length, full_s, mode), _ = entry
    return length, full_s, MODES.index(mode)


def _groups(points: Sequence[Point]) -> dict[tuple[int, float, str], list[Point]]:
    groups: dict[tuple[int, float, str], list[Point]] = {}
    for point in points:
        groups.setdefault((point.prompt_len, point.full_s, point.mode), []).append(point)
    return groups


def draw(path: Path, points: Sequence[Point]) -> None:
    """Draw the time to the k-th token by mode, a panel per link, at the longest prompt that all
    modes of these points have."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    modes = {point.mode for point in points}
    length = max(
        length
        for length in {point.prompt_len for point in points}
        if {point.mode for point in points if point.prompt_len == length} == modes
    )
    links = sorted({point.full_s for point in points})
    figure, panels = plt.subplots(
        1, len(links), figsize=(3.4 * len(links), 3.4), dpi=150, squeeze=False
    )
    for axes, full_s in zip(panels[0], links, strict=True):
        for mode in MODES:
            group = [
                p for p in points if (p.mode, p.prompt_len, p.full_s) == (mode, length, full_s)
            ]
            if group:
                times = [median(p.computed_s[i] for p in group) for i in range(len(TOKENS))]
                axes.plot(TOKENS, times, marker="o", markersize=3, label=mode)
        axes.set(title=f"full takes {full_s:g} s", xlabel="token", xscale="log", ylim=(0, None))
        axes.set_xticks(TOKENS, [str(k) for k in TOKENS])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("seconds after the prefill")
    panels[0][-1].legend(frameon=False)
    figure.suptitle(f"{length:,} tokens of KV, by transfer mode")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
