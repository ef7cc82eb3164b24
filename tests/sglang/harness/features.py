"""Uses of a server by an SGLang user, as functions of its base URL.

Every case returns plain data. The data of a plain server and of a KVSpec server must be equal,
log-probabilities within rounding. All cases are greedy or otherwise deterministic.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import requests

Case = Callable[[str], Any]

TIMEOUT_S = 300
PROMPT = "import os\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n\n"
# Long enough for encoded pages, and with text to copy, so that drafts are accepted.
LONG_PROMPT = PROMPT * 24 + "    def read(self"

CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def post(base_url: str, path: str, body: dict[str, Any]) -> Any:
    reply = requests.post(f"{base_url}{path}", json=body, timeout=TIMEOUT_S)
    reply.raise_for_status()
    is_json = reply.headers.get("content-type", "").startswith("application/json")
    return reply.json() if is_json and reply.content else reply.text


def generate(base_url: str, text: str = LONG_PROMPT, **options: Any) -> Any:
    """Post to /generate with sampling parameters as keywords. `request`: other fields."""
    request = options.pop("request", {})
    params = {"temperature": 0, "max_new_tokens": 80, **options}
    return post(base_url, "/generate", {"text": text, "sampling_params": params, **request})


def events(base_url: str, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the data of each server-sent event until [DONE]."""
    with requests.post(
        f"{base_url}{path}", json={**body, "stream": True}, stream=True, timeout=TIMEOUT_S
    ) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line.removeprefix(b"data: "))


def essence(answer: dict[str, Any]) -> dict[str, Any]:
    meta = answer["meta_info"]
    return {
        "text": answer["text"],
        "ids": answer["output_ids"],
        "finish": meta["finish_reason"],
        "completion_tokens": meta["completion_tokens"],
    }


@case
def plain_greedy(url: str) -> Any:
    return essence(generate(url, max_new_tokens=200, ignore_eos=True))


@case
def short_prompt(url: str) -> Any:
    return essence(generate(url, text="x", max_new_tokens=150, ignore_eos=True))


@case
def stop_strings(url: str) -> Any:
    stops = ["\n\n", "self.path", ")", "def", "\n    "]
    return [essence(generate(url, stop=[stop])) for stop in stops]


@case
def stop_string_at_length_limit(url: str) -> Any:
    return [essence(generate(url, stop=["self"], max_new_tokens=n)) for n in range(1, 14)]


@case
def stop_tokens_anywhere_in_a_run(url: str) -> Any:
    ids = generate(url, ignore_eos=True)["output_ids"]
    return [essence(generate(url, stop_token_ids=[ids[at]])) for at in (0, 1, 7, 20, 41, 79)]


@case
def stop_token_at_length_limit(url: str) -> Any:
    ids = generate(url, ignore_eos=True)["output_ids"]
    return [
        essence(generate(url, stop_token_ids=[ids[10]], max_new_tokens=n)) for n in (9, 10, 11, 12)
    ]


@case
def stop_regex(url: str) -> Any:
    return essence(generate(url, stop_regex=r"def \w+"))


@case
def length_limits(url: str) -> Any:
    return [essence(generate(url, max_new_tokens=n, ignore_eos=True)) for n in (1, 2, 3, 33, 65)]


@case
def end_of_text_heeded(url: str) -> Any:
    return essence(generate(url, max_new_tokens=400))


@case
def penalties(url: str) -> Any:
    settings = [
        {"frequency_penalty": 0.7},
        {"presence_penalty": 1.2},
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.4, "presence_penalty": 0.3},
        {"min_new_tokens": 30, "stop_token_ids": [12, 14, 200], "frequency_penalty": 0.2},
    ]
    return [essence(generate(url, **setting)) for setting in settings]


@case
def logit_bias(url: str) -> Any:
    ids = generate(url)["output_ids"]
    bias = {str(token): -100.0 for token in set(ids[:10])}
    return essence(generate(url, logit_bias=bias))


@case
def logprobs(url: str) -> Any:
    request = {
        "return_logprob": True,
        "top_logprobs_num": 3,
        "token_ids_logprob": [5, 77],
        "logprob_start_len": 0,
    }
    meta = generate(url, max_new_tokens=40, request=request)["meta_info"]
    names = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
    return {name: meta[name] for name in (*names, "input_token_logprobs", "input_top_logprobs")}


def logprobs_of(answer: dict[str, Any]) -> dict[str, Any]:
    """Return all fields of an answer about log-probabilities."""
    meta = answer["meta_info"]
    return {**essence(answer), **{key: meta[key] for key in meta if "logprobs" in key}}


@case
def negative_top_logprobs(url: str) -> Any:
    request = {"return_logprob": True, "top_logprobs_num": -3}
    return logprobs_of(generate(url, max_new_tokens=20, request=request))


@case
def logprobs_of_no_token(url: str) -> Any:
    more = [{}, {"top_logprobs_num": 2}, {"token_ids_logprob": [5, 77]}, {"logprob_start_len": 0}]
    asked = [{"return_logprob": True, **each} for each in more]
    return [logprobs_of(generate(url, PROMPT, max_new_tokens=0, request=r)) for r in asked]


