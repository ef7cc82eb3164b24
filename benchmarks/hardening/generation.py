"""Hypothesis strategies for HTTP requests: mostly valid, with a few invalid fields."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

# Most tokens of an answer: longer answers would only make the run longer.
MOST_TOKENS = 12
# Invalid numbers of samples for a prompt: none, fewer, or more than any pool holds.
SAMPLES = (0, -1, 100_000, 10**12)

# Prompt lengths around the model's context length.
CONTEXT = 8192
NEAR_LIMIT = (CONTEXT - MOST_TOKENS - 1, CONTEXT - 2, CONTEXT - 1, CONTEXT, CONTEXT + 1)

JSON = {"Content-Type": "application/json"}
# Values at and beyond the limits of a field's type.
_NUMBERS = (
    0,
    -1,
    1,
    2**31,
    -(2**31),
    2**63 - 1,
    2**63,
    -(2**63) - 1,
    10**30,
    0.5,
    -0.0,
    1e-300,
    1e308,
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request. hang_up_after: number of the answer's chunk, from 0, after which the client
    disconnects; None reads the whole answer."""

    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = tuple(JSON.items())
    hang_up_after: int | None = None

    def __str__(self) -> str:
        return f"{self.path} {self.body[:2000]!r}"


def attempts(vocab_size: int) -> SearchStrategy[Attempt]:
    """Draw requests to every endpoint that takes prompts or tokens."""
    endpoints = _weighted(
        (5, _generate(vocab_size)),
        (3, _completions(vocab_size)),
        (2, _chat(vocab_size)),
        (1, _others(vocab_size)),
    )
    well_formed = st.builds(
        lambda request, leave: Attempt(
            request[0], json.dumps(request[1]).encode(), hang_up_after=leave
        ),
        endpoints,
        _weighted((6, st.none()), (1, st.integers(0, 3))),
    )
    return _weighted((19, well_formed), (1, _malformed()))


def _weighted(*pairs: tuple[int, SearchStrategy[Any]]) -> SearchStrategy[Any]:
    """Draw from one of these strategies, each with its weight: one_of() has no weights."""
    drawn = [strategy for weight, strategy in pairs for _ in range(weight)]
    return st.sampled_from(range(len(drawn))).flatmap(lambda place: drawn[place])


def _hostile() -> SearchStrategy[Any]:
    """Draw a value that a field does not expect."""
    scalars = st.one_of(
        st.none(),
        st.booleans(),
        st.sampled_from(_NUMBERS),
        st.integers(-5, 5),
        st.text(max_size=8),
        st.sampled_from(("", "\x00", "a" * 5000, "\U0001f600", "(", "[", "{}", "None")),
    )
    return st.recursive(
        scalars,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=2)
        ),
        max_leaves=4,
    )


def _mostly(*valid: Any, wrong: tuple[Any, ...]) -> SearchStrategy[Any]:
    """Draw one of the valid values, or in one of 20 cases a wrong value."""
    return _weighted((19, st.sampled_from(valid)), (1, st.sampled_from(wrong)))


def _mixed(plausible: dict[str, SearchStrategy[Any]], most: int = 4) -> SearchStrategy[dict]:
    """Draw up to `most` of these fields, one in 25 of them with a hostile value."""
    names = st.lists(st.sampled_from(sorted(plausible)), unique=True, max_size=most)
    return names.flatmap(
        lambda chosen: st.fixed_dictionaries(
            {name: _weighted((24, plausible[name]), (1, _hostile())) for name in chosen}
        )
    )


def _tokens(vocab_size: int) -> SearchStrategy[list[int]]:
    valid = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=80)
    broken = st.lists(st.sampled_from((-1, 0, vocab_size)), max_size=3)
    return _weighted((15, valid), (1, broken))


def _texts() -> SearchStrategy[str]:
    return st.one_of(
        st.sampled_from(("def add(", "import os\n", "x", " ", "class A:\n" * 60)),
        st.text(max_size=40),
    )


def _grammars() -> dict[str, SearchStrategy[Any]]:
    return {
        "ebnf": st.sampled_from(
            ("root ::= root", 'root ::= "a" x\nx ::= x', 'root ::= "yes" | "no"', "x", "root ::=")
        ),
        "regex": st.sampled_from(("[a-z]{1,5}", "(", "[]", "(?=a)b", "(a{9}){9}", "", "a*")),
        "json_schema": st.sampled_from(
            ('{"type": "object"}', '{"type": "wat"}', "{", '{"enum": []}', '{"$ref": "#"}', "true")
        ),
        "structural_tag": st.sampled_from(("{}", '{"structures": [], "triggers": []}', "x")),
    }


