"""Seams that another package can implement, and the flags that choose an implementation."""

from __future__ import annotations

from sglang_kvspec.core.registry import Registry

CODECS = Registry(
    "sglang_kvspec.codecs",
    "--kvspec-codec",
    {
        "kivi": "kvspec_kernels.codecs.kivi:KiviSettings",
        "kvquant": "kvspec_kernels.codecs.kvquant:KVQuantSettings",
        "log4": "kvspec_kernels.codecs.log4:Log4Settings",
        "rotatekv": "kvspec_kernels.codecs.rotatekv:RotateKVSettings",
        "turboquant": "kvspec_kernels.codecs.turboquant:TurboQuantSettings",
        "uniform4": "kvspec_kernels.codecs.uniform4:Uniform4Settings",
    },
)
DRAFTERS = Registry(
    "sglang_kvspec.drafters",
    "--kvspec-drafter",
    # The model itself over anchors, step by step or with proposals of n-grams. A server with a GPU
    # drafts in captured steps instead.
    {
        "self": "sglang_kvspec.engine.eager_drafter:EagerDrafter",
        "ngram": "sglang_kvspec.engine.ngram_drafter:NgramDrafter",
    },
)
DRAFT_VIEWS = Registry(
    "sglang_kvspec.draft_views",
    "--kvspec-draft-view",
    {
        "all": "sglang_kvspec.runtime.draft_view:AllPages",
        "pages": "sglang_kvspec.runtime.budget_views:ScoredPages",
        "recent": "sglang_kvspec.runtime.budget_views:RecentPages",
    },
)
SCORERS = Registry(
    "sglang_kvspec.scorers",
    "--kvspec-compressor",
    {
        "duo": "sglang_kvspec.scorers.duo:DuoAttention",
        "expected": "sglang_kvspec.scorers.expected_attention:ExpectedAttention",
        "h2o": "sglang_kvspec.scorers.h2o:H2O",
        "kvpress": "sglang_kvspec.scorers.press:PressScorer",
        "kvzap": "sglang_kvspec.scorers.kvzap:KVzap",
        "kvzip": "sglang_kvspec.scorers.kvzip:KVzip",
        "random": "sglang_kvspec.scorers.random_tokens:RandomTokens",
        "snapkv": "sglang_kvspec.scorers.snapkv:SnapKV",
        "streaming": "sglang_kvspec.scorers.streaming:StreamingLLM",
        "tova": "sglang_kvspec.scorers.tova:TOVA",
    },
)
TARGET_ATTENTIONS = Registry(
    "sglang_kvspec.target_attentions",
    "--kvspec-target-attention",
    # `exact` and `int8` are the defaults of the --kvspec-target of the same name.
    {
        "exact": "sglang_kvspec.runtime.targets.exact:ExactTargetAttention",
        "int8": "sglang_kvspec.runtime.targets.int8:Int8TargetAttention",
        "deterministic": "sglang_kvspec.runtime.targets.deterministic:DeterministicAttention",
        "int8_deterministic": "sglang_kvspec.runtime.targets.int8:DeterministicInt8Attention",
    },
)
VERIFY_SCHEDULERS = Registry(
    "sglang_kvspec.verify_schedulers",
    "--kvspec-schedule",
    {
        "rounds": "sglang_kvspec.engine.round_scheduler:RoundScheduler",
        "staggered": "sglang_kvspec.engine.staggered_scheduler:StaggeredScheduler",
    },
)
