"""Plot of speed-ups over a varied quantity, one line per schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

Curve = Sequence[tuple[float, float]]


def draw_sweep(
    path: Path, curves: Mapping[str, Curve], *, title: str, label: str, log2: bool = False
) -> None:
    """Draw points (varied quantity, speed over that of plain decoding) to a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.4), dpi=150)
    axes.axhline(1.0, color="0.7", linestyle="--")
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), marker="o", markersize=3, label=name)
    if log2:
        axes.set_xscale("log", base=2)
    axes.set(xlabel=label, ylabel="times as fast as plain decoding", title=title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
