"""Two requests made of one, for a prefill and a decode server, with rooms to meet in."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_kvspec.door.errors import RequestError

# SGLang carries rooms as signed 64-bit integers.
ROOM_BOUND = 1 << 63

# Fields of each endpoint that may hold its prompts. The first field that is set counts.
PROMPT_FIELDS = {
    "/generate": ("text", "input_ids", "input_embeds"),
    "/v1/completions": ("prompt",),
    "/v1/chat/completions": (),
}

Request = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RankExchange:
    """Address at which a decode server meets the prefill server of a request."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class PairedBodies:
    """JSON bodies for the two servers, which differ only in `stream` and `stream_options`.

    The prefill server's answer is dropped, so the door asks for it without a stream: a failure then
    has an HTTP status, which a stream that has begun cannot have.
    """

    prefill: bytes
    decode: bytes


def read_request(path: str, body: bytes) -> Request:
    """Parse a client's body. Raises RequestError if disaggregated servers cannot serve it."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(request, dict):
        raise RequestError(f"the body is a {type(request).__name__}, expected an object")
    if any(n not in (None, 1) for n in _sample_counts(path, request)):
        # SGLang gives all samples of a prompt one room.
        raise RequestError("n > 1 cannot be combined with disaggregation: send the prompt n times")
    if _asks_about_prompt(path, request):
        raise RequestError(
            "log-probabilities of the prompt cannot be combined with disaggregation: ask for those "
            "of the output"
        )
    # Refuse a batch without prompts here, while the answer can still have a status.
    num_prompts(path, request)
    return request


def pair(
    path: str,
    request: Request,
    meeting: RankExchange,
    draw: Callable[[int], int] = secrets.randbelow,
) -> PairedBodies:
    """Make both bodies, with a new room for each prompt. Rooms in the client's request are
    overwritten: they could be those of another client."""
    shared = {
        **request,
        "bootstrap_host": meeting.host,
        "bootstrap_port": meeting.port,
        "bootstrap_room": _rooms(num_prompts(path, request), draw),
    }
    silent = {key: value for key, value in shared.items() if key != "stream_options"}
    silent["stream"] = False
    return PairedBodies(json.dumps(silent).encode(), json.dumps(shared).encode())


def num_prompts(path: str, request: Request) -> int | None:
    """Return the number of prompts of a batch; None if the prompt is no list of prompts."""
    for field in PROMPT_FIELDS[path]:
        prompt = request.get(field)
        if prompt is None:
            continue
        if prompt == []:
            raise RequestError(f"{field} must not be an empty list")
        return len(prompt) if _is_batch(field, prompt) else None
    return None


def _is_batch(field: str, prompt: Any) -> bool:
    if not isinstance(prompt, list):
        return False
    first = prompt[0]
    if field == "input_embeds":
        # A single prompt is already a list of vectors.
        return isinstance(first, list) and bool(first) and isinstance(first[0], list)
    return isinstance(first, str | list)


def _rooms(count: int | None, draw: Callable[[int], int]) -> int | list[int]:
    if count is None:
        return draw(ROOM_BOUND)
    return [draw(ROOM_BOUND) for _ in range(count)]


def _sample_counts(path: str, request: Request) -> list[Any]:
    if path != "/generate":
        return [request.get("n")]
    params = request.get("sampling_params")
    rows = params if isinstance(params, list) else [params]
    return [row.get("n") for row in rows if isinstance(row, dict)]


def _asks_about_prompt(path: str, request: Request) -> bool:
    if path == "/v1/completions":
        return bool(request.get("echo")) and request.get("logprobs") is not None
    starts = request.get("logprob_start_len")
    rows = starts if isinstance(starts, list) else [starts]
    wanted = bool(request.get("return_logprob"))
    return wanted and any(isinstance(start, int) and start >= 0 for start in rows)
