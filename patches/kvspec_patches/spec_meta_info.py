"""TokenizerManager._calculate_spec_decoding_metrics: draft counts of a varying draft length.

SGLang 0.5.17 multiplies verifications by the configured draft length. The worker reports the drafts
that it verified through the per-request cap counter, which SGLang sums and transports. The hook
also adds what drafts read, and cached prompt tokens by KVSpec's tiers, which came with SGLang's
details of cached tokens. It attaches the draft counts to the token count from which SGLang makes
the usage of an OpenAI answer.
"""

from __future__ import annotations

from typing import Any

from kvspec_patches.cached_tokens import DRAFT_READS, NGRAM

# Entries that are no details of cached tokens.
OURS = (DRAFT_READS, NGRAM)
# SGLang may end a request without details of cached tokens.
NO_READS = {"share": None, "by_budget": {}}


def hook(result: None, self: Any, meta_info: dict[str, Any], recv_obj: Any, i: int) -> None:
    from sglang_kvspec.adapters.activation import config_of
    from sglang_kvspec.adapters.usage import CountedTokens

    if config_of(self.server_args) is None or not getattr(recv_obj, "spec_verify_ct", None):
        return
    verified = recv_obj.spec_verify_ct[i]
    drafted = recv_obj.spec_num_cap_tokens[i]
    accepted = recv_obj.spec_num_correct_drafts[i]
    for carrier in ("spec_cap_length", "spec_cap_lens_histogram"):
        meta_info.pop(carrier, None)
    details = meta_info.get("cached_tokens_details") or {}
    cached = {name: value for name, value in details.items() if name not in OURS}
    meta_info["cached_tokens_details"] = cached or None
    num_tokens = recv_obj.completion_tokens[i]
    meta_info.update(
        completion_tokens=CountedTokens.of(num_tokens, drafted=drafted, accepted=accepted),
        spec_verify_ct=verified,
        spec_num_proposed_drafts=drafted,
        spec_proposed_drafts=drafted,
        spec_num_correct_drafts=accepted,
        spec_accepted_drafts=accepted,
        spec_accept_rate=accepted / drafted if drafted else 0.0,
        spec_accept_length=1 + accepted / verified if verified else 0.0,
        kvspec={
            "drafted": drafted,
            "accepted": accepted,
            "verified": verified,
            "accept_histogram": list(recv_obj.spec_correct_drafts_histogram[i]),
            **_told(recv_obj.cached_tokens_details, i),
            **_transfer(self.rid_to_state.get(recv_obj.rids[i]), meta_info),
        },
    )


def _transfer(state: Any, meta_info: dict[str, Any]) -> dict[str, Any]:
    """Return how the KV of a request that another server prefilled was transferred. That summary
    travels beside one of the request's tokens."""
    from sglang_kvspec.runtime.disaggregation.timeline import TRANSFER_CARRIER

    meta_info.pop(TRANSFER_CARRIER, None)
    told = state.customized_info_accumulated.get(TRANSFER_CARRIER, ()) if state else ()
    summary = next(filter(None, told), None)
    return {} if summary is None else {"transfer": summary}


def _told(details: list[dict[str, Any] | None] | None, i: int) -> dict[str, Any]:
    """Return prefix hits by tier, and what drafts read. kept_anchors: tokens with kept anchors in
    GPU memory, of which only residuals were loaded from the tier. drafts_on_anchors: tokens that
    were drafted while residuals of hits were on their way. ngram: proposals, absent where n-grams
    propose nothing. SGLang has no entry for requests without a hit."""
    found = (details and details[i]) or {}
    remote = found.get("remote", 0)
    return {
        "hit_tokens": {
            "resident": found.get("device", 0),
            "host": found.get("host", 0),
            "disk": found.get("storage", 0) - remote,
            "remote": remote,
        },
        "kept_anchors": {"host": found.get("kept_host", 0), "disk": found.get("kept_disk", 0)},
        "drafts_on_anchors": found.get("drafts_on_anchors", 0),
        DRAFT_READS: found.get(DRAFT_READS, NO_READS),
        **({NGRAM: found[NGRAM]} if NGRAM in found else {}),
    }
