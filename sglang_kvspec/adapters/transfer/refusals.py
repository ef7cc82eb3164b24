"""Refusals of requests that a prefill and a decode server cannot answer correctly."""

from __future__ import annotations

from typing import Any

# Room of SGLang's handover of a first token. A larger number ends its prefill server.
MAX_TOP_LOGPROBS = 128


def check_transferred(obj: Any) -> None:
    """Raise ValueError, which SGLang answers with status 400, on either server.

    obj: a GenerateReqInput of one request, before it is tokenised.
    """
    if not obj.bootstrap_host:
        # SGLang's decode server would end with an error.
        raise ValueError(
            "bootstrap_host is missing: requests to servers with --disaggregation-mode come "
            "through `python -m sglang_kvspec.door`, or another router"
        )
    if obj.session_params is not None:
        raise ValueError(
            "session_params cannot be served where prefill and decode are apart: send the whole "
            "prompt"
        )
    if obj.input_embeds is not None:
        raise ValueError(
            "input_embeds cannot be served where prefill and decode are apart: send input_ids or "
            "text"
        )
    if (obj.sampling_params.get("n") or 1) > 1:
        raise ValueError("n > 1 needs a transfer for each sample: send the prompt n times")
    if not obj.return_logprob:
        return
    if obj.token_ids_logprob:
        raise ValueError(
            "token_ids_logprob cannot be had where prefill and decode are apart: those of the "
            "first token stay on the prefill server"
        )
    if obj.sampling_params.get("max_new_tokens") == 0:
        # SGLang's decode server would report whatever its handover buffer held before.
        raise ValueError(
            "return_logprob with max_new_tokens 0 has no token to describe where prefill and "
            "decode are apart: ask for a token, or leave return_logprob out"
        )
    if (obj.top_logprobs_num or 0) > MAX_TOP_LOGPROBS:
        raise ValueError(
            f"top_logprobs_num must be at most {MAX_TOP_LOGPROBS} where prefill and decode are "
            f"apart, got {obj.top_logprobs_num}"
        )
