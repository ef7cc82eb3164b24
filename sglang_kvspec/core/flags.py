"""The --kvspec flags: type, unit, range, default, needs and help of each, declared once.

This table is the source of KVSpecConfig's defaults and checks, of the command line and its help,
of the checks of a server's arguments, and of the tables of flags in README.md and docs/.
"""

from __future__ import annotations

from typing import Any, Literal

from sglang_kvspec.core.errors import ConfigError
from sglang_kvspec.core.flag import Flag
from sglang_kvspec.core.flag_kinds import MOST, Integer, Name, Number, Switch, Text, choice_of
from sglang_kvspec.core.flag_needs import (
    DEFAULT_PAGE_SIZE,
    IN_HOST_MEMORY,
    PREFIX_TIER,
    Need,
    ServerNeed,
    any_of,
    can_verify,
    drafts_in_rounds,
    fits_host,
    fits_prefix_host,
    has_default_pages,
    is_not_deterministic,
    prefills_one_request,
    reads_all_pages,
)
from sglang_kvspec.core.network_flags import NETWORK_FLAGS
from sglang_kvspec.core.seams import (
    CODECS,
    DRAFT_VIEWS,
    DRAFTERS,
    TARGET_ATTENTIONS,
    VERIFY_SCHEDULERS,
)

Target = Literal["exact", "int8"]
Stream = Literal["paced", "burst"]

AUTO_DRAFT_LEN = "auto"
AUTO_SCHEDULE = "auto"
MAX_DRAFT_LEN = 64
MOST_RECENT_PAGES = 64
MAX_HOST_GB = MOST
DEFAULT_PREFIX_GB = 16.0


SWITCH = Flag(
    "",
    Switch(),
    default=False,
    help="turn KVSpec on, also without a value; without it the server is SGLang's own",
    hint=": write --kvspec, or `kvspec: true` in a --config file",
)

FLAGS: tuple[Flag, ...] = (
    Flag(
        "target",
        choice_of(Target),
        default="exact",
        help="precision that output is verified against: the model's own KV dtype, bit by bit "
        "(`exact`), or 8-bit KV (`int8`)",
        note="`int8` has a quarter of the residual bytes",
        server_needs=(
            ServerNeed(
                is_not_deterministic,
                "{flag} {value} cannot be combined with --enable-deterministic-inference (allowed: "
                "exact): its kernel splits contexts by what runs beside them",
                only_on_gpu=True,
            ),
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
        unset="as `--kvspec-target`; `deterministic` with `--enable-deterministic-inference`",
        help="kernels of a GPU that attend at the target precision",
        note="each serves one `--kvspec-target`: `deterministic` serves `exact`",
    ),
    Flag(
        "codec",
        Name("NAME", CODECS),
        default="uniform4",
        help="how a page is split into anchor and residual: uniform codes (`uniform4`, as in "
        "QuantSpec), or sign and magnitude by chunk (`log4`, as in Lynx)",
    ),
    Flag(
        "anchor_bits",
        Integer("N", least=1, most=8),
        default=None,
        unset="4",
        help="bits of a code in an anchor: 4, or 2 with `uniform4`, whose drafts agree less often",
    ),
    Flag(
        "draft_len",
        Integer("N|auto", least=0, most=MAX_DRAFT_LEN, word=AUTO_DRAFT_LEN),
        default=AUTO_DRAFT_LEN,
        help="tokens drafted before a verification; `auto` follows each request's acceptance, 0 "
        "turns drafting off",
        needs=(
            Need(
                can_verify,
                "{flag} {value} has no effect with --kvspec-transfer {config.transfer}, which "
                "leaves nothing to verify against (allowed: auto, 0)",
                note="a lossy `--kvspec-transfer` allows `auto` and 0 only",
            ),
        ),
    ),
    Flag(
        "recent_pages",
        Integer("N", least=1, most=MOST_RECENT_PAGES),
        default=1,
        help="full pages of the newest tokens kept in full precision, besides the partial page",
    ),
    Flag(
        "host_gb",
        Number("GB", unit="GiB"),
        default=None,
        unset="enough for every page; on a GPU 0",
        help="host memory for residuals, of all ranks on a machine together; 0 keeps residuals in "
        "the KV memory",
        note="on a GPU this memory is pinned",
        server_needs=(
            ServerNeed(fits_host, IN_HOST_MEMORY, error=ConfigError),
            ServerNeed(
                prefills_one_request,
                "--prefill-max-requests {server.arguments[prefill_max_requests]} cannot be "
                "combined with {flag} on a GPU (allowed: 1): the residual cache is only sure to "
                "hold the prefix of one request",
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
        help="what proposes tokens: the model itself over anchors (`self`)",
        needs=(
            Need(
                drafts_in_rounds,
                "{flag} {value} cannot be combined with --kvspec-schedule staggered (allowed: "
                "auto, rounds), in which the model itself drafts beside verifications",
                note="other drafters than `self` cannot be combined with `--kvspec-schedule "
                "staggered`",
            ),
            Need(
                reads_all_pages,
                "{flag} {value} cannot be combined with --kvspec-draft-view {config.draft_view}, "
                "which says what the model's own drafts read",
            ),
        ),
    ),
    Flag(
        "draft_view",
        Name("NAME", DRAFT_VIEWS),
        default="all",
        help="which anchor pages the model's own drafts read; verifications read all",
    ),
    Flag(
        "stream",
        choice_of(Stream),
        default="paced",
        help="tokens of a round reach a stream one by one over the expected time of the next round "
        "(`paced`), or all at once (`burst`)",
        note="the end of an answer is never held",
    ),
    Flag(
        "prefix_host_gb",
        Number("GB", unit="GiB"),
        default=0,
        help="host memory for cached prefixes that no longer fit the KV memory, of all ranks on a "
        "machine together",
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
                why=", where residuals of kept anchors would be",
            ),
        ),
    ),
    Flag(
        "prefix_dir",
        Text("DIR", "a folder"),
        default=None,
        unset="none",
        help="folder that keeps cached prefixes over restarts of the same model",
        server_needs=PREFIX_TIER,
    ),
    Flag(
        "prefix_gb",
        Number("GB", unit="GiB", is_above=True),
        default=None,
        unset=DEFAULT_PREFIX_GB,
        help="disk space for the prefixes of a model, of all ranks on a machine together",
        needs=(any_of("prefix_dir"),),
    ),
    *NETWORK_FLAGS,
)

FLAG_OF: dict[str, Flag] = {flag.option: flag for flag in FLAGS}
DEFAULTS: dict[str, Any] = {flag.option: flag.default for flag in FLAGS}
