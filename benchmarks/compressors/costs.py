"""Bytes, resident tokens and expected tokens a second of a method, for an 8B shape on an H200."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compressors.methods import PAGE_SIZE, PLAIN_BYTES, Anchors
from sglang_kvspec.planning.costs import AcceptanceCurve, IterationCosts
from sglang_kvspec.planning.devices import find_device
from sglang_kvspec.planning.draft_budget import SCORE_READS
from sglang_kvspec.planning.forecast import MEASURED_ACCEPTANCE, Deployment
from sglang_kvspec.planning.model_shape import ModelShape
from sglang_kvspec.planning.throughput import cycle_of

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "llama-3.1-8b.json"
GPU, CONTEXT_LEN, NUM_REQUESTS = "H200", 32768, 16
# Codec whose kernels were measured.
CODEC = "uniform4"


@dataclass(frozen=True, slots=True)
class Residency:
    """Tokens that fit, relative to plain KV in the same HBM. resident: anchors and residuals in
    HBM. hosted: residuals in host memory. freed: besides, no anchors of tokens that no draft
    reads."""

    resident: float
    hosted: float
    freed: float


def residency(anchor_bytes: float, plain_bytes: float, share: float) -> Residency:
    """Return the residency of a method. anchor_bytes, plain_bytes: of a page. share: of the context
    that drafts read. Exact residuals have the size of plain KV; plain KV needs none beside it."""
    is_plain = anchor_bytes == plain_bytes
    return Residency(
        resident=plain_bytes / (plain_bytes if is_plain else anchor_bytes + plain_bytes),
        hosted=plain_bytes / anchor_bytes,
        freed=plain_bytes / (anchor_bytes * share),
    )


def bytes_per_token(anchors: Anchors, share: float, heads: int, head_dim: int) -> float:
    """Return the bytes that a draft reads for each token of context. heads: KV heads of all
    layers."""
    return anchors.page_bytes(head_dim) / PAGE_SIZE * heads * share


def accepted_curve(accepted: Sequence[int], draft_len: int) -> AcceptanceCurve:
    """Return the mean accept length of rounds of up to draft_len drafts. accepted: of rounds of
    draft_len drafts. A shorter round is taken to begin where these do."""
    return AcceptanceCurve.from_means(
        {n: sum(min(each, n) for each in accepted) / len(accepted) for n in range(1, draft_len + 1)}
    )


def expected_tokens_per_s(
    anchors: Anchors, share: float, curve: AcceptanceCurve, *, rescored: bool
) -> float:
    """Return the tokens a second of NUM_REQUESTS requests at the best draft length, by the
    planner's costs. rescored: scores are made anew after each verification, from all keys."""
    deployment = _deployment()
    costs = _costs(deployment, anchors, share, rescored=rescored)
    setting = replace(deployment.setting(CONTEXT_LEN), costs=costs, curve=curve)
    return max(cycle_of(setting, n, NUM_REQUESTS, 0).tokens_per_s for n in curve.draft_lens)


def plain_tokens_per_s() -> float:
    """Return the tokens a second of NUM_REQUESTS requests without drafts."""
    costs = _deployment().costs()
    return NUM_REQUESTS / costs.plain_seconds(NUM_REQUESTS, NUM_REQUESTS * CONTEXT_LEN)


def _deployment() -> Deployment:
    model = ModelShape.from_config(json.loads(MODEL.read_text(encoding="utf-8")))
    return Deployment(model, find_device(GPU), MEASURED_ACCEPTANCE[CODEC], CODEC)


def _costs(
    deployment: Deployment, anchors: Anchors, share: float, *, rescored: bool
) -> IterationCosts:
    """Return the costs of drafts that read other anchors. Kernels are taken to reach the share of
    the bandwidth that those of CODEC reach."""
    costs, page = deployment.costs(share), deployment.page_bytes
    shape = deployment.rank_shape
    head_dim, records = shape.head_dim, shape.num_layers * shape.num_kv_heads
    factor = anchors.page_bytes(head_dim) * records / page.anchor
    assert shape.kv_dtype_bytes == PLAIN_BYTES
    whole = deployment.costs().draft_kv_token_s * factor
    return replace(
        costs,
        draft_kv_token_s=whole * share,
        score_kv_token_s=whole * SCORE_READS if rescored else 0.0,
    )
