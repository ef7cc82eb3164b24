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
            "bootstrap_host is missing: send requests for servers with --disaggregation-mode to "
            "`python -m sglang_kvspec.door`, or to another router"
        )
    if obj.session_params is not None:
        raise ValueError(
            "session_params cannot be combined with disaggregation: send the whole prompt"
        )
    if obj.input_embeds is not None:
        raise ValueError(
            "input_embeds cannot be combined with disaggregation: send input_ids or text"
        )
    if (obj.sampling_params.get("n") or 1) > 1:
        raise ValueError("n > 1 cannot be combined with disaggregation: send the prompt n times")
    if not obj.return_logprob:
        return
    if obj.token_ids_logprob:
        raise ValueError(
            "token_ids_logprob cannot be combined with disaggregation: log-probabilities of the "
            "first token stay on the prefill server"
        )
    if obj.sampling_params.get("max_new_tokens") == 0:
        # SGLang's decode server would report whatever its handover buffer held before.
        raise ValueError(
            "return_logprob with max_new_tokens 0 cannot be combined with disaggregation: ask for "
            "a token, or remove return_logprob"
        )
    if (obj.top_logprobs_num or 0) > MAX_TOP_LOGPROBS:
        raise ValueError(
            f"top_logprobs_num must be at most {MAX_TOP_LOGPROBS} with disaggregation, got "
            f"{obj.top_logprobs_num}"
        )
