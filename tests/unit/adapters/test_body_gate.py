"""BodyGate before an application that records what it receives."""

from __future__ import annotations

import asyncio
import json

import pytest

from sglang_kvspec.adapters.body_gate import CHAT, PATHS, BodyGate

VOCAB = 100
JSON = [(b"host", b"x"), (b"content-type", b"application/json")]
RESPONSE = {"type": "http.response.start", "status": 200, "headers": []}


def chunks(*parts):
    last = len(parts) - 1
    return [
        {"type": "http.request", "body": part, "more_body": i < last}
        for i, part in enumerate(parts)
    ]


class Exchange:
    """One connection through the gate: the client's messages, and what the application and the
    client receive."""

    def __init__(self, path, messages, *, kind="http", method="POST", headers=JSON):
        self.scope = {"type": kind, "path": path, "method": method, "headers": headers}
        if kind != "http":
            del self.scope["method"]
        if kind == "lifespan":
            self.scope = {"type": kind}
        self.messages = list(messages)
        self.reached, self.seen, self.sent = False, [], []
        asyncio.run(BodyGate(self._app, VOCAB)(self.scope, self._receive, self._send))

    async def _receive(self):
        return self.messages.pop(0) if self.messages else {"type": "http.disconnect"}

    async def _send(self, message):
        self.sent.append(message)

    async def _app(self, scope, receive, send):
        """Read to the end of the connection, as a handler of streams does."""
        assert scope is self.scope
        self.reached = True
        while not self.seen or self.seen[-1]["type"] != "http.disconnect":
            self.seen.append(await receive())
        await send(RESPONSE)

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.seen)


def assert_passed(exchange, messages):
    assert exchange.reached
    assert exchange.seen == [*messages, {"type": "http.disconnect"}]
    assert exchange.sent == [RESPONSE]


