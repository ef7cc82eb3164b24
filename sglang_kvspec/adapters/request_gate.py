"""Refusals of requests, in the process that takes them, before a scheduler sees them.

SGLang 0.5.17 passes sampling parameters on as the client wrote them. A wrong type, a token id
beyond the vocabulary or a count beyond the pool ends its scheduler, and with it the server. Every
check raises ValueError, which SGLang answers with status 400.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

from sglang_kvspec.adapters.compat.messages import (
    GenerateReqInput,
    PositionalEmbeds,
    SamplingParams,
    SessionParams,
)
from sglang_kvspec.adapters.request_fields import (
    check_bias,
    check_embeds,
    check_integer,
    check_keys,
    check_number,
    check_object,
    check_patterns,
    check_switch,
    check_text,
    check_texts,
    check_token_list,
    each,
    is_int64,
    shown,
)

# Set by SGLang, from other fields.
_INTERNAL = {
    *("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"),
}
_KNOWN = frozenset(SamplingParams.__struct_fields__) - _INTERNAL
# Fields with one value, or a list of one value for each prompt. SGLang checks only the type.
_ONE_FOR_ONE = ("logprob_start_len", "top_logprobs_num", "sampling_params", "rid")
_DELIMITERS = "multi_item_delimiter_indices"
_ROW_FIELDS = (
    *_ONE_FOR_ONE,
    *("return_logprob", "return_sampling_mask", "lora_path", "extra_key"),
    # Since 0.5.18, and since 0.5.21.
    *(("cache_salt",) if hasattr(GenerateReqInput, "cache_salt") else ()),
    *(("sampling_logprobs_mode",) if hasattr(GenerateReqInput, "sampling_logprobs_mode") else ()),
    *("custom_logit_processor", "bootstrap_host", "bootstrap_port", "bootstrap_room"),
    _DELIMITERS,
)
_SESSION_FIELDS = frozenset(SessionParams.__struct_fields__)
# Attribute of SGLang's TokenizerManager that says how many tokens the KV pool holds.
_POOL_TOKENS = "_kvspec_pool_tokens"


def note_pool(tokenizer_manager: Any, num_tokens: int) -> None:
    """Remember how many tokens the KV pool of the schedulers holds."""
    setattr(tokenizer_manager, _POOL_TOKENS, num_tokens)


def pool_pages_of(tokenizer_manager: Any) -> int | None:
    """Return the pages of the KV pool; None before schedulers have reported them."""
    num_tokens = getattr(tokenizer_manager, _POOL_TOKENS, None)
    page_size = tokenizer_manager.server_args.page_size
    return None if num_tokens is None else int(num_tokens) // int(page_size)


def check_raw(obj: Any, pool_pages: int | None) -> None:
    """Raise ValueError for a request that SGLang cannot normalise, or that no pool could hold.

    obj: a GenerateReqInput as the client sent it, of one request or a batch; others pass.
    pool_pages: pages of the KV pool, None where it is not known.
    """
    if not isinstance(obj, GenerateReqInput):
        return
    if obj.text is None and obj.input_ids is None and obj.input_embeds is None:
        raise ValueError("the request needs text, input_ids or input_embeds")
    if obj.text is None and obj.input_ids == []:
        raise ValueError("input_ids cannot be empty")
    if obj.positional_embed_overrides is not None and not _is_override(obj):
        raise ValueError("positional_embed_overrides cannot be sent as JSON: remove it")
    _check_batch(obj)
    rows = obj.sampling_params
    if isinstance(rows, list):
        if not rows:
            raise ValueError(
                "sampling_params must have one object for each prompt, got an empty list"
            )
    else:
        rows = [{} if rows is None else rows]
    for row in rows:
        check_sampling(row)
        num_samples = row.get("n", 1)
        if pool_pages is not None and num_samples > pool_pages:
            raise ValueError(
                f"n must be at most {pool_pages}, the number of pages of the server's KV pool "
                f"(each sample needs a page), got {num_samples}"
            )
    # Since 0.5.22.
    for watermark in each(getattr(obj, "watermark", None)):
        if watermark is not None:
            _refuse_watermarks("watermark", watermark)
    if obj.input_embeds is not None:
        check_embeds(obj.input_embeds)
    if obj.session_params is not None:
        check_keys("session_params", obj.session_params, _SESSION_FIELDS)


def check_tokens(obj: Any, input_ids: Sequence[int] | None, vocab_size: int) -> None:
    """Raise ValueError for an empty prompt, token ids or top_logprobs_num beyond the vocabulary, or
    a priority beyond 64 bits.

    obj: a GenerateReqInput of one request. input_ids: its prompt, None if it is not tokenised.
    """
    if input_ids is not None and not len(input_ids) and obj.input_embeds is None:
        raise ValueError("the prompt has no tokens: send at least one")
    # min() and max() are fast: prompts are long, and all requests wait for this process.
    for token in (min(input_ids), max(input_ids)) if input_ids else ():
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"input_ids must be from 0 to {vocab_size - 1}, the model's vocabulary: got {token}"
            )
    if obj.return_logprob and (obj.top_logprobs_num or 0) > vocab_size:
        raise ValueError(
            f"top_logprobs_num must be at most {vocab_size}, the model's vocabulary: got "
            f"{obj.top_logprobs_num}"
        )
    if obj.priority is not None and not is_int64(obj.priority):
        raise ValueError(f"priority must be a 64-bit integer, got {obj.priority}")


def _check_batch(obj: GenerateReqInput) -> None:
    """Raise ValueError for lists that do not have one entry for each prompt of a batch."""
    prompts = obj.text if obj.text is not None else obj.input_ids
    if prompts is None:
        return
    is_batch = isinstance(prompts, list) and not (prompts and isinstance(prompts[0], int))
    for name in _ROW_FIELDS:
        value = getattr(obj, name)
        if not isinstance(value, list):
            continue
        if not is_batch:
            if name in _ONE_FOR_ONE or _num_samples(obj) > 1:
                raise ValueError(f"{name} must not be a list for one prompt, got {shown(value)}")
        elif name == _DELIMITERS and _num_samples(obj) > 1:
            raise ValueError(f"{name} cannot be combined with n > 1")
        elif len(value) != len(prompts):
            raise ValueError(
                f"{name} has {len(value)} entries for {len(prompts)} prompts: send one value, or "
                "one for each prompt"
            )
    tokens = obj.token_ids_logprob
    is_nested = isinstance(tokens, list) and any(isinstance(each, list) for each in tokens)
    if is_batch and is_nested and len(tokens) != len(prompts):
        raise ValueError(
            f"token_ids_logprob has {len(tokens)} lists for {len(prompts)} prompts: send one list "
            "of token ids, or one for each prompt"
        )


def _num_samples(obj: GenerateReqInput) -> int:
    """Return the number of samples of each prompt; 1 if the parameters do not name an integer."""
    rows = obj.sampling_params
    first = rows[0] if isinstance(rows, list) and rows else rows
    samples = first.get("n") if isinstance(first, Mapping) else 1
    return int(samples) if isinstance(samples, Integral) else 1


def _is_override(obj: GenerateReqInput) -> bool:
    """Return True for overrides from Python, which are objects of SGLang."""
    overrides = obj.positional_embed_overrides
    rows = overrides if isinstance(overrides, list) else [overrides]
    return bool(rows) and all(row is None or isinstance(row, PositionalEmbeds) for row in rows)


def check_sampling(row: Any) -> None:
    """Raise ValueError for sampling parameters of a wrong type, or of values SGLang does not check
    itself. None stands for a parameter's default, except as `n`."""
    check_keys("sampling_params", row, _KNOWN)
    for name, value in row.items():
        # SGLang counts samples before it replaces None with defaults.
        if (value is not None or name == "n") and name in _CHECKS:
            _CHECKS[name](name, value)


