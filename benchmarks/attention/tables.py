"""Write the attention figures into a table of kernels/README.md and a plot.

python benchmarks/attention/tables.py    # after bench_attention.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "attention_h200.json"
README = ROOT / "kernels" / "README.md"
BEGIN, END = "<!-- attention:begin -->", "<!-- attention:end -->"
CODECS = ("log4", "uniform4")
MAIN = "16x32768"
VERIFY_TOKENS = (1, 4, 16, 64)

Figures = dict[str, dict[str, Any]]


def main() -> None:
    record = json.loads(RESULT.read_text(encoding="utf-8"))
    figures = {figure["name"]: figure for figure in record["figures"]}
    text = README.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    table = "\n".join(rows(figures))
    README.write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}", encoding="utf-8")
    draw(figures, RESULT.with_suffix(".png"))


def rows(figures: Figures) -> list[str]:
    """Return the lines of a Markdown table."""
    draft = f"attn.draft.{MAIN}"
    copy = figures["copy.tbps"]["value"]
    lines = [
        f"| one H200, copies at {copy:.2f} TB/s | log4 | uniform4 | against |",
        "|---|---|---|---|",
        _row("draft, 16 x 32768, one layer", figures, draft + ".{}.us", "{:.0f} us"),
        _row("draft, share of copy bandwidth", figures, draft + ".{}.bandwidth_share", "{:.0%}"),
        _row(
            "draft, times as fast as FlashInfer BF16",
            figures,
            draft + ".{}.vs_flashinfer_bf16",
            "{:.2f} ± {spread:.2f}",
            "{:.0f} us",
        ),
    ]
    lines.append(
        _row(
            "draft from 2-bit anchors, times as fast as FlashInfer BF16",
            figures,
            f"attn.draft2bit.{MAIN}" + ".{}.vs_flashinfer_bf16",
            "{:.2f} ± {spread:.2f}",
            "{:.0f} us",
        )
    )
    grid = {codec: _grid(figures, codec) for codec in CODECS}
    least = {codec: min(grid[codec].values()) for codec in CODECS}
    lines.append(
        "| draft, slowest of batch 1 to 64 x 4K to 128K, times as fast as FlashInfer BF16 or fp8 | "
        f"{least['log4']:.2f} | {least['uniform4']:.2f} | the faster dtype |"
    )
    lines += [
        _row(
            f"verify, {tokens} query tokens, 16 x 32768, times as fast as FlashInfer BF16 prefill",
            figures,
            f"attn.verify{tokens}.{MAIN}" + ".{}.vs_flashinfer_bf16",
            "{:.2f} ± {spread:.2f}",
            "{:.0f} us",
        )
        for tokens in VERIFY_TOKENS
    ]
    lines += [
        _row(
            f"verify, {tokens} query tokens, share of copy bandwidth",
            figures,
            f"attn.verify{tokens}.{MAIN}" + ".{}.bandwidth_share",
            "{:.0%}",
        )
        for tokens in VERIFY_TOKENS
    ]
    lines += [
        _row(f"encode, {target}, BF16 read", figures, f"encode.{{}}.{target}.tbps", "{:.2f} TB/s")
        for target in ("exact", "int8")
    ]
    lines += [
        _row(
            f"encode, {target}, bytes moved, share of copy bandwidth",
            figures,
            f"encode.{{}}.{target}.bandwidth_share",
            "{:.0%}",
        )
        for target in ("exact", "int8")
    ]
    append = "append, batch 16, one layer"
    return [*lines, _row(append, figures, "append.us_per_layer", "{:.1f} us")]


def _row(what: str, figures: Figures, name: str, form: str, baseline: str = "") -> str:
    found = [figures[name.format(codec)] for codec in CODECS]
    cells = [form.format(figure["value"], spread=figure["spread"]) for figure in found]
    against = baseline.format(found[0]["baseline"]) if baseline else ""
    return f"| {what} | {' | '.join(cells)} | {against} |"


def _grid(figures: Figures, codec: str) -> dict[str, float]:
    """Return the speed-up by shape, such as "16x32768"."""
    end = f".{codec}.vs_flashinfer"
    return {
        name.removeprefix("attn.draft.grid.").removesuffix(end): figure["value"]
        for name, figure in figures.items()
        if name.startswith("attn.draft.grid.") and name.endswith(end)
    }


def draw(figures: Figures, path: Path) -> None:
    """Draw speed-ups over the faster of FlashInfer BF16 and fp8, by shape, to a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), dpi=150)
    for offset, codec in zip((-0.2, 0.2), CODECS, strict=True):
        grid = _grid(figures, codec)
        axes.bar([i + offset for i in range(len(grid))], grid.values(), 0.4, label=codec)
        axes.set_xticks(range(len(grid)), grid, rotation=60, ha="right")
    axes.axhline(1, color="0.4", linewidth=0.8)
    axes.set(
        ylabel="times as fast",
        title="Draft attention against the faster of FlashInfer BF16 and fp8",
    )
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    main()
