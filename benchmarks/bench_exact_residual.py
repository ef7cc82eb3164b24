"""Measure the packed exact residual on the KV of real models: bits, pages that do not fit, and that
every bit comes back.

    python benchmarks/bench_exact_residual.py
    python benchmarks/bench_exact_residual.py --values 1e7 --patterns 0 --out /tmp/short.json

Each model answers nothing: its prompts are computed in fp32, and K and V are rounded to bf16, and
to fp16. Prompts follow each other until the models together have --values values. Then come all
65536 bit patterns in every cell of an anchor of the last model: a few values of each page are
replaced after its anchor was made. Runs on a CPU, in plain torch.

exactres.bits counts the whole record of every page, used or not, and the raw V of a record that
does not fit. exactres.wire.bytes_vs_full: bytes of anchor and packed residual on a wire, over
those of plain KV. exactres.prefix_store.bytes_vs_raw: bytes of a page in a prefix store, over those
of its anchor and raw residual. exactres.too_large: pages of all layers that need more than a slot
of a store has.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from acceptance.model import Llama
from acceptance.prompts import cut_prompts
from acceptance.report import Figure, write_json
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kvspec_kernels.packed_format import VERSION, PackedLayout
from kvspec_kernels.reference import fragments, nibbles, packed_exact
from sglang_kvspec.codecs import make_codec
from sglang_kvspec.codecs.base import Codec
from sglang_kvspec.kv.geometry import KVGeometry
from sglang_kvspec.kv.residual_forms import PackedForm

ROOT = Path(__file__).resolve().parents[1]
CODEC, PAGE_SIZE = "uniform4", 64
PATTERNS, CELLS = 65536, 16
# Share of a page's values that are replaced by patterns: most of them escape, and all must fit.
REPLACED = 0.01

KV = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Found:
    """Sums over the records of one model and dtype."""

    layout: PackedLayout
    records: int = 0
    unfit: int = 0
    values: int = 0
    mismatches: int = 0
    used_words: list[int] = field(default_factory=list)
    # By page of all layers, the records that do not fit.
    unfit_of_pages: list[int] = field(default_factory=list)
    form: PackedForm | None = None
    anchor_bits: float = 0.0

    @property
    def fallback_share(self) -> float:
        return self.unfit / self.records

    @property
    def bits(self) -> float:
        raw_v = 8 * self.layout.raw_nbytes / (2 * self.layout.num_values)
        return self.layout.bits_per_element + raw_v * self.fallback_share

    @property
    def slot_bits(self) -> float:
        """Bits of an element in a slot of a store."""
        assert self.form is not None
        num_values = self.form.num_records * 2 * self.layout.num_values
        return 8 * self.form.slot_bytes / num_values

    @property
    def too_large_share(self) -> float:
        assert self.form is not None
        too_large = [count > self.form.num_spare for count in self.unfit_of_pages]
        return sum(too_large) / len(too_large)


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    found: dict[str, Found] = {}
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with progress:
        for name, folder, text in args.models:
            task = progress.add_task(name, total=args.values / len(args.models))
            for layers in kv_pages(folder, text, args.length, args.prompts, args.seed):
                for dtype in (torch.bfloat16, torch.float16):
                    key = name if dtype == torch.bfloat16 else f"{name}.fp16"
                    add_prompt(found, key, layers, dtype)
                progress.advance(task, 4 * len(layers) * layers[0][0].numel())
                # Both dtypes count.
                if 2 * found[name].values >= args.values / len(args.models):
                    break
        covered = 0
        if args.patterns:
            task = progress.add_task("bit patterns", total=CELLS * PATTERNS)
            for covered in all_patterns(found, args.models[-1], args.length, args.seed):
                progress.update(task, completed=covered)
    settings = {
        "format_version": VERSION,
        "codec": CODEC,
        "page_size": PAGE_SIZE,
        "models": {name: text for name, _, text in args.models},
        "prompt_len": args.length,
        "values": {name: each.values for name, each in found.items()},
        "records": {name: each.records for name, each in found.items()},
        "replaced_by_patterns": REPLACED,
        "used_words": {name: quantiles(each.used_words) for name, each in found.items()},
        "seed": args.seed,
    }
    write_json(args.out, "exact_residual", torch.device("cpu"), settings, figures(found, covered))
    print(f"written: {args.out}")


def figures(found: dict[str, Found], covered: int) -> list[Figure]:
    """Return the figures by model, and over all of them."""
    rows = []
    models = {name: each for name, each in found.items() if not name.startswith("patterns")}
    for name, each in models.items():
        mean = 32 * sum(each.used_words) / (each.records * 2 * each.layout.num_values)
        rows += [
            Figure(f"exactres.bits.{name}", each.bits, "bits an element", None, 16.0),
            Figure(f"exactres.needed_bits.{name}", mean, "bits an element"),
            Figure(f"exactres.fallback_share.{name}", each.fallback_share, "of records"),
        ]
        raw = each.anchor_bits + 16
        stored, sent = each.anchor_bits + each.slot_bits, each.anchor_bits + each.bits
        rows += [
            Figure(f"exactres.prefix_store.bytes_vs_raw.{name}", stored / raw, "x", None, raw),
            Figure(f"exactres.wire.bytes_vs_full.{name}", sent / 16, "x", None, 16.0),
            Figure(f"exactres.too_large.{name}", each.too_large_share, "of pages of all layers"),
        ]
    of_bf16 = [each for name, each in models.items() if "." not in name]
    values = sum(each.values for each in found.values())
    mismatches = sum(each.mismatches for each in found.values())
    return [
        *rows,
        Figure(
            "exactres.fallback_share",
            max(each.fallback_share for each in of_bf16),
            "of records, the worse model in bf16",
        ),
        Figure("exactres.roundtrip.values", values, "values"),
        Figure("exactres.roundtrip.mismatches", mismatches, "values", None, 0),
        Figure("exactres.patterns", covered, f"of {CELLS * PATTERNS} patterns in cells"),
    ]


def quantiles(words: Sequence[int]) -> dict[str, float]:
    used = torch.tensor(words, dtype=torch.float64)
    return {str(share): used.quantile(share).item() for share in (0.0, 0.5, 0.9, 0.99, 1.0)}


def kv_pages(folder: Path, text: str, length: int, count: int, seed: int) -> Iterator[list[KV]]:
    """Yield K and V of all layers of each prompt as pages [pages, PAGE_SIZE, heads, D]."""
    model = Llama(folder, torch.device("cpu"))
    prompts, _ = cut_prompts(folder, count, length, seed, text)
    for prompt in prompts:
        cache, _, _ = model.prefill(prompt[None], 0)
        yield [(as_pages(k), as_pages(v)) for k, v in cache]


def as_pages(part: torch.Tensor) -> torch.Tensor:
    """Return one layer's [1, heads, tokens, D] as pages [pages, PAGE_SIZE, heads, D]."""
    return part[0].transpose(0, 1).unflatten(0, (-1, PAGE_SIZE))


