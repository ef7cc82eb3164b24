"""Refusals of HTTP bodies on which SGLang's own endpoints fail with status 500.

SGLang 0.5.17 reads fields of a body before it checks that the body is an object. It also passes
empty lists, and token ids beyond the vocabulary, to code that raises. KVSpec answers these bodies
with status 400.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON_TYPE = b"application/json"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
# A body of these endpoints is parsed only if it contains one of these fields.
_TELLTALES = {CHAT: (b"response_format", b"continue_final_message"), COMPLETIONS: (b"echo",)}


def check_body(path: str, body: bytes, vocab_size: int) -> None:
    """Raise ValueError for a body on which the endpoint at `path` would fail. All other bodies
    pass, also those that the endpoint itself refuses."""
    if body.strip()[:1] not in (b"{", b""):
        raise ValueError("the body must be a JSON object")
    check = _CHECKS.get(path)
    if check is None or not any(field in body for field in _TELLTALES.get(path, (b"",))):
        return
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        # The endpoint itself refuses a body that is not JSON.
        return
    check(fields, vocab_size)


def _check_not_empty(name: str) -> Callable[[dict[str, Any], int], None]:
    def check(fields: dict[str, Any], vocab_size: int) -> None:
        if fields.get(name) == []:
            raise ValueError(f"{name} must not be empty")

    return check


def _check_tokens(fields: dict[str, Any], vocab_size: int) -> None:
    tokens = fields.get("tokens")
    rows = tokens if isinstance(tokens, list) else []
    for token in _flat(rows):
        if isinstance(token, int) and not 0 <= token < vocab_size:
            raise ValueError(
                f"tokens must be from 0 to {vocab_size - 1}, the model's vocabulary: got {token}"
            )


def _check_chat(fields: dict[str, Any], vocab_size: int) -> None:
    asked = fields.get("response_format")
    messages = fields.get("messages")
    if fields.get("continue_final_message") and isinstance(messages, list) and len(messages) == 1:
        raise ValueError("continue_final_message needs a message before the one to continue")
    if not isinstance(asked, dict | None):
        raise ValueError(f"response_format must be an object, got {asked!r}")


def _check_echo(fields: dict[str, Any], vocab_size: int) -> None:
    logprobs = fields.get("logprobs")
    if fields.get("echo") and isinstance(logprobs, int) and logprobs < 1:
        raise ValueError(f"logprobs must be at least 1 with echo, got {logprobs}")


def _flat(rows: list[Any]) -> list[Any]:
    """Return the tokens of one list, or of a list of lists."""
    return [token for row in rows for token in (row if isinstance(row, list) else [row])]


_CHECKS: dict[str, Callable[[dict[str, Any], int], None]] = {
    CHAT: _check_chat,
    COMPLETIONS: _check_echo,
    "/v1/detokenize": _check_tokens,
    "/v1/messages/count_tokens": _check_not_empty("messages"),
    "/v1/messages": _check_not_empty("messages"),
    "/v1/responses": _check_not_empty("input"),
    "/v1/score": _check_not_empty("label_token_ids"),
}
# Endpoints that take prompts or tokens.
PATHS = frozenset(
    (*_CHECKS, "/generate", "/v1/embeddings"),
) | {"/v1/classify", "/v1/rerank", "/v1/tokenize"}


class BodyGate:
    """ASGI middleware: answers 400 to a body that check_body() refuses, passes all others on."""

    def __init__(self, app: Callable[..., Awaitable[None]], vocab_size: int) -> None:
        self._app, self._vocab_size = app, vocab_size

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").rstrip("/")
        is_ours = scope["type"] == "http" and scope["method"] in ("POST", "PUT")
        if not is_ours or path not in PATHS or not _is_json(scope):
            await self._app(scope, receive, send)
            return
        received = [await receive()]
        while received[-1].get("more_body") and (path in _CHECKS or _is_blank(received[-1])):
            received.append(await receive())
        body = b"".join(message.get("body", b"") for message in received)
        try:
            check_body(path, body, self._vocab_size)
        except ValueError as error:
            await _refuse(send, str(error))
            return
        left = iter(received)

        async def replay() -> Message:
            return next(left, None) or await receive()

        await self._app(scope, replay, send)


def _is_blank(message: Message) -> bool:
    return not message.get("body", b"").strip()


def _is_json(scope: Message) -> bool:
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    return any(kind.lower().startswith(JSON_TYPE) for kind in kinds)


async def _refuse(send: Send, message: str) -> None:
    error = {"message": message, "type": "invalid_request_error", "code": 400}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", JSON_TYPE), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