def assert_refused(exchange, words):
    assert not exchange.reached
    start, body = exchange.sent
    assert start["type"] == "http.response.start"
    assert start["status"] == 400
    headers = dict(start["headers"])
    assert headers[b"content-type"] == b"application/json"
    assert int(headers[b"content-length"]) == len(body["body"])
    assert body["type"] == "http.response.body"
    assert not body.get("more_body")
    error = json.loads(body["body"])["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == 400
    assert words in error["message"]


REFUSED = [
    *[(path, body, "JSON object") for path in sorted(PATHS) for body in ('"x"', "[]", "null")],
    *[("/generate", body, "JSON object") for body in ("5", "true", " [1]", "\n\t[", "x", "NaN")],
    (CHAT, '{"response_format": "x"}', "response_format"),
    (CHAT, '{"response_format": [1]}', "response_format"),
    (CHAT, '{"response_format": 5}', "response_format"),
    ("/v1/detokenize", '{"tokens": [-5]}', "got -5"),
    ("/v1/detokenize", '{"tokens": [1, 100]}', "got 100"),
    ("/v1/detokenize", '{"tokens": [[1], [2, -1]]}', "got -1"),
    ("/v1/detokenize", '{"tokens": [1000000000000000000000]}', "tokens must be from 0 to 99"),
    ("/v1/completions", '{"echo": true, "logprobs": -1}', "logprobs"),
    ("/v1/completions", '{"echo": true, "logprobs": 0}', "logprobs"),
    (
        "/v1/chat/completions",
        '{"continue_final_message": true, "messages": [{"role": "assistant", "content": "x"}]}',
        "continue_final_message",
    ),
    ("/v1/messages", '{"messages": []}', "messages"),
    ("/v1/messages/count_tokens", '{"messages": []}', "messages"),
    ("/v1/responses", '{"input": []}', "input"),
    ("/v1/score", '{"label_token_ids": []}', "label_token_ids"),
]


@pytest.mark.parametrize(("path", "body", "words"), REFUSED)
def test_a_body_that_its_endpoint_fails_on_is_refused(path, body, words):
    assert_refused(Exchange(path, chunks(body.encode())), words)


@pytest.mark.parametrize("path", ["/v1/detokenize/", "/generate/"])
def test_a_slash_at_the_end_changes_nothing(path):
    assert_refused(Exchange(path, chunks(b'"x"')), "JSON object")


def test_a_refused_body_may_come_in_chunks():
    messages = chunks(b'{"tok', b'ens": [1, ', b"", b"-5]}")
    assert_refused(Exchange("/v1/detokenize", messages), "got -5")


@pytest.mark.parametrize("blank", [b"", b" \n"])
def test_the_first_byte_is_looked_for_behind_blank_chunks(blank):
    assert_refused(Exchange("/generate", chunks(blank, blank, b'"x"')), "JSON object")


PASSED = [
    *[(path, b"{}") for path in sorted(PATHS)],
    # No endpoint of SGLang fails on these: the endpoint answers them itself.
    *[(path, body) for path in sorted(PATHS) for body in (b"", b"  ", b"{", b'{"x": \xff}')],
    (CHAT, b'{"messages": [], "response_format": {"type": "text"}}'),
    (CHAT, b'{"messages": [], "response_format": null}'),
    (CHAT, b'{"messages": [{"content": "response_format"}]}'),
    ("/v1/completions", b'{"echo": true, "logprobs": 1}'),
    ("/v1/completions", b'{"echo": false, "logprobs": -1}'),
    ("/v1/completions", b'{"logprobs": -1}'),
    ("/v1/detokenize", b'{"tokens": [0, 99]}'),
    ("/v1/detokenize", b'{"tokens": [[0], [99], []]}'),
    ("/v1/detokenize", b'{"tokens": "x"}'),
    ("/v1/detokenize", b'{"tokens": ["x", null, 0.5]}'),
    ("/v1/messages", b'{"messages": [{"role": "user", "content": "x"}]}'),
    ("/v1/messages", b'{"messages": "x"}'),
    ("/v1/responses", b'{"input": "x"}'),
    ("/v1/score", b'{"label_token_ids": [1]}'),
    ("/generate", b'\n {"text": "x"}'),
    ("/generate", b'{"text": ' + b"[" * 5000),
    ("/v1/score", b'{"text": ' + b"[" * 5000),
]


@pytest.mark.parametrize(("path", "body"), PASSED)
def test_other_bodies_pass(path, body):
    messages = chunks(body)
    assert_passed(Exchange(path, messages), messages)


@pytest.mark.parametrize("path", ["/generate", "/v1/score", CHAT])
@pytest.mark.parametrize(
    "parts",
    [
        [b'{"text": "a', b"b", b'c"}'],
        [b"", b'{"response_format": ', b"", b"null}", b""],
        [bytes([byte]) for byte in b'{"label_token_ids": [1]}'],
    ],
)
def test_a_body_in_chunks_reaches_the_application_unchanged(path, parts):
    messages = chunks(*parts)
    exchange = Exchange(path, messages)
    assert_passed(exchange, messages)
    assert exchange.body == b"".join(parts)


def test_a_body_is_not_gathered_where_its_first_byte_decides():
    """A large prompt need not be held twice."""
    parts = chunks(b'{"text": "', b"x" * 1000, b'"}')
    left = list(parts)

    async def receive():
        return left.pop(0)

    async def app(scope, receive, send):
        assert len(left) == 2

    scope = {"type": "http", "path": "/generate", "method": "POST", "headers": JSON}
    asyncio.run(BodyGate(app, VOCAB)(scope, receive, None))


@pytest.mark.parametrize(
    "options",
    [
        {"method": "GET"},
        {"method": "DELETE"},
        {"method": "OPTIONS"},
        {"headers": []},
        {"headers": [(b"content-type", b"text/plain")]},
        {"headers": [(b"content-type", b"multipart/form-data; boundary=x")]},
        {"kind": "websocket"},
        {"kind": "lifespan"},
    ],
)
def test_other_requests_pass_without_a_look(options):
    messages = chunks(b'"x"')
    assert_passed(Exchange("/generate", messages, **options), messages)


@pytest.mark.parametrize("path", ["/", "", "/health", "/v1/models", "/v1/chat", "/generated"])
def test_other_paths_pass_without_a_look(path):
    messages = chunks(b'"x"')
    assert_passed(Exchange(path, messages), messages)


@pytest.mark.parametrize(
    "kind", [b"application/json", b"Application/JSON", b"application/json; charset=utf-8"]
)
@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_every_spelling_of_json_is_looked_at(kind, method):
    exchange = Exchange(
        "/generate", chunks(b"[]"), headers=[(b"content-type", kind)], method=method
    )
    assert_refused(exchange, "JSON object")


@pytest.mark.parametrize("path", ["/generate", "/v1/score"])
@pytest.mark.parametrize("before", [[], chunks(b'{"text', b"")[:1]])
def test_an_application_sees_the_client_leave(path, before):
    left = {"type": "http.disconnect"}
    exchange = Exchange(path, [*before, left])
    assert exchange.reached
    assert exchange.seen == [*before, left]


def test_only_messages_of_the_body_are_held():
    """The application receives a later disconnect, since it asks for it."""
    messages = [*chunks(b"{}"), {"type": "http.disconnect"}]
    exchange = Exchange("/v1/score", messages)
    assert exchange.seen == messages