def _refuse_beams(name: str, value: Any) -> None:
    check_integer(least=1)(name, value)
    if value > 1:
        raise ValueError(f"--kvspec does not run beam search: remove {name}, or use a plain server")


def _refuse_watermarks(name: str, value: Any) -> None:
    if value != {"enabled": False}:
        raise ValueError(f"--kvspec does not watermark: remove {name}, or use a plain server")


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "n": check_integer(least=1),
    "beam_width": _refuse_beams,
    "watermark": _refuse_watermarks,
    # SGLang replaces a stream_interval of 0 with the server's.
    **dict.fromkeys(
        ("max_new_tokens", "min_new_tokens", "stream_interval"), check_integer(least=0)
    ),
    **dict.fromkeys(("top_k", "sampling_seed"), check_integer()),
    **dict.fromkeys(
        (
            *("temperature", "top_p", "min_p"),
            *("frequency_penalty", "presence_penalty", "repetition_penalty"),
        ),
        check_number,
    ),
    **dict.fromkeys(
        (
            *("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens"),
            *("no_stop_trim", "ebnf_full_assistant"),
        ),
        check_switch,
    ),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), check_text),
    "stop": check_texts,
    "stop_regex": check_patterns,
    "stop_token_ids": check_token_list,
    "logit_bias": check_bias,
    "custom_params": check_object,
}
