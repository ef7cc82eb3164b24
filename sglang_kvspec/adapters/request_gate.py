"""Refusals of requests, in the process that takes them, before a scheduler hears of them.

SGLang 0.5.17 passes sampling parameters on as the client wrote them: a wrong type, a token id
beyond the vocabulary or a count beyond the pool ends its scheduler, and with it the server. Every
check raises ValueError, which SGLang answers with status 400.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from sglang_kvspec.adapters.compat.messages import (
    GenerateReqInput,
    PositionalEmbeds,
    SamplingParams,
    SessionParams,
)

# SGLang sends integers between processes as signed 64-bit numbers.
INT64 = range(-(2**63), 2**63)
# Callers of sglang.Engine may use any of these for a list.
_LISTS = (list, tuple, set, frozenset)
# Logits are float32: a bias beyond it would be infinite.
MAX_BIAS = 3.4e38
# Set by SGLang, from other fields.
_INTERNAL = {
    *("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"),
}
_KNOWN = frozenset(SamplingParams.__struct_fields__) - _INTERNAL
# Fields that have one value, or a list of one a prompt; SGLang looks no further than the type.
_ONE_FOR_ONE = ("logprob_start_len", "top_logprobs_num", "sampling_params", "rid")
_DELIMITERS = "multi_item_delimiter_indices"
_ROW_FIELDS = (
    *_ONE_FOR_ONE,
    *("return_logprob", "return_sampling_mask", "lora_path", "extra_key"),
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
    """Return the pages of the KV pool, None before schedulers have said so."""
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
        raise ValueError("text, input_ids or input_embeds is needed")
    if obj.text is None and obj.input_ids == []:
        raise ValueError("input_ids cannot be empty")
    if obj.positional_embed_overrides is not None and not _is_override(obj):
        raise ValueError("positional_embed_overrides cannot be sent as JSON: remove it")
    _check_batch(obj)
    rows = obj.sampling_params
    if isinstance(rows, list):
        if not rows:
            raise ValueError("sampling_params is an empty list: expected one object a prompt")
    else:
        rows = [{} if rows is None else rows]
    for row in rows:
        check_sampling(row)
        num_samples = row.get("n", 1)
        if pool_pages is not None and num_samples > pool_pages:
            raise ValueError(
                f"n must be at most {pool_pages}, the pages of this server's KV pool, of which "
                f"every sample needs one: got {num_samples}"
            )
    if obj.input_embeds is not None:
        _check_embeds(obj.input_embeds)
    if obj.session_params is not None:
        _check_keys("session_params", obj.session_params, _SESSION_FIELDS)


def check_tokens(obj: Any, input_ids: Sequence[int] | None, vocab_size: int) -> None:
    """Raise ValueError for token ids, or numbers of them, that are not in the vocabulary.

    obj: a GenerateReqInput of one request. input_ids: its prompt, where it has been tokenised.
    """
    if input_ids is not None and not len(input_ids) and obj.input_embeds is None:
        raise ValueError("the prompt has no tokens: send at least one")
    for token in input_ids or ():
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"input_ids must be from 0 to {vocab_size - 1}, the model's vocabulary: got {token}"
            )
    if obj.return_logprob and (obj.top_logprobs_num or 0) > vocab_size:
        raise ValueError(
            f"top_logprobs_num must be at most {vocab_size}, the model's vocabulary: got "
            f"{obj.top_logprobs_num}"
        )
    if obj.priority is not None and not _is_int64(obj.priority):
        raise ValueError(f"priority must be a 64-bit integer, got {obj.priority}")


def _check_batch(obj: GenerateReqInput) -> None:
    """Raise ValueError for lists that have no entry for every prompt of a batch."""
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
                raise ValueError(f"{name} must be no list for one prompt, got {_shown(value)}")
        elif name == _DELIMITERS and _num_samples(obj) > 1:
            raise ValueError(f"{name} cannot be combined with n > 1")
        elif len(value) != len(prompts):
            raise ValueError(
                f"{name} has {len(value)} entries for {len(prompts)} prompts: send one value, or "
                "one a prompt"
            )
    tokens = obj.token_ids_logprob
    is_nested = isinstance(tokens, list) and any(isinstance(each, list) for each in tokens)
    if is_batch and is_nested and len(tokens) != len(prompts):
        raise ValueError(
            f"token_ids_logprob has {len(tokens)} lists for {len(prompts)} prompts: send one list "
            "of token ids, or one a prompt"
        )


def _num_samples(obj: GenerateReqInput) -> int:
    """Samples of each prompt; any number where the parameters are no objects."""
    rows = obj.sampling_params
    first = rows[0] if isinstance(rows, list) and rows else rows
    samples = first.get("n") if isinstance(first, Mapping) else 1
    return int(samples) if isinstance(samples, Integral) else 1


def _is_override(obj: GenerateReqInput) -> bool:
    """Return True for overrides from Python, where they are objects of SGLang's."""
    overrides = obj.positional_embed_overrides
    rows = overrides if isinstance(overrides, list) else [overrides]
    return bool(rows) and all(row is None or isinstance(row, PositionalEmbeds) for row in rows)