def _sampling(vocab_size: int) -> dict[str, SearchStrategy[Any]]:
    share = _mostly(0.1, 0.9, 1.0, 1e-300, wrong=(1.5, -1.0))
    token = st.integers(0, vocab_size - 1)
    return {
        "max_new_tokens": st.integers(0, MOST_TOKENS),
        "min_new_tokens": st.integers(0, MOST_TOKENS // 2),
        "temperature": _mostly(0.0, 0.7, 1.0, 1e-5, 1e-7, 1e30, wrong=(-1.0,)),
        "top_p": share,
        "min_p": share,
        "top_k": _mostly(1, 5, -1, 10**9, wrong=(0,)),
        "frequency_penalty": _mostly(0.5, -2.0, wrong=(3.0,)),
        "presence_penalty": _mostly(0.5, 2.0, wrong=(-3.0,)),
        "repetition_penalty": _mostly(1.1, 2.0, wrong=(0.0, 1e-38)),
        "n": _mostly(1, 2, 3, wrong=SAMPLES),
        "stop": st.one_of(st.text(max_size=3), st.lists(st.text(max_size=3), max_size=3)),
        "stop_regex": _mostly(r"\d+", r"\w{2}", wrong=("(", ")x", "[")),
        "stop_token_ids": st.lists(token, max_size=4),
        "stream_interval": st.integers(0, 4),
        "sampling_seed": _mostly(0, 7, -7, 2**62, wrong=(2**64,)),
        "ignore_eos": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "no_stop_trim": st.booleans(),
        "logit_bias": st.dictionaries(
            _weighted((15, token.map(str)), (1, st.text(max_size=3))),
            _mostly(1.0, -100.0, 3e38, -3e38, wrong=(1e39,)),
            max_size=4,
        ),
        "custom_params": st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
        **_grammars(),
    }


def _generate(vocab_size: int) -> SearchStrategy[tuple[str, dict[str, Any]]]:
    prompt = _weighted(
        (12, _texts().map(lambda text: {"text": text})),
        (4, st.lists(_texts(), max_size=3).map(lambda texts: {"text": texts})),
        (8, _tokens(vocab_size).map(lambda ids: {"input_ids": ids})),
        (2, st.lists(_tokens(vocab_size), max_size=2).map(lambda ids: {"input_ids": ids})),
        (1, st.sampled_from(NEAR_LIMIT).map(lambda length: {"input_ids": [66] * length})),
        (1, _hostile().map(lambda value: {"text": value})),
        (1, _hostile().map(lambda value: {"input_ids": value})),
        (1, _hostile().map(lambda value: {"input_embeds": value})),
    )
    fields = {
        "return_logprob": _weighted((9, st.booleans()), (1, st.lists(st.booleans(), max_size=3))),
        "top_logprobs_num": _mostly(0, 1, 5, -3, wrong=(100_000, [1], [1, 2])),
        "logprob_start_len": _mostly(-1, 0, 2, -7, wrong=(10**6, [0])),
        "token_ids_logprob": st.one_of(
            _tokens(vocab_size), st.lists(_tokens(vocab_size), max_size=2)
        ),
        "stream": st.booleans(),
        "priority": st.sampled_from((0, 5, -5, 10**30)),
        "rid": st.one_of(st.text(max_size=3), st.lists(st.text(max_size=2), max_size=3)),
        "extra_key": st.text(max_size=3),
        "session_params": st.fixed_dictionaries({"id": st.text(max_size=2)}),
        "session_id": st.text(max_size=3),
        "image_data": st.text(max_size=3),
        "return_hidden_states": st.booleans(),
        "return_sampling_mask": st.booleans(),
        "return_prompt_token_ids": st.booleans(),
        "return_text_in_logprobs": st.booleans(),
        "positional_embed_overrides": st.lists(st.integers(), max_size=2),
        "multi_item_delimiter_indices": st.lists(st.integers(0, 3), max_size=3),
        "return_flat_raw_top_logprobs": st.booleans(),
        "max_thinking_tokens": st.integers(-1, 4),
        "lora_path": st.text(max_size=3),
        "routed_dp_rank": st.integers(-1, 2),
        "bootstrap_room": st.sampled_from((0, 5, -1, 2**63)),
        "log_metrics": st.booleans(),
    }
    params = _mixed(_sampling(vocab_size), most=5)
    sampling = _weighted((30, params), (1, st.lists(params, max_size=3)), (1, _hostile()))
    return st.builds(
        lambda prompt, sampling, more: (
            "/generate",
            {**prompt, "sampling_params": _short(sampling), **more},
        ),
        prompt,
        sampling,
        _mixed(fields),
    )


def _short(sampling: Any) -> Any:
    """Bound the answer's length if the parameters do not."""
    if isinstance(sampling, dict):
        return {"max_new_tokens": MOST_TOKENS, **sampling}
    if isinstance(sampling, list):
        return [_short(each) for each in sampling]
    return sampling


def _openai(vocab_size: int) -> dict[str, SearchStrategy[Any]]:
    """Return the fields that completions and chats have in common."""
    shared = _sampling(vocab_size)
    for name in ("max_new_tokens", "min_new_tokens", "sampling_seed", "structural_tag"):
        shared.pop(name)
    return {
        **shared,
        "max_tokens": st.integers(0, MOST_TOKENS),
        "min_tokens": st.integers(0, MOST_TOKENS // 2),
        "seed": _mostly(0, 7, wrong=(2**64,)),
        "stream": st.booleans(),
        "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
        "user": st.text(max_size=3),
        "response_format": st.sampled_from(
            (
                {"type": "json_object"},
                {"type": "text"},
                {"type": "wat"},
                {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
                {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wat"}}},
            )
        ),
        "priority": st.integers(-5, 5),
        "rid": st.text(max_size=3),
    }


def _completions(vocab_size: int) -> SearchStrategy[tuple[str, dict[str, Any]]]:
    prompt = _weighted(
        (8, _texts()),
        (2, st.lists(_texts(), max_size=2)),
        (6, _tokens(vocab_size)),
        (2, st.lists(_tokens(vocab_size), max_size=2)),
        (1, _hostile()),
    )
    fields = {
        **_openai(vocab_size),
        "logprobs": _mostly(0, 1, 5, -1, wrong=(100_000,)),
        "echo": st.booleans(),
        "suffix": st.text(max_size=3),
        "best_of": st.integers(-1, 3),
        "return_token_ids": st.booleans(),
    }
    return st.builds(
        lambda prompt, more: (
            "/v1/completions",
            {"model": "x", "prompt": prompt, "max_tokens": MOST_TOKENS, **more},
        ),
        prompt,
        _mixed(fields, most=5),
    )


def _chat(vocab_size: int) -> SearchStrategy[tuple[str, dict[str, Any]]]:
    message = st.fixed_dictionaries(
        {
            "role": _weighted(
                (19, st.sampled_from(("user", "system", "assistant"))), (1, _hostile())
            ),
            "content": _weighted((19, _texts()), (1, _hostile())),
        }
    )
    fields = {
        **_openai(vocab_size),
        "logprobs": st.booleans(),
        "top_logprobs": _mostly(0, 3, -2, wrong=(100_000,)),
        "max_completion_tokens": st.integers(0, MOST_TOKENS),
        "tools": st.sampled_from(
            (
                [],
                [{"type": "function", "function": {"name": "f", "parameters": {}}}],
                [{"type": "function", "function": {"name": "f", "parameters": {"type": "wat"}}}],
                [{"type": "wat"}],
            )
        ),
        "tool_choice": st.sampled_from(("auto", "none", "required", "wat")),
        "continue_final_message": st.booleans(),
        "chat_template_kwargs": st.dictionaries(st.text(max_size=3), st.integers(), max_size=1),
        "reasoning_effort": st.sampled_from(("low", "wat")),
    }
    return st.builds(
        lambda messages, more: (
            "/v1/chat/completions",
            {"model": "x", "messages": messages, "max_tokens": MOST_TOKENS, **more},
        ),
        _weighted((19, st.lists(message, min_size=1, max_size=3)), (1, _hostile())),
        _mixed(fields, most=5),
    )


def _others(vocab_size: int) -> SearchStrategy[tuple[str, dict[str, Any]]]:
    tokens = _weighted((9, _tokens(vocab_size)), (1, _hostile()))
    text = _weighted((6, _texts()), (3, st.lists(_texts(), max_size=2)), (1, _hostile()))
    flag = _weighted((9, st.booleans()), (1, _hostile()))
    shapes: dict[str, dict[str, SearchStrategy[Any]]] = {
        "/v1/tokenize": {"prompt": text, "add_special_tokens": flag},
        "/v1/detokenize": {"tokens": tokens, "skip_special_tokens": flag},
        "/v1/score": {
            "query": text,
            "items": text,
            "label_token_ids": tokens,
            "apply_softmax": flag,
        },
        "/v1/embeddings": {"input": text},
        "/v1/classify": {"input": text},
        "/v1/rerank": {"query": text, "documents": text},
        "/v1/responses": {"input": text, "max_output_tokens": st.integers(-1, MOST_TOKENS)},
        "/v1/messages": {
            "messages": st.one_of(
                st.just([{"role": "user", "content": "hi"}]), st.lists(_hostile(), max_size=2)
            ),
            "max_tokens": st.integers(-1, MOST_TOKENS),
        },
        "/v1/messages/count_tokens": {
            "messages": st.one_of(st.just([{"role": "user", "content": "hi"}]), _hostile())
        },
    }
    return st.one_of(
        *[
            st.fixed_dictionaries(fields).map(lambda body, p=path: (p, {"model": "x", **body}))
            for path, fields in shapes.items()
        ]
    )


def _malformed() -> SearchStrategy[Attempt]:
    """Draw bodies that are no JSON object, or whose content type names something else."""
    bodies = st.sampled_from(
        (
            b"",
            b"{",
            b"null",
            b"[]",
            b'"x"',
            b'{"text": NaN}',
            b'{"text": "a", "text": 5}',
            b"\xff\xfe\x00",
            b"[" * 4000,
            b'{"text": "\\ud800"}',
            b'{"input_ids": [' + b"1," * 60_000 + b"1]}",
        )
    )
    paths = st.sampled_from(
        ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/score", "/v1/nothing")
    )
    kinds = st.sampled_from(("application/json", "text/plain", "multipart/form-data", ""))
    return st.builds(
        lambda path, body, kind: Attempt(path, body, (("Content-Type", kind),) if kind else ()),
        paths,
        bodies,
        kinds,
    )
