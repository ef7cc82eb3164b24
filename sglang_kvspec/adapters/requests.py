"""States of SGLang's requests for the engine, and refusals of requests."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from sglang_kvspec.adapters.compat.request_kv import kv_of
from sglang_kvspec.adapters.compat.requests import FINISH_ABORT
from sglang_kvspec.adapters.request_drafts import counts_of
from sglang_kvspec.runtime.request_state import RequestState
from sglang_kvspec.runtime.sampling import SamplingParams

logger = logging.getLogger(__name__)

# Parameters that change logits by what a request has emitted.
PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens")


def check_request(obj: Any) -> None:
    """Raise ValueError, which SGLang answers with status 400, if KVSpec would answer wrongly.

    obj: a GenerateReqInput of one request, before it is tokenised.
    """
    if getattr(obj, "custom_logit_processor", None):
        raise ValueError(
            "--kvspec does not run custom_logit_processor yet: remove custom_logit_processor or "
            "use a plain server"
        )
    if getattr(obj, "return_hidden_states", None):
        raise ValueError(
            "--kvspec does not return hidden states yet: remove return_hidden_states or use a "
            "plain server"
        )
    if getattr(obj, "return_sampling_mask", None):
        raise ValueError(
            "--kvspec does not return sampling masks: remove return_sampling_mask or use a plain "
            "server"
        )
    if getattr(obj, "token_indices_to_pool", None):
        raise ValueError(
            "--kvspec does not score at token positions: remove score_extraction_token and "
            "token_indices_to_pool, or use a plain server"
        )


def sampling_params_of(req: Any) -> SamplingParams:
    params = req.sampling_params
    return SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        min_new_tokens=params.min_new_tokens,
        stop_tokens=_stop_tokens(req) if params.min_new_tokens > 0 else frozenset(),
        logit_bias={int(token): value for token, value in (params.logit_bias or {}).items()},
        seed=params.sampling_seed,
    )


def new_state(req: Any, committed_len: int, pending: int) -> RequestState:
    """Return the state of a request whose first committed_len tokens have KV and whose next token
    is `pending`, which SGLang does not know yet."""
    return _state(req, committed_len, pending, [*req.output_ids, pending])


def resumed_state(req: Any, committed_len: int) -> RequestState:
    """Return the state of a request whose output SGLang knows. Its last token has no KV yet."""
    return _state(req, committed_len, req.output_ids[-1], list(req.output_ids))


def early_state(req: Any, cached_len: int) -> RequestState:
    """Return the state of a request that starts on anchors and has emitted nothing. The first
    cached_len tokens of its prompt have KV, some of whose residuals are still on their way."""
    *tail, pending = req.origin_input_ids[cached_len:]
    state = _state(req, cached_len + len(tail), pending, [])
    state.has_waited, state.tail = True, tail
    return state


def _state(req: Any, committed_len: int, pending: int, output: list[int]) -> RequestState:
    return RequestState(
        rid=req.rid,
        committed_len=committed_len,
        pending=pending,
        output=output,
        params=sampling_params_of(req),
        remaining=int(req.sampling_params.max_new_tokens) - len(output),
        priority=priority_of(req),
        prompt=req.origin_input_ids,
        is_streamed=bool(req.stream),
        grammar=req.grammar,
        draft_counts=counts_of(req),
        slot=int(kv_of(req).req_pool_idx),
    )


def priority_of(req: Any) -> int:
    """Return a priority of which the higher goes first, also if SGLang's order is the reverse. 0 if
    the request has none."""
    from sglang_kvspec.adapters.compat.runtime_context import get_schedule

    priority = int(getattr(req, "priority", None) or 0)
    return -priority if get_schedule().schedule_low_priority_values_first else priority


def fail_without_choice(req: Any) -> None:
    """End a request whose next token cannot be chosen.

    The status is 400 if the request has parameters that can mask every token or overflow its
    logits. Otherwise the status is 500: the model's logits hold NaN or inf.
    """
    causes = _choice_limits(req)
    if causes:
        message = f"no token can be chosen at this position: correct {' or '.join(causes)}"
        fail(req, message, HTTPStatus.BAD_REQUEST)
    else:
        fail(req, "the model's logits hold NaN or inf: check the model's weights and --dtype")
    logger.error("%s (request %s)", req.to_finish.message, req.rid)


def _choice_limits(req: Any) -> list[str]:
    """Return the names of the request's parameters that change which token is chosen."""
    params, unset = sampling_params_of(req), SamplingParams()
    names = ("logit_bias", *PENALTIES)
    limits = [name for name in names if getattr(params, name) != getattr(unset, name)]
    return limits if req.grammar is None else ["the grammar", *limits]


def fail(req: Any, message: str, status: HTTPStatus = HTTPStatus.INTERNAL_SERVER_ERROR) -> None:
    """Have SGLang end a running request with this status after the current iteration. Nothing that
    the request computes from now on is sent or cached."""
    req.to_finish = FINISH_ABORT(message, status)
    req.finished_len = len(req.output_ids)
    req.skip_radix_cache_insert = True


def _stop_tokens(req: Any) -> frozenset[int]:
    """Return tokens that SGLang forbids before min_new_tokens: stop tokens and end of text."""
    tokens = set(req.sampling_params.stop_token_ids or ())
    if req.tokenizer is not None:
        tokens |= set(req.tokenizer.additional_stop_token_ids or ())
        tokens.add(req.tokenizer.eos_token_id)
    return frozenset(token for token in tokens if token is not None)
