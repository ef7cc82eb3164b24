"""Decode rates as curves."""

from __future__ import annotations

from pathlib import Path

# Place and system to (concurrency, tokens/s, half width of its 95% interval).
Curves = dict[str, dict[str, list[tuple[int, float, float]]]]


def draw_curves(curves: Curves, note: str, path: Path) -> None:
    """Decode rate against concurrency, a panel per model and context, to a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    if not curves:
        return
    size = (1 + 3.2 * len(curves), 3.6)
    figure, axes = plt.subplots(1, len(curves), figsize=size, dpi=150, squeeze=False)
    for axis, (place, systems) in zip(axes[0], curves.items(), strict=True):
        for system, found in systems.items():
            at, rates, spreads = zip(*found, strict=True)
            axis.errorbar(at, rates, spreads, marker="o", markersize=3, capsize=2, label=system)
        axis.set(title=place, xlabel="requests at once", xlim=(0, None), ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, loc="lower right")
    axes[0][0].set_ylabel("decode tokens/s")
    figure.suptitle(note, fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
