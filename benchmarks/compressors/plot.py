"""Plot of accepted drafts against bytes, with the methods that no other one beats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from compressors.points import Point, front

MARKERS = "osD^vP*Xh<>"


def draw(path: Path, places: Mapping[str, list[Point]], draft_len: int) -> None:
    """Draw one panel a place, by title, to a PNG. Colours are scorers, markers are anchors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    every = [point for points in places.values() for point in points]
    scorers = dict.fromkeys(point.method.scorer for point in every)
    anchors = dict.fromkeys(point.method.anchors for point in every)
    colours = dict(zip(scorers, plt.cm.tab20(range(len(scorers))), strict=True))
    markers = {label: MARKERS[i % len(MARKERS)] for i, label in enumerate(anchors)}
    size = (4.6 * len(places) + 2.2, 4.6)
    figure, panels = plt.subplots(1, len(places), figsize=size, dpi=150, squeeze=False)
    for axes, (title, points) in zip(panels[0], places.items(), strict=True):
        for point in points:
            axes.plot(
                point["bytes_vs_dense4"],
                point["accepted"],
                color=colours[point.method.scorer],
                marker=markers[point.method.anchors],
                markersize=4,
                linestyle="none",
            )
        best = front(points)
        axes.plot(
            [point["bytes_vs_dense4"] for point in best],
            [point["accepted"] for point in best],
            color="0.3",
            linewidth=0.9,
            drawstyle="steps-post",
            zorder=0,
        )
        axes.set(
            title=title,
            xscale="log",
            xlabel="bytes that a draft reads (all 4-bit anchors: 1)",
            ylabel=f"accepted of {draft_len} drafts",
        )
        axes.grid(alpha=0.3)
    dots = [Line2D([], [], color=c, marker="o", linestyle="none") for c in colours.values()]
    dots += [Line2D([], [], color="0.3", marker=m, linestyle="none") for m in markers.values()]
    dots += [Line2D([], [], color="0.3", linewidth=0.9)]
    names = [*colours, *markers, "not beaten by any other"]
    figure.tight_layout(rect=(0, 0, 1 - 2.0 / size[0], 1))
    figure.legend(dots, names, loc="center right", frameon=False, fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