def codec_of(pages: torch.Tensor, *, packs: bool = False) -> Codec:
    sizes = {"page_size": PAGE_SIZE, "head_dim": pages.shape[3], "dtype": pages.dtype}
    return make_codec(CODEC, target="exact", packs=packs, **sizes)


def add_prompt(found: dict[str, Found], key: str, layers: Sequence[KV], dtype: torch.dtype) -> None:
    """Add the pages of all layers of a prompt, and count those that need more than a slot."""
    unfit = 0
    for k, v in layers:
        pages = (k.to(dtype), v.to(dtype))
        unfit = unfit + add(found, key, pages, pages)
    each, (_, page_size, heads, head_dim) = found[key], layers[0][0].shape
    codec = codec_of(pages[0], packs=True)
    assert codec.packed is not None
    each.form = PackedForm(codec.packed, KVGeometry(len(layers), heads, head_dim, page_size, dtype))
    each.anchor_bits = codec.anchor_bits_per_element
    each.unfit_of_pages += unfit.tolist()


def add(found: dict[str, Found], key: str, anchored: KV, pages: KV) -> torch.Tensor:
    """Encode `pages` beside the anchors of `anchored`, decode them, and count. Return by page how
    many of its records do not fit."""
    codec = codec_of(pages[0])
    layout = PackedLayout(PAGE_SIZE, pages[0].shape[3], pages[0].dtype)
    anchors = codec.encode(*anchored).anchor
    known = (codec.decode_anchor(anchors), anchors, codec.anchor_layout, layout)
    packed = packed_exact.encode(*pages, *known)
    decoded = packed_exact.decode(packed.records, packed.raw_v, *known)
    each = found.setdefault(key, Found(layout))
    each.records += packed.fits.numel()
    each.unfit += int((~packed.fits).sum())
    each.values += sum(part.numel() for part in pages)
    each.used_words += packed.words.flatten().tolist()
    for ours, theirs in zip(decoded, pages, strict=True):
        differ = ours.view(torch.int16) != theirs.contiguous().view(torch.int16)
        each.mismatches += int(differ.sum())
    return (~packed.fits).sum(1)


