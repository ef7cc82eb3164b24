"""Categories of GPU kernels, derived from their names."""

from __future__ import annotations

import re

ATTENTION = "attention"
MERGE = "merge"
MATRIX = "matrix products"
NORM = "norm, rope, activation"
APPEND = "encode, append"
SAMPLING = "sampling"
ALL_REDUCE = "all-reduce"
COPIES = "copies, gathers"
OTHER = "other"

# The first pattern that is found anywhere in the name decides. Names of FlashAttention's kernels
# contain CUTLASS, so attention comes before matrix products.
_PATTERNS = tuple(
    (category, re.compile(pattern))
    for category, pattern in (
        # merge_kernel, draft_join and verify_join are KVSpec's.
        (
            MERGE,
            r"^merge_|^(draft|verify)_join$|MergeStates?Kernel|FlashAttnFwdCombine"
            r"|_fwd_kernel_stage2",
        ),
        (
            ATTENTION,
            r"^(draft|verify)_attention$|^attention_kernel$|BatchPrefill|BatchDecode"
            r"|flashinfer::\w*(Prefill|Decode)\w*Kernel|[Ff]lash_?[Aa]ttn|flash::|fmha"
            r"|prepare_varlen_num_blocks|_fwd_kernel|_fwd_grouped_kernel",
        ),
        # index_put stores a forward's KV in the recent window.
        (
            APPEND,
            r"^encode_(pages|kernel)$|^append_kernel$|index_put|store_kv|set_kv|kv_?cache|KVCache",
        ),
        (ALL_REDUCE, r"nccl|all_?reduce|cross_device_reduce|AllReduce"),
        (
            SAMPLING,
            r"^argmax_kernel$|^end_step_kernel$"
            r"|ArgMax|argmax|[Ss]oftmax|[Ss]ampl|multinomial|[Ss]ort|topk|TopK|top_k",
        ),
        (NORM, r"[Nn]orm|[Rr]ope|[Rr]otary|RotaryPos|act_and_mul|silu|gelu|swiglu|qk_?norm"),
        (MATRIX, r"gemm|gemv|GEMM|nvjet|cutlass|cublas|xmma|splitK|matmul|s884|s16816|dot_kernel"),
        (
            COPIES,
            r"^Mem(cpy|set)|memcpy|memset|copy|Copy|gather|scatter|indexSelect|index_elementwise"
            r"|index_kernel|FillFunctor|concat",
        ),
    )
)
_FUNCTOR = re.compile(r"\b(?!gpu_)(\w+?)_kernel_(?:impl|cuda)|\b(\w+(?:Functor|Ops)\w*)")
_PLACES = re.compile(r"\(anonymous namespace\)::")


def category_of(name: str) -> str:
    """Return one of the constants above, OTHER if no pattern is found."""
    return next((category for category, pattern in _PATTERNS if pattern.search(name)), OTHER)


def only_verifies(name: str) -> bool:
    """Return True if the kernel attends at the target precision, which no draft step does."""
    return name == "verify_attention" or "BatchPrefill" in name


def short_name(name: str) -> str:
    """Return the name without types, arguments and namespaces. Names of torch's generic kernels
    keep their purpose: `index_elementwise_kernel [index_put]`."""
    bare = _PLACES.sub("", name.removeprefix("void "))
    end = min((bare.index(mark) for mark in "<(" if mark in bare), default=len(bare))
    head, rest = bare[:end].strip().rsplit("::", 1)[-1], bare[end:]
    if "at::native" not in name:
        return head or bare
    found = _FUNCTOR.search(rest)
    return f"{head} [{found[1] or found[2]}]" if found else head