@case
def logprobs_with_stop_and_penalty(url: str) -> Any:
    request = {"return_logprob": True, "top_logprobs_num": 2}
    answer = generate(url, stop=["self"], presence_penalty=0.5, request=request)
    names = ("output_token_logprobs", "output_top_logprobs")
    return {**essence(answer), **{name: answer["meta_info"][name] for name in names}}


@case
def regex_constraint(url: str) -> Any:
    return essence(generate(url, regex=r"[a-f]{3,12}-[0-9]{2,40}", max_new_tokens=60))


@case
def json_schema_constraint(url: str) -> Any:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
        },
        "required": ["name", "sizes"],
    }
    answer = generate(url, json_schema=json.dumps(schema), max_new_tokens=120)
    return essence(answer)


@case
def constraint_with_logprobs(url: str) -> Any:
    request = {"return_logprob": True}
    answer = generate(url, regex=r"(yes|no){1,9}", max_new_tokens=30, request=request)
    return {**essence(answer), "logprobs": answer["meta_info"]["output_token_logprobs"]}


@case
def several_samples(url: str) -> Any:
    return [essence(answer) for answer in generate(url, n=3, max_new_tokens=50)]


@case
def batch_of_prompts(url: str) -> Any:
    texts = [LONG_PROMPT, PROMPT, "x = [", LONG_PROMPT + "_all"]
    params = [{"temperature": 0, "max_new_tokens": n} for n in (64, 1, 90, 17)]
    answers = post(url, "/generate", {"text": texts, "sampling_params": params})
    return [essence(answer) for answer in answers]


@case
def token_ids_around_a_page(url: str) -> Any:
    ids = [20 + place * 37 % 500 for place in range(200)]
    prompts = [ids[:length] for length in (1, 2, 63, 64, 65, 128, 129) for _ in (1, 40)]
    params = [{"temperature": 0, "max_new_tokens": n} for n in (1, 40)] * 7
    answers = post(url, "/generate", {"input_ids": prompts, "sampling_params": params})
    return [essence(answer) for answer in answers]


@case
def first_token_ends_it(url: str) -> Any:
    (first,) = generate(url, PROMPT, max_new_tokens=1)["output_ids"]
    settings = [{"stop_token_ids": [first]}, {"stop_token_ids": [first], "min_new_tokens": 5}]
    return [essence(generate(url, PROMPT, **setting)) for setting in settings]


@case
def cached_prefix(url: str) -> Any:
    post(url, "/flush_cache?timeout=30", {})
    first = generate(url, LONG_PROMPT, max_new_tokens=100, ignore_eos=True)
    more = LONG_PROMPT + first["text"]
    second = generate(url, more, max_new_tokens=60, ignore_eos=True)
    return [essence(first), essence(second), second["meta_info"]["cached_tokens"] > 0]


@case
def streamed_text(url: str) -> Any:
    body = {
        "text": LONG_PROMPT,
        "sampling_params": {"temperature": 0, "max_new_tokens": 90, "stop": ["\n\n\n"]},
    }
    chunks = list(events(url, "/generate", body))
    sizes = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
    assert sizes == sorted(sizes), "a stream went back"
    assert len(set(sizes)) >= len(sizes) - 1, "chunks without a new token were sent"
    return essence(chunks[-1])


@case
def openai_completion(url: str) -> Any:
    body = {"model": "m", "prompt": LONG_PROMPT, "max_tokens": 60, "temperature": 0, "logprobs": 2}
    choice = post(url, "/v1/completions", body)["choices"][0]
    return {"text": choice["text"], "logprobs": choice["logprobs"]["token_logprobs"]}


@case
def openai_completion_with_negative_logprobs(url: str) -> Any:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "logprobs": -1}
    choice = post(url, "/v1/completions", body)["choices"][0]
    return {"text": choice["text"], "logprobs": choice["logprobs"]}


@case
def openai_completion_stream(url: str) -> Any:
    body = {"model": "m", "prompt": LONG_PROMPT, "max_tokens": 60, "temperature": 0}
    chunks = list(events(url, "/v1/completions", body))
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@case
def openai_chat(url: str) -> Any:
    messages = [{"role": "user", "content": LONG_PROMPT}]
    body = {"model": "m", "messages": messages, "max_tokens": 50, "temperature": 0, "seed": 3}
    choice = post(url, "/v1/chat/completions", body)["choices"][0]
    return [choice["message"]["content"], choice["finish_reason"]]


@case
def session(url: str) -> Any:
    session_id = post(url, "/open_session", {"capacity_of_str_len": 100_000})
    first = generate(
        url, LONG_PROMPT, max_new_tokens=70, request={"session_params": {"id": session_id}}
    )
    follow = {"id": session_id, "rid": first["meta_info"]["id"]}
    second = generate(
        url, "\n    def close(self", max_new_tokens=70, request={"session_params": follow}
    )
    requests.post(f"{url}/close_session", json={"session_id": session_id}, timeout=TIMEOUT_S)
    return [essence(first), essence(second)]


@case
def pause_and_continue(url: str) -> Any:
    post(url, "/pause_generation", {"mode": "retract"})
    post(url, "/continue_generation", {})
    return essence(generate(url, max_new_tokens=40))


@case
def prompt_only(url: str) -> Any:
    request = {"return_logprob": True, "logprob_start_len": 0}
    answer = generate(url, PROMPT, max_new_tokens=0, request=request)
    return [answer["output_ids"], answer["meta_info"]["input_token_logprobs"]]
