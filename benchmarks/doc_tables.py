"""Fill the tables of README.md and docs/, and draw the plot of serving.

Sources are results, the declarations of flags, and the metrics that a server registers.

python benchmarks/doc_tables.py

Any page can hold a table, between `<!-- NAME:begin -->` and `<!-- NAME:end -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compressors.doc_table import compressor_tables, identity_table, run_table
from draft_lengths.doc_table import draft_lengths_table
from flag_tables import flag_tables
from metric_tables import metric_tables
from ngram_tables import ngram_table
from releases.tables import release_tables
from serving import tables
from serving.summary_table import summary
from ttkt.doc_table import gpu_lines

from kvspec_kernels.codecs.coverage import PATHS

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
RESULTS = REPOSITORY / "benchmarks" / "results"

TITLES = {
    "identity.prompts": "prompts on eval-31m and demo-5m (100 to 6000 tokens, 256 new each)",
    "identity.answers": "answers compared with plain SGLang (`int8`: with drafting off), both "
    "codecs: alone, 8 at a time, with prefix hits, in small chunks, with forced retraction, in a "
    "full pool, with strict memory checks",
    "identity.mismatches": "answers that differ",
    "identity.near_ties": "answers that part at a tie of fp32 (`identity_ties.json`)",
    "capacity.vs_plain": "tokens against plain bf16 KV in the same bytes (head size 128)",
    "accept.log4.mean_of_32": "`log4`: mean accepted of 32 drafts, 4096-token prompts, eval-31m",
    "accept.log4.bits": "`log4`: anchor bits an element, metadata included",
    "accept.uniform4.mean_of_32": "`uniform4`: mean accepted of 32 drafts",
    "vnmse.log4": "`log4` anchor: attention-output error (vNMSE)",
    "vnmse.log4_int8": "`log4` at 8 bits: attention-output error (vNMSE)",
    "start.extra_seconds": "seconds that --kvspec adds to the start of a server, on a CPU",
}

TRANSFER_TITLES = {
    "transfer.identity.answers": "answers of a prefill and a decode server, compared with those of "
    "one plain SGLang server: 40 prompts of 1K to 8K tokens and follow-up prompts that share "
    "a prefix, 128 new tokens each, one at a time, 8 at a time, with prefix hits",
    "transfer.mismatches": "answers of the two servers that differ",
    "ttkt.tt2t_vs_full": "time to the 2nd token, `split` against `full`: median over prompts and "
    "links",
    "ttkt.tt2t_vs_full.worst": "time to the 2nd token, `split` against `full`: worst",
    "ttkt.tt2t_vs_int4": "time to the 2nd token, `split` against `int4`",
    "ttkt.tt32t_vs_int8": "time to the 32nd token, `split` against `int8`",
    "ttkt.identical.split": "answers of `split` equal to those of `full`, share",
    "ttkt.identical.int8": "answers of `int8` equal to those of `full`, share",
    "ttkt.identical.int4": "answers of `int4` equal to those of `full`, share",
    "ttkt.identical.cachegen": "answers of `cachegen` equal to those of `full`, share",
    "ttkt.accepted_at_first_verification": "drafts before the first verification, share that was "
    "kept",
    "transfer.gbps_one_core": "transport alone, one core a side, GB/s",
    "transfer.inversion_mb": "MB of residuals that arrived before an offered anchor, maximum",
}

# Title and goal of each figure.
HARDENING_TITLES = {
    "fuzz.http.requests": ("generated requests to servers of one process", "10000 or more"),
    "fuzz.http.answered": ("generated requests answered with 200", ""),
    "fuzz.http.crashes": ("crashed servers or broken connections", "0"),
    "fuzz.http.errors": ("answers with status 500 or above", ""),
    "fuzz.http.neighbours_changed": ("changed answers to valid requests at the same time", "0"),
    "fuzz.http.leaks": ("pages left in use", "0"),
    "fuzz.http.tracebacks": ("tracebacks in the logs", ""),
    "fuzz.roles": ("roles without a finding: prefill, decode, door, prefix server", "4"),
    "stream.p99_itl_vs_plain.paced": (
        "p99 gap between chunks, `paced`, against plain SGLang",
        "2.5 or less",
    ),
    "stream.p99_itl_vs_plain.burst": ("p99 gap between chunks, `burst`, against plain SGLang", ""),
    "stream.rate.paced_vs_burst": ("tokens a second, `paced` against `burst`", "0.98 or more"),
    "stream.rate_vs_plain.paced": ("tokens a second, `paced`, against plain SGLang", ""),
    "refusals.seconds": ("seconds until a wrong --kvspec flag is refused", "3 or less"),
}

SPARSE_TITLES = {
    "sparse.accept.eval31m_32k.pages_0_1_4.vs_all": (
        "accepted drafts against all anchors, eval-31m, 32K, a tenth of the pages",
        "0.95 or more",
    ),
    "sparse.pages_read.eval31m_32k.pages_0_1_4": ("pages read, share", "0.125 or less"),
    "sparse.accept.eval31m_16k.pages_0_1_4.vs_all": (
        "accepted drafts against all anchors, eval-31m, 16K, a tenth of the pages",
        "0.94 or more",
    ),
    "sparse.pages_read.eval31m_16k.pages_0_1_4": ("pages read, share", "0.125 or less"),
    "sparse.accept.smollm2_8k_more.pages_0_17_4.vs_all": (
        "accepted drafts against all anchors, SmolLM2-135M, English, 8K, 0.17 of the pages",
        "0.94 or more",
    ),
    "sparse.pages_read.smollm2_8k_more.pages_0_17_4": ("pages read, share", "0.2 or less"),
    "sparse.accept.smollm2_8k_code.pages_0_17_4.vs_all": (
        "accepted drafts against all anchors, SmolLM2-135M, code, 8K, 0.17 of the pages",
        "0.94 or more",
    ),
    "sparse.recall.eval31m_32k.predicted.age_12": (
        "recall of the mass of the best pages by predicted queries, 12 tokens old",
        "0.9 or more",
    ),
    "sparse.draft_attention.16x32768.uniform4.listed_0.1.vs_all": (
        "draft attention at 16 x 32K, a tenth of the pages, times as fast as all",
        "6.5 or more",
    ),
    "sparse.score.16x32768.uniform4.4_queries.share_of_copy": (
        "scores of all pages at 16 x 32K, share of a copy's bandwidth",
        "0.75 or more",
    ),
    "sparse.select.16x32768.us_per_layer": ("selection, us a layer", "15 or less"),
    "sparse.select.share_of_round": ("scores and selection, share of a round", "0.05 or less"),
    "sparse.8b.32k.bs16.exact": (
        "8B, 16 x 32K, `exact`: tokens/s against plain SGLang in bf16",
        "2.3 or more",
    ),
    "sparse.8b.32k.bs16.int8": ("the same, `int8`", "2.5 or more"),
    "sparse.8b.32k.bs16.fp8": ("the same, plain SGLang with fp8 KV", "-"),
    "sparse.8b.32k.saturated.int8": (
        "8B, 32K, `int8` with 48 requests: tokens/s against plain SGLang's best, 26 requests",
        "3.6 or more",
    ),
    "sparse.8b.128k.saturated.int8": (
        "8B, 128K, `int8` with 12 requests: tokens/s against plain SGLang's best, 6 requests",
        "4 or more",
    ),
    "sparse.32b.32k.saturated.int8": (
        "32B, 32K, `int8` with as many requests as fit: tokens/s against plain SGLang's best",
        "2.2 or more",
    ),
    "sparse.8b.4k.bs64.exact.vs_all": (
        "8B, 64 x 4K, `exact`: tokens/s against drafts that read all pages",
        "0.98 or more",
    ),
    "sparse.smollm2-135m.8k.bs1.exact": (
        "SmolLM2-135M, one request of 8K, `exact`, H100: tokens/s against plain SGLang in bf16",
        "",
    ),
    "sparse.smollm2-135m.8k.bs32.exact": ("the same, 32 requests", ""),
    "sparse.identity.mismatches": (
        "answers of 484 that differ from plain SGLang beyond a tie, fp32, CPU",
        "0",
    ),
    "sparse.identity.near_ties": ("answers that differ at a measured tie of fp32", ""),
    "sparse.identity.gpu.deterministic.mismatches_vs_draft_off": (
        "answers of 200 that differ from drafting off, eval-31m, deterministic",
        "0",
    ),
    "sparse.identity.gpu.smollm2-135m.mismatches": (
        "answers of 1,038 of SmolLM2-135M that differ from drafting off, H100",
        "0",
    ),
    "sparse.identity.gpu.eval-31m.mismatches": ("the same, eval-31m", "0"),
}

LOSSLESS_TITLES = {
    "lossless.vs_fast.exact.32k": ("tokens/s against `exact` without the flag, 16 x 32K", "0.9"),
    "lossless.vs_fast.exact.8k": ("the same, 16 x 8K, H100", "0.9"),
    "lossless.vs_fast.exact.8k.with_prefill": ("the same, prefill included", ""),
    "lossless.vs_fast.int8.32k": ("the same, `int8`, 16 x 32K, H100", "0.9"),
    "lossless.vs_plain.32k": (
        "tokens/s against plain SGLang in bf16 without the flag, 16 x 32K",
        "1.45",
    ),
    "lossless.vs_plain.8k": ("the same, 16 x 8K", ""),
    "lossless.vs_plain_deterministic.8k": (
        "tokens/s against plain SGLang with the flag, 16 x 8K",
        "2.5",
    ),
    "lossless.start.extra_seconds": ("seconds that a start takes longer than without", "5 or less"),
    "lossless.exact.answers": ("`exact` answers of 512 tokens, two models, H100", "1,000 or more"),
    "lossless.exact.mismatches": ("those that differ from drafting off", "0"),
    "lossless.int8.answers": ("the same, `int8`", "1,000 or more"),
    "lossless.int8.mismatches": ("those that differ from drafting off", "0"),
    "lossless.exact.mismatches_vs_draft_off": (
        "answers of 200 that differ from drafting off, eval-31m",
        "0",
    ),
    "lossless.exact.mismatches_vs_draft_off.without_logprobs": (
        "the same, asked without log-probabilities",
        "0",
    ),
    "lossless.fast.deterministic_attention.mismatches_vs_draft_off": (
        "answers of 200 that differ if only attention is deterministic, H100",
        "",
    ),
    "lossless.seeded.mismatches": ("seeded answers of 325 that differ, on a CPU", "0"),
    "gpu_tests.passed": ("tests of `tests/gpu_server` that passed, two H100s", ""),
    "gpu_tests.failed": ("those that failed", "0"),
    "gpu_tests.seconds": ("seconds that they took", "600 or less"),
    "lossless.attention.16x32768.13_queries.share_of_copy": (
        "attention of 13 tokens of 16 x 32K, share of a copy's bandwidth",
        "0.75",
    ),
    "lossless.attention.16x32768.21_queries.share_of_copy": ("the same, 21 tokens", ""),
}
WEIGHTS_TITLES = {
    "w4.accept.target.mean": ("accepted of 16 drafts, the model's own weights", ""),
    "w4.accept.nearest.vs_target_weights": ("4 bits, to the nearest code: share of these", "0.95"),
    "w4.accept.half_quadratic.vs_target_weights": ("4 bits, half-quadratic", "0.95"),
    "w4.accept.compensated.vs_target_weights": ("4 bits, compensated, inputs of code", "0.95"),
    "w4.accept.own_text.vs_target_weights": ("4 bits, compensated, inputs of own text", "0.95"),
}
PROJECTION_TITLES = {
    "w4.accept.own_text.vs_target_weights": ("the model's own, in fp32", ""),
    "w4.accept.own_text.projection_int8.vs_target_weights": ("8 bits, one scale a row", ""),
    "w4.accept.own_text.projection_nearest.vs_target_weights": (
        "4 bits, to the nearest code",
        "0.95",
    ),
    "w4.accept.own_text.projection_own_text.vs_target_weights": (
        "4 bits, compensated, inputs of own text",
        "0.95",
    ),
}
EXACTRES_TITLES = {
    "exactres.bits.smollm2": ("bits an element, all included, SmolLM2-135M", "8.3 or less"),
    "exactres.bits.eval31m": ("the same, eval-31m", "8.3 or less"),
    "exactres.needed_bits.smollm2": ("bits that values need on average, SmolLM2-135M", ""),
    "exactres.needed_bits.eval31m": ("the same, eval-31m", ""),
    "exactres.bits.smollm2.fp16": ("bits an element in fp16, all included, SmolLM2-135M", ""),
    "exactres.bits.eval31m.fp16": ("the same, eval-31m", ""),
    "exactres.fallback_share": ("records that do not fit, the worse model, bf16", "0.01 or less"),
    "exactres.wire.bytes_vs_full.smollm2": (
        "anchor and packed residual on a wire, over plain bf16, SmolLM2-135M",
        "0.8 or less",
    ),
    "exactres.wire.bytes_vs_full.eval31m": ("the same, eval-31m", "0.8 or less"),
    "exactres.prefix_store.bytes_vs_raw.smollm2": (
        "page in a prefix store, over a raw one, SmolLM2-135M",
        "0.65 or less",
    ),
    "exactres.prefix_store.bytes_vs_raw.eval31m": ("the same, eval-31m", "0.65 or less"),
    "exactres.too_large.smollm2": ("pages that a prefix store does not take, SmolLM2-135M", ""),
    "exactres.too_large.eval31m": ("the same, eval-31m", ""),
    "exactres.roundtrip.values": (
        "values of all records, in bf16 and again in fp16",
        "10^9 or more",
    ),
    "exactres.roundtrip.mismatches": ("values that came back with other bits", "0"),
    "exactres.patterns": ("bit patterns in cells of an anchor, of 1,048,576", "all"),
    "exactres.encode.tbps": ("TB/s read while packing, H200", "1.0 or more"),
    "exactres.restore.tbps": ("TB/s read while unpacking, H200", "1.5 or more"),
    "exactres.fetch.by_page.alone.vs_raw": ("packed pages a second from the host, over raw", ""),
    "exactres.fetch.by_page.drafting.vs_raw": ("the same while drafting", ""),
    "exactres.fetch.by_page.draft_slowdown": ("draft step beside these, over one alone", ""),
    "exactres.fetch.by_layer.alone.vs_raw": ("packed pages a second by layer, over raw", ""),
    "exactres.32b.32k.host": ("32B, 11 x 32K, residuals on the host, tokens/s over raw", "1.5"),
    "exactres.wire.bytes_vs_full": (
        "bytes of a transfer of packed KV over a full one",
        "0.8 or less",
    ),
    "exactres.ttkt.client_tt2t_vs_full": (
        "seconds until a client has the 2nd token, over a full transfer, median",
        "0.85 or less",
    ),
    "exactres.ttkt.client_tt2t_vs_full.worst": ("the same, worst", "0.85 or less"),
    "exactres.ttkt.client_tt32t_vs_full": ("the same for the 32nd token, median", "0.7 or less"),
    "exactres.ttkt.client_tt32t_vs_full.worst": ("the same, worst", "0.7 or less"),
    "exactres.identity.answers": ("answers compared", "400 or more"),
    "exactres.identity.mismatches": ("answers that differ", "0"),
}
DRAFT_COST_TITLES = {
    "w4.products.m1": ("products of a layer, 1 row, times as fast as bf16", "2"),
    "w4.products.m16": ("the same, 16 rows", "1.6"),
    "w4.products.m48": ("the same, 48 rows", "1.4"),
    "w4.accept.vs_target_weights": (
        "accepted drafts, share of the model's own weights, eval-31m at 16K",
        "0.95",
    ),
    "w4.accept.eval31m_4k.all.vs_target_weights": ("the same at 4K", "0.95"),
    "w4.accept.eval31m_32k.all.vs_target_weights": ("the same at 32K", "0.95"),
    "cheap.8b.4k.bs1.exact": ("8B, 1 x 4K, `exact`, times plain SGLang", "1.5"),
    "cheap.8b.4k.bs4.exact": ("8B, 4 x 4K, `exact`", "1.4"),
    "cheap.8b.32k.bs1.exact": ("8B, 1 x 32K, `exact`", "1.6"),
    "cheap.8b.32k.bs16.exact": ("8B, 16 x 32K, `exact`", "2.6"),
    "cheap.8b.32k.bs16.int8": ("8B, 16 x 32K, `int8`", "2.9"),
    "cheap.8b.32k.saturated.int8": ("8B at 32K, as many requests as fit, `int8`", "4"),
    "ngram.tokens_per_step.eval-31m.c1": (
        "n-grams, 1 request, eval-31m, text that repeats: drafts a step",
        "1.5",
    ),
    "ngram.vs_self.repeating.eval-31m.c1": ("the same, tokens/s over `self`", "1.25"),
    "ngram.vs_self.other.eval-31m.c1": ("the same, other text", "0.98"),
    "ngram.vs_self.repeating.eval-31m.c4": ("4 requests, text that repeats", "1.25"),
    "ngram.vs_self.other.eval-31m.c4": ("4 requests, other text", "0.98"),
    "start.extra_seconds.w4": ("longer start of a server, seconds", "20"),
    "draft_cost.identity.answers": ("answers compared with drafting off", "300"),
    "draft_cost.identity.mismatches": ("of them differ", "0"),
}
# Ways to multiply, as they are called in figures.
PRODUCTS = {"torch": "torch.mm", "sglang": "SGLang, Triton", "deepgemm": "DeepGEMM"}
INT4_ROWS = (1, 4, 8, 16, 32, 48, 64)
PRODUCT_ROWS = (1, 16, 64, 104, 208, 336, 1024, 8192)


def main() -> None:
    tables_by_name = all_tables()
    for page in pages():
        page.write_text(filled(page.read_text(encoding="utf-8"), tables_by_name), encoding="utf-8")
    tables.draw()


def pages() -> list[Path]:
    """Return the pages that may hold tables."""
    return [REPOSITORY / "README.md", *sorted(DOCS.rglob("*.md"))]


def all_tables() -> dict[str, str]:
    """Return each table by its name."""
    hardening = _figures("hardening")
    # Streams measured alone on the machine replace figures of the same names in hardening.json.
    hardening += _figures("streams")
    return {
        # The file of the main job has older figures of the identity matrix.
        "figures": table(_figures("main_job") + _figures("identity")),
        "transfer": transfer_table(_figures("transfer")),
        "hardening": _goals(hardening, HARDENING_TITLES),
        "sparse": _goals(_figures("sparse"), SPARSE_TITLES),
        "exactres": _goals(_figures("exact_residual"), EXACTRES_TITLES),
        "lossless": _goals(_figures("lossless"), LOSSLESS_TITLES),
        "draft_weights": _goals(_figures("draft_weights_eval31m_2k"), WEIGHTS_TITLES),
        "draft_projection": _goals(
            _figures("draft_weights_vocabulary_eval31m_2k"), PROJECTION_TITLES
        ),
        "draft_cost": _goals(_figures("draft_cost"), DRAFT_COST_TITLES),
        "ngram": ngram_table(RESULTS / "ngram_cpu.json"),
        "coverage": coverage_table(),
        "architectures": architectures_table(RESULTS / "architectures.json"),
        "products": products_table(_figures("deterministic_kernels")),
        "int4_products": int4_table(_figures("int4_products"), _figures("int4_marlin")),
        "draft_lengths": draft_lengths_table(_figures("draft_lengths")),
        "ttkt_gpu": gpu_lines(RESULTS / "ttkt_h200.json"),
        "serving": tables.block(),
        "summary": summary(),
        "compressor_identity": identity_table(RESULTS / "compressor_identity.json"),
        "compressor_same_heads": run_table(RESULTS / "compressors_same_heads.json"),
        "compressor_kvquant": run_table(RESULTS / "compressors_kvquant.json"),
        **compressor_tables(RESULTS / "compressors.json"),
        **flag_tables(),
        **metric_tables(),
        **release_tables(RESULTS / "releases.json"),
    }


def _goals(figures: Sequence[Mapping[str, Any]], titles: Mapping[str, tuple[str, str]]) -> str:
    """Return goal_table() of figures. titles: title and goal of each figure in the table."""
    return goal_table(
        # The later of two figures with the same name counts.
        {row["name"]: row for row in figures},
        {name: title for name, (title, _) in titles.items()},
        {name: goal for name, (_, goal) in titles.items()},
    )


def coverage_table() -> str:
    """Return the sizes that each kernel path declares."""
    header = "| operation | kernels | head sizes | query heads a KV head | page sizes | KV dtypes |"
    rows = [
        f"| {path.operation} | {path.kernels} | {_sizes(path.head_dims)} | "
        f"{'any' if path.most_group is None else f'1 to {path.most_group}'} | "
        f"{_sizes(path.page_sizes)} | {', '.join(path.dtypes)} |"
        for path in PATHS
    ]
    return "\n".join((header, "|---|---|---|---|---|---|", *rows))


def _sizes(sizes: Sequence[int]) -> str:
    """Return sizes as text, those that are evenly spaced as a range."""
    first, step, last = sizes[0], sizes[1] - sizes[0], sizes[-1]
    if len(sizes) > 3 and list(sizes) == list(range(first, last + 1, step)):
        return f"multiples of {step} from {first} to {last}"
    return ", ".join(map(str, sizes))


def architectures_table(path: Path) -> str:
    """Return the models of check_architectures.py, and what became of each. The result file has the
    reason why a server did not start."""
    models = json.loads(path.read_text(encoding="utf-8"))["settings"]["models"]
    rows = [
        f"| {name} | `{found['architecture']}` | {_outcome(found['result'])} |"
        for name, found in models.items()
    ]
    return "\n".join(("| model | class | on the CPU server |", "|---|---|---|", *rows))


def _outcome(result: str) -> str:
    """Return a result of check_architectures.py without the reason why a server did not start."""
    server, failure, _ = result.partition(": did not start")
    return f"{server} did not start" if failure else result


def filled(text: str, tables_by_name: Mapping[str, str]) -> str:
    """Return a page with its tables filled in. Raises SystemExit for a mark without a table."""
    for name in re.findall(r"<!-- (\w+):begin -->", text):
        if name not in tables_by_name:
            raise SystemExit(
                f"<!-- {name}:begin --> marks an unknown table: use one of "
                f"{', '.join(tables_by_name)}"
            )
        text = replace_between(text, name, tables_by_name[name])
    return text


def _figures(name: str) -> list[dict[str, Any]]:
    record = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return list(record["figures"])


def transfer_table(figures: list[dict[str, Any]]) -> str:
    """Return the table of the split-stream transfer. Its result holds the goals."""
    rows = {row["name"]: row for row in figures}
    baselines = {name: row["baseline"] for name, row in rows.items()}
    goals = {name: goal if isinstance(goal, float) else "" for name, goal in baselines.items()}
    return goal_table(rows, TRANSFER_TITLES, goals)


def products_table(figures: Sequence[Mapping[str, Any]]) -> str:
    """Return the times of a layer's products by number of rows, and how many times as long others
    take."""
    values = {row["name"]: row["value"] for row in figures}
    lines = [
        f"| rows | us | {' | '.join(PRODUCTS.values())} |",
        "|---|---|" + "---|" * len(PRODUCTS),
    ]
    for count in PRODUCT_ROWS:
        name = f"product.layer.{count}_rows"
        others = [f"{values[f'{name}.vs_{system}']:.2f}x" for system in PRODUCTS]
        lines.append(f"| {count:,} | {values[f'{name}.us']:,.0f} | {' | '.join(others)} |")
    return "\n".join(lines)


def int4_table(figures: Sequence[Mapping[str, Any]], marlin: Sequence[Mapping[str, Any]]) -> str:
    """Return how many times as fast as bf16 products with weights in 4 bits are, by number of
    rows. marlin: figures of the run with Marlin."""
    ours, theirs = ({row["name"]: row["value"] for row in rows} for rows in (figures, marlin))
    lines = [
        "| rows | bf16, us | 4 bits, us | times as fast | Marlin, times as fast |",
        "|---|---|---|---|---|",
    ]
    for count in INT4_ROWS:
        name = f"w4.products.m{count}"
        other = theirs.get(f"w4.marlin.m{count}")
        lines.append(
            f"| {count} | {ours[f'w4.bf16.m{count}.us']:.0f} | {ours[f'{name}.us']:.0f} | "
            f"{ours[name]:.2f}x | {'' if other is None else f'{other:.2f}x'} |"
        )
    return "\n".join(lines)


def goal_table(
    rows: Mapping[str, dict[str, Any]], titles: Mapping[str, str], goals: Mapping[str, Any]
) -> str:
    """Return a table of figures in the order of their titles, each with its goal. A spread is half
    the range of the values."""
    lines = ["| figure | value | goal |", "|---|---|---|"]
    lines += [f"| {titles[name]} | {value_of(rows[name])} | {goals[name]} |" for name in titles]
    return "\n".join(lines)


def table(figures: list[dict[str, Any]]) -> str:
    """Return figures in the order of TITLES. The later of two figures with the same name counts."""
    rows = {row["name"]: row for row in figures}
    lines = ["| figure | value | compared with |", "|---|---|---|"]
    for name, title in TITLES.items():
        if name in rows:
            lines.append(f"| {title} | {value_of(rows[name])} | {baseline_of(rows[name])} |")
    return "\n".join(lines)


def value_of(row: dict[str, Any]) -> str:
    value = row["value"]
    small = isinstance(value, float) and 0 < abs(value) < 0.01
    text = f"{value:.2e}" if small else f"{value:.4g}" if isinstance(value, float) else str(value)
    spread = row["spread"]
    if not spread:
        return text
    return f"{text} ± {spread:.1e}" if small else f"{text} ± {spread:.2g}"


def baseline_of(row: dict[str, Any]) -> str:
    """Return what a figure is compared with. A number is uniform4's figure: bench_acceptance.py
    compares each log4 figure with it."""
    baseline = row["baseline"]
    if isinstance(baseline, float):
        small = baseline < 0.01
        return f"`uniform4`: {baseline:.2e}" if small else f"`uniform4`: {baseline:.4g}"
    return baseline or ""


def replace_between(text: str, mark: str, content: str) -> str:
    """Put `content` between the comments `<!-- mark:begin -->` and `<!-- mark:end -->`."""
    begin, end = f"<!-- {mark}:begin -->", f"<!-- {mark}:end -->"
    before, rest = text.split(begin)
    return f"{before}{begin}\n{content}\n{end}{rest.split(end)[1]}"


if __name__ == "__main__":
    main()
