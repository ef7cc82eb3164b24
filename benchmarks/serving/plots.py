"""Plot of decode rates as curves."""

from __future__ import annotations

from pathlib import Path

from serving.systems import SYSTEMS

MOST_COLUMNS = 4
# (concurrency, tokens/s, half width of its 95% interval) of each point, by place and system.
Curves = dict[str, dict[str, list[tuple[int, float, float]]]]


def draw_curves(curves: Curves, note: str, path: Path) -> None:
    """Draw decode rate against concurrency, a panel per model and context, to a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    if not curves:
        return
    columns = min(len(curves), MOST_COLUMNS)
    rows = -(-len(curves) // columns)
    size = (1 + 3.2 * columns, 0.4 + 3.2 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, dpi=150, squeeze=False)
    # A system has the same colour in all panels, also where other systems are absent.
    colours = {system: f"C{index}" for index, system in enumerate(SYSTEMS)}
    for axis in axes.flat[len(curves) :]:
        axis.remove()
    for axis, (place, systems) in zip(axes.flat, curves.items(), strict=False):
        for system, found in systems.items():
            at, rates, spreads = zip(*found, strict=True)
            style = {"marker": "o", "markersize": 3, "capsize": 2, "color": colours[system]}
            axis.errorbar(at, rates, spreads, label=system, **style)
        axis.set(title=place, xlabel="requests at once", xlim=(0, None), ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, loc="lower right")
    for row in axes:
        row[0].set_ylabel("decode tokens/s")
    figure.suptitle(note, fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