def all_patterns(
    found: dict[str, Found], model: tuple[str, Path, str], length: int, seed: int
) -> Iterator[int]:
    """Add pages with every bit pattern in every cell, yielding how many have been."""
    _, folder, text = model
    generator = torch.Generator().manual_seed(seed)
    following = torch.zeros(CELLS, dtype=torch.int64)
    while int(following.min()) < PATTERNS:
        prompts = kv_pages(folder, text, length, 8, seed + 1)
        for pages in (layer for layers in prompts for layer in layers):
            k, v = (part.to(torch.bfloat16) for part in pages)
            replaced = []
            cells = cells_of(k, v)
            for part, codes in zip((k, v), cells, strict=True):
                chosen = torch.rand(part.shape, generator=generator) < REPLACED
                replaced.append(with_patterns(part, codes, chosen, following))
            add(found, "patterns", (k, v), (replaced[0], replaced[1]))
            assert found["patterns"].unfit == 0, (
                "patterns of records that do not fit are not tested"
            )
            yield int(following.clamp_max(PATTERNS).sum())
            if int(following.min()) >= PATTERNS:
                return


def cells_of(k: torch.Tensor, v: torch.Tensor) -> KV:
    """Return the anchor codes of K and V, like these pages, int64."""
    codec = codec_of(k)
    anchors = codec.encode(k, v).anchor
    parts = []
    for part in "kv":
        packed = fragments.packed_words(anchors, part, codec.anchor_layout)
        words = fragments.by_halves(nibbles.unpack(packed))
        parts.append(fragments.codes_from_words(words, part, PAGE_SIZE).transpose(1, 2).long())
    return parts[0], parts[1]


def with_patterns(
    pages: torch.Tensor, codes: torch.Tensor, chosen: torch.Tensor, following: torch.Tensor
) -> torch.Tensor:
    """Return a copy of pages in which chosen values have the next patterns of their cell.
    following: the next pattern of each cell, advanced in place."""
    bits = pages.contiguous().view(torch.int16).clone()
    for cell in range(CELLS):
        places = (chosen & (codes == cell)).nonzero(as_tuple=True)
        count = len(places[0])
        patterns = torch.arange(count) + following[cell]
        bits[places] = (patterns % PATTERNS - PATTERNS // 2).to(torch.int16)
        following[cell] += count
    return bits.view(pages.dtype)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    models = [
        ("smollm2", ROOT / ".kvspec" / "models" / "smollm2-135m", "english"),
        ("eval31m", ROOT.parent / "shared" / "models" / "eval-31m", "code"),
    ]
    add("--model", nargs=3, action="append", dest="models", metavar=("NAME", "FOLDER", "TEXT"),
        help="model, and `code` or `english`; may be repeated (default: SmolLM2-135M and "
        "eval-31m)")  # fmt: skip
    add("--values", type=float, default=1.05e9, help="values of all models, each in bf16 and fp16")
    add("--prompts", type=int, default=240, help="most prompts of a model")
    add("--length", type=int, default=1024, help="tokens of a prompt")
    add("--patterns", type=int, default=1, help="0: no bit patterns")
    add("--threads", type=int, default=1)
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=ROOT / "benchmarks" / "results" / "exact_residual_bits.json")
    args = parser.parse_args()
    args.models = [(name, Path(folder), text) for name, folder, text in args.models or models]
    for _, folder, _ in args.models:
        if not (folder / "config.json").exists():
            parser.error(f"no model in {folder}: run models/smollm2.py, or give --model")
    return args


if __name__ == "__main__":
    main()