def check_sampling(row: Any) -> None:
    """Raise ValueError for sampling parameters of a wrong type, or of values SGLang does not check
    itself. None stands for a parameter's default, except as `n`."""
    _check_keys("sampling_params", row, _KNOWN)
    for name, value in row.items():
        # SGLang counts samples before it puts defaults in the place of None.
        if (value is not None or name == "n") and name in _CHECKS:
            _CHECKS[name](name, value)


def _check_keys(what: str, value: Any, known: Iterable[str]) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} must be an object, got {_shown(value)}")
    for name in value:
        if name not in known:
            allowed = ", ".join(sorted(known))
            raise ValueError(f"{what} has no field {_shown(name)} (allowed: {allowed})")


def _check_integer(least: int | None = None) -> Callable[[str, Any], None]:
    allowed = "an integer" if least is None else f"an integer of at least {least}"

    def check(name: str, value: Any) -> None:
        if not _is_int64(value) or (least is not None and value < least):
            raise ValueError(f"{name} must be {allowed}, got {_shown(value)}")

    return check


def _check_number(name: str, value: Any) -> None:
    if not _is_finite(value):
        raise ValueError(f"{name} must be a finite number, got {_shown(value)}")


def _check_switch(name: str, value: Any) -> None:
    if value not in (True, False):
        raise ValueError(f"{name} must be true or false, got {_shown(value)}")


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {_shown(value)}")


def _check_texts(name: str, value: Any) -> None:
    if not all(isinstance(text, str) for text in _each(value)):
        raise ValueError(f"{name} must be a string or a list of strings, got {_shown(value)}")


def _check_patterns(name: str, value: Any) -> None:
    _check_texts(name, value)
    for pattern in _each(value):
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(
                f"{name} {_shown(pattern)} is no regular expression: {error}"
            ) from error


def _check_token_list(name: str, value: Any) -> None:
    # SGLang leaves None out.
    is_list = isinstance(value, _LISTS)
    if not is_list or not all(token is None or _is_int64(token) for token in value):
        raise ValueError(f"{name} must be a list of token ids, got {_shown(value)}")


def _check_bias(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be an object of token ids and numbers, got {_shown(value)}")
    for token, bias in value.items():
        try:
            int(token)
        except (TypeError, ValueError):
            raise ValueError(f"{name} has the key {_shown(token)}: expected a token id") from None
        if not _is_finite(bias) or abs(bias) > MAX_BIAS:
            raise ValueError(
                f"{name} of token {token} must be from -{MAX_BIAS:g} to {MAX_BIAS:g}, got "
                f"{_shown(bias)}"
            )


def _check_object(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be an object, got {_shown(value)}")


def _check_embeds(embeds: Any) -> None:
    """Empty lists only: SGLang reads the first number before it looks whether there is one."""
    first = embeds
    for _ in range(2):
        if not isinstance(first, list) or not first:
            raise ValueError("input_embeds must be a list of vectors, or of lists of them")
        first = first[0]


def _each(value: Any) -> Iterable[Any]:
    """Return the entries of a list, or a single value as the only entry."""
    return value if isinstance(value, _LISTS) else [value]


def _is_int64(value: Any) -> bool:
    """Return True for integers of Python or numpy; False for booleans."""
    # A range compares integers of other types with each of its numbers.
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    return is_integer and int(value) in INT64


def _is_finite(value: Any) -> bool:
    try:
        return not isinstance(value, bool | str) and math.isfinite(value)
    except (TypeError, OverflowError):
        return False


def _shown(value: Any) -> str:
    """The value as an error names it, however large."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "n": _check_integer(least=1),
    # SGLang takes a stream_interval of 0 for the server's.
    **dict.fromkeys(
        ("max_new_tokens", "min_new_tokens", "stream_interval"), _check_integer(least=0)
    ),
    **dict.fromkeys(("top_k", "sampling_seed"), _check_integer()),
    **dict.fromkeys(
        (
            *("temperature", "top_p", "min_p"),
            *("frequency_penalty", "presence_penalty", "repetition_penalty"),
        ),
        _check_number,
    ),
    **dict.fromkeys(
        (
            *("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens"),
            "no_stop_trim",
        ),
        _check_switch,
    ),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), _check_text),
    "stop": _check_texts,
    "stop_regex": _check_patterns,
    "stop_token_ids": _check_token_list,
    "logit_bias": _check_bias,
    "custom_params": _check_object,
}
