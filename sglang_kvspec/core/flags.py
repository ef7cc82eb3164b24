"""The --kvspec flags: type, unit, range, default, needs and help of each, declared once.

This table is the source of KVSpecConfig's defaults and checks, of the command line and its help,
of the checks of a server's arguments, and of the tables of flags in README.md and docs/.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from sglang_kvspec.core.compressor import AUTO_COMPRESSOR, GENERATED_SHARE, CompressorText
from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.flag import Flag
from sglang_kvspec.core.flag_kinds import (
    MOST,
    ChoiceOrFolder,
    Integer,
    Name,
    Number,
    Switch,
    Text,
    choice_of,
)
from sglang_kvspec.core.flag_needs import (
    DEFAULT_PAGE_SIZE,
    IN_HOST_MEMORY,
    PREFIX_TIER,
    Need,
    ServerNeed,
    any_of,
    can_verify,
    drafts_at_all,
    drafts_by_itself,
    drafts_in_rounds,
    drafts_with_ngrams,
    fits_host,
    fits_prefix_host,
    frees_no_anchors_that_it_sends,
    has_budget_that_frees_anchors,
    has_default_pages,
    has_no_view,
    has_view_of_its_drafts,
    is_not_contradicted,
    is_not_decode_server,
    prefills_one_request,
    reads_some_pages,
    stores_no_freed_anchors,
    verifies_without_freed_anchors,
)
from sglang_kvspec.core.network_flags import NETWORK_FLAGS
from sglang_kvspec.core.seams import (
    CODECS,
    DRAFT_VIEWS,
    DRAFTERS,
    SCORERS,
    TARGET_ATTENTIONS,
    VERIFY_SCHEDULERS,
)

Target = Literal["exact", "int8"]
Arithmetic = Literal["fast", "deterministic"]
Kernels = Literal["auto", "cuda", "triton"]
Stream = Literal["paced", "burst"]
Weights = Literal["auto", "target", "int4"]

AUTO_DRAFT_LEN = "auto"
AUTO_SCHEDULE = "auto"
AUTO_DRAFT_VIEW = "auto"
AUTO_BUDGET = "auto"
AUTO_WEIGHTS = "auto"
MAX_DRAFT_LEN = 64
MOST_RECENT_PAGES = 64
MAX_HOST_GB = MOST
DEFAULT_PREFIX_GB = 16.0


SWITCH = Flag(
    "",
    Switch(),
    default=False,
    help="turn KVSpec on; the value may be omitted; without this flag the server is plain SGLang",
    hint=": write --kvspec, or `kvspec: true` in a --config file",
)

NEEDS_NGRAMS = Need(
    drafts_with_ngrams,
    "{flag} {value} has no effect with --kvspec-drafter {config.drafter} (allowed: ngram)",
    note="needs `--kvspec-drafter ngram`",
)

FLAGS: tuple[Flag, ...] = (
    Flag(
        "target",
        choice_of(Target),
        default="exact",
        help="precision that output is verified against: the model's own KV dtype, bit by bit "
        "(`exact`), or 8-bit KV (`int8`)",
        note="residuals of `int8` take a quarter of the bytes of `exact`",
        server_needs=(
            ServerNeed(
                has_default_pages,
                "--page-size {server.arguments[page_size]} cannot be combined with {flag} {value} "
                f"on a GPU (allowed: {DEFAULT_PAGE_SIZE})",
                only_on_gpu=True,
            ),
        ),
    ),
    Flag(
        "target_attention",
        Name("NAME", TARGET_ATTENTIONS),
        default=None,
        unset="the value of `--kvspec-target`; `deterministic` or `int8_deterministic` with "
        "`--enable-deterministic-inference`",
        help="GPU kernels for attention at the target precision",
        note="each implementation serves one `--kvspec-target`: `deterministic` serves `exact`, "
        "`int8_deterministic` serves `int8`",
    ),
    Flag(
        "arithmetic",
        choice_of(Arithmetic),
        default=None,
        unset="`fast`; `deterministic` with `--enable-deterministic-inference`",
        help="order of sums in the target's forwards: whatever is fastest (`fast`), or one that "
        "makes results independent of other requests, of chunks and of drafts (`deterministic`)",
        note="`deterministic` turns SGLang's `--enable-deterministic-inference` on, and needs a "
        "GPU",
        server_needs=(
            ServerNeed(
                is_not_contradicted,
                "{flag} {value} cannot be combined with --enable-deterministic-inference (allowed: "
                "deterministic)",
            ),
        ),
    ),
    Flag(
        "kernels",
        choice_of(Kernels),
        default="auto",
        help="KVSpec's own kernels on a GPU: CUDA (`cuda`), with a refusal where they do not cover "
        "the GPU or the model; Triton (`triton`); or CUDA where they do, and Triton elsewhere "
        "(`auto`)",
        note="CUDA kernels are for Hopper only; operations without one run in Triton with `cuda`, "
        "too; `exact` verifies with FlashInfer in any case; a CPU allows `auto` only",
    ),
    Flag(
        "codec",
        Name("NAME", CODECS),
        default="uniform4",
        help="rule that splits a page into anchor and residual: uniform codes (`uniform4`, as in "
        "QuantSpec), sign and magnitude by chunk (`log4`, as in Lynx), or anchors as in KIVI, "
        "KVQuant, RotateKV or TurboQuant (`kivi`, `kvquant`, `rotatekv`, `turboquant`)",
        note="the last four need `--kvspec-target exact`; `kivi`, `kvquant` and `rotatekv` serve "
        "on a CPU only, and `turboquant` on a GPU with `SGLANG_KVSPEC_UNTESTED=1`",
    ),
    Flag(
        "anchor_bits",
        Integer("N", least=1, most=8),
        default=None,
        unset="4; 2 with `kivi` and `rotatekv`, 3 with `kvquant` and `turboquant`",
        help="bits of a code in an anchor: 4 or 2 with `uniform4` and `log4`, 2 to 4 with the "
        "other codecs; drafts with fewer bits agree with the target less often",
    ),
    Flag(
        "draft_len",
        Integer("N|auto", least=0, most=MAX_DRAFT_LEN, word=AUTO_DRAFT_LEN),
        default=AUTO_DRAFT_LEN,
        help="number of drafts before a verification; `auto` adapts to each request's acceptance, "
        "0 turns drafting off",
        needs=(
            Need(
                can_verify,
                "{flag} {value} has no effect with --kvspec-transfer {config.transfer} (allowed: "
                "auto, 0): after a lossy transfer there is no exact KV to verify drafts against",
                note="a lossy `--kvspec-transfer` allows `auto` and 0 only",
            ),
        ),
    ),
    Flag(
        "recent_pages",
        Integer("N", least=1, most=MOST_RECENT_PAGES),
        default=1,
        help="number of full pages of its newest tokens that a request keeps in full precision, in "
        "addition to its partial page",
    ),
    Flag(
        "host_gb",
        Number("GB", unit="GiB"),
        default=None,
        unset="enough for every page on a CPU; 0 on a GPU",
        help="host memory for residuals, in total for all ranks on a machine; 0 keeps residuals in "
        "the KV memory",
        note="on a GPU this memory is pinned",
        server_needs=(
            ServerNeed(fits_host, IN_HOST_MEMORY, error=ConfigError),
            ServerNeed(
                prefills_one_request,
                "--prefill-max-requests {server.arguments[prefill_max_requests]} cannot be "
                "combined with {flag} on a GPU (allowed: 1): the residual cache is only "
                "guaranteed to hold the prefix of one request",
                only_on_gpu=True,
            ),
        ),
    ),
    Flag(
        "residual_hbm_fraction",
        Number("F", most=0.9),
        default=0.25,
        help="share of the KV memory that caches residual pages",
    ),
    Flag(
        "schedule",
        Name("NAME", VERIFY_SCHEDULERS, word=AUTO_SCHEDULE),
        default=AUTO_SCHEDULE,
        help="`rounds`: all requests draft, then all verify; `staggered`: verifications take "
        "turns, and all other requests draft in the same forward; `auto` is `rounds`",
    ),
    Flag(
        "drafter",
        Name("NAME", DRAFTERS),
        default="self",
        help="source of draft tokens: the model itself over anchors, one token a step (`self`), or "
        "several where n-grams of the request's prompt and output propose them (`ngram`)",
        needs=(
            Need(
                drafts_in_rounds,
                "{flag} {value} cannot be combined with --kvspec-schedule staggered (allowed: "
                "auto, rounds): this schedule piggybacks the model's own drafts on verifications",
                note="other drafters than `self` cannot be combined with `--kvspec-schedule "
                "staggered`",
            ),
            Need(
                has_view_of_its_drafts,
                "{flag} {value} cannot be combined with --kvspec-draft-view {config.draft_view} "
                "(allowed: auto, all): a draft view applies to drafts of the model itself only",
            ),
        ),
    ),
    Flag(
        "ngram_always",
        Switch(),
        default=False,
        help="on a GPU, propose wherever n-grams match, also where the server expects fewer "
        "tokens/s from that",
        needs=(NEEDS_NGRAMS,),
    ),
    Flag(
        "ngram_shared",
        Switch(),
        default=False,
        help="propose n-grams of the server's recent outputs, too, not only of the request's own "
        "text; the time of an answer could then tell one user about the text of another",
        needs=(NEEDS_NGRAMS,),
    ),
    Flag(
        "draft_weights",
        ChoiceOrFolder(f"{{{','.join(get_args(Weights))},PATH}}", get_args(Weights)),
        default="target",
        help="weights that the model's own drafts multiply with: the model's (`target`), copies of "
        "its linear layers and vocabulary projection in 4 bits (`int4`), made at the start, 4.5 "
        "bits a weight, those for which more tokens/s are expected (`auto`), or a checkpoint of "
        "the same model in GPTQ or AWQ format, with groups of 64 or a multiple",
        note="4 bits need a model in bf16 on a GPU; a folder has a slash in its path",
        needs=(
            Need(
                drafts_by_itself,
                "{flag} {value} has no effect with --kvspec-drafter {config.drafter} (allowed: "
                "self, ngram)",
            ),
            Need(
                drafts_at_all,
                "{flag} {value} has no effect with --kvspec-draft-len 0 (allowed: auto, 1 or more)",
            ),
        ),
    ),
    Flag(
        "draft_view",
        Name("NAME", DRAFT_VIEWS, word=AUTO_DRAFT_VIEW),
        default=AUTO_DRAFT_VIEW,
        help="selection of the anchor pages that the model's own drafts read: all pages (`all`), "
        "those with the largest attention mass (`pages`), or the newest (`recent`); `auto` is "
        "`pages` where that is quicker than `all`; verifications read all pages",
        note="on a CPU `auto` is `all`",
    ),
    Flag(
        "compressor",
        CompressorText(f"{AUTO_COMPRESSOR}|NAME[:key=value,...]", SCORERS, CODECS),
        default=None,
        unset="none",
        help="method of KV-cache compression whose scores choose what the model's own drafts read, "
        "with its options; `by=tokens` reads single tokens instead of pages, "
        "`heads={head,layer,model,same}` says which heads share a budget or read the same, and "
        "`keep_anchors=false` frees the anchors of pages that drafts do not read; `auto` takes the "
        "method and the budget that a study found best; see `sglang-kvspec compressors`",
        note="a GPU takes methods that score pages at the prefill, or at the target `exact` a "
        "second one, which `auto` never takes; verifications read all pages",
        needs=(
            Need(
                has_no_view,
                "{flag} {value} cannot be combined with --kvspec-draft-view {config.draft_view} "
                "(allowed: auto): both choose what drafts read",
                note="cannot be combined with `--kvspec-draft-view`",
            ),
            Need(
                drafts_by_itself,
                "{flag} {value} cannot be combined with --kvspec-drafter {config.drafter} "
                "(allowed: self, ngram): a compressor applies to drafts of the model itself only",
            ),
            Need(
                drafts_at_all,
                "{flag} {value} has no effect with --kvspec-draft-len 0 (allowed: auto, 1 or more)",
            ),
            Need(
                verifies_without_freed_anchors,
                "{flag} {value} frees anchors, which verifications at --kvspec-target "
                "{config.target} read (allowed: exact)",
            ),
            Need(
                stores_no_freed_anchors,
                "{flag} {value} frees anchors, which --kvspec-prefix-host-gb, --kvspec-prefix-dir "
                "and --kvspec-prefix-server store (allowed: keep_anchors=true)",
            ),
            Need(
                has_budget_that_frees_anchors,
                "{flag} {value} frees no anchors with --kvspec-draft-budget {config.draft_budget} "
                f"(allowed: auto, less than {1 - GENERATED_SHARE:g})",
            ),
        ),
        server_needs=(
            ServerNeed(
                is_not_decode_server,
                "{flag} {value} is not supported on a decode server, which sees no prefill",
            ),
            ServerNeed(
                frees_no_anchors_that_it_sends,
                "{flag} {value} frees anchors, which a prefill server sends (allowed: "
                "keep_anchors=true)",
            ),
        ),
    ),
    Flag(
        "draft_budget",
        Number("F|auto", least=0.02, most=1, word=AUTO_BUDGET),
        default=AUTO_BUDGET,
        help="share of a request's pages that drafts read, in addition to the first page and the "
        "newest ones; `auto` adapts to each request's acceptance",
        note="with `--kvspec-compressor` in addition to what its method always keeps, and `auto` "
        "is 0.1, or the study's",
        needs=(
            Need(
                reads_some_pages,
                "{flag} {value} has no effect with --kvspec-draft-view {config.draft_view} "
                "(allowed: auto, pages, recent)",
                note="has no effect with `--kvspec-draft-view all`",
            ),
        ),
    ),
    Flag(
        "stream",
        choice_of(Stream),
        default="paced",
        help="pace at which a stream gets the tokens of a round: one by one over the expected time "
        "of the next round (`paced`), or all at once (`burst`)",
        note="the last tokens of an answer are never delayed",
    ),
    Flag(
        "prefix_host_gb",
        Number("GB", unit="GiB"),
        default=0,
        help="host memory for cached prefixes that no longer fit in the KV memory, in total for "
        "all ranks on a machine",
        server_needs=(
            ServerNeed(fits_prefix_host, IN_HOST_MEMORY, error=ConfigError),
            *PREFIX_TIER,
        ),
    ),
    Flag(
        "prefix_hbm_fraction",
        Number("F", most=0.9),
        default=0,
        help="share of the KV memory that keeps the anchors of prefixes whose residuals are only "
        "in host memory or on disk",
        needs=(
            any_of(
                "prefix_host_gb",
                "prefix_dir",
                why=", which hold the residuals of kept anchors",
            ),
        ),
    ),
    Flag(
        "prefix_dir",
        Text("DIR", "a folder"),
        default=None,
        unset="none",
        help="folder that keeps cached prefixes across restarts of a server of the same model",
        server_needs=PREFIX_TIER,
    ),
    Flag(
        "prefix_gb",
        Number("GB", unit="GiB", is_above=True),
        default=None,
        unset=DEFAULT_PREFIX_GB,
        help="disk space for the prefixes of a model, in total for all ranks on a machine",
        needs=(any_of("prefix_dir"),),
    ),
    *NETWORK_FLAGS,
)

FLAG_OF: dict[str, Flag] = {flag.option: flag for flag in FLAGS}
DEFAULTS: dict[str, Any] = {flag.option: flag.default for flag in FLAGS}
