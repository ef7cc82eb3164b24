"""Requests that the door sends to either server."""

from __future__ import annotations

import json

import pytest

from sglang_kvspec.door.errors import RequestError
from sglang_kvspec.door.rooms import ROOM_BOUND, RankExchange, num_prompts, pair, read_request

MEETING = RankExchange("10.0.0.1", 8998)


def paired(path, request, **options):
    bodies = pair(path, request, MEETING, **options)
    return json.loads(bodies.prefill), json.loads(bodies.decode)


def test_both_servers_get_the_same_room_below_the_bound():
    bounds = []

    def draw(bound):
        bounds.append(bound)
        return bound - 1

    prefill, decode = paired("/generate", {"text": "x", "kept": [1.5, None]}, draw=draw)
    assert bounds == [ROOM_BOUND]
    assert decode == {
        "text": "x",
        "kept": [1.5, None],
        "bootstrap_host": "10.0.0.1",
        "bootstrap_port": 8998,
        "bootstrap_room": 2**63 - 1,
    }
    assert prefill == {**decode, "stream": False}


def test_rooms_differ_between_requests():
    rooms = {paired("/generate", {"text": "x"})[1]["bootstrap_room"] for _ in range(50)}
    assert len(rooms) == 50


def test_a_client_cannot_name_a_room():
    stolen = {"text": "x", "bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 7}
    prefill, decode = paired("/generate", stolen, draw=lambda bound: 99)
    for body in (prefill, decode):
        assert body["bootstrap_host"] == "10.0.0.1"
        assert body["bootstrap_port"] == 8998
        assert body["bootstrap_room"] == 99


def test_only_the_decode_server_streams():
    request = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    prefill, decode = paired("/v1/completions", request)
    assert prefill["stream"] is False
    assert "stream_options" not in prefill
    assert decode["stream"] is True
    assert decode["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("path", "request_", "count"),
    [
        ("/generate", {"text": "a"}, None),
        ("/generate", {"text": ["a"]}, 1),
        ("/generate", {"text": ["a", "b", "c"]}, 3),
        ("/generate", {"text": None, "input_ids": [1, 2, 3]}, None),
        ("/generate", {"input_ids": [[1, 2], [3]]}, 2),
        ("/generate", {"input_embeds": [[0.5, 1.0]]}, None),
        ("/generate", {"input_embeds": [[[0.5, 1.0]], [[2.0, 3.0]]]}, 2),
        ("/generate", {}, None),
        ("/v1/completions", {"prompt": "a"}, None),
        ("/v1/completions", {"prompt": [1, 2]}, None),
        ("/v1/completions", {"prompt": ["a", "b"]}, 2),
        ("/v1/completions", {"prompt": [[1], [2], [3]]}, 3),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, None),
    ],
)
def test_every_prompt_of_a_batch_gets_a_room(path, request_, count):
    assert num_prompts(path, request_) == count
    drawn = iter(range(100, 200))
    _, decode = paired(path, request_, draw=lambda bound: next(drawn))
    expected = 100 if count is None else list(range(100, 100 + count))
    assert decode["bootstrap_room"] == expected


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/generate", b'{"text": ', "not JSON"),
        ("/generate", b"\xff", "not JSON"),
        ("/generate", b"[" * 100_000, "not JSON"),
        ("/generate", b'["text"]', "a list, expected an object"),
        ("/generate", b'{"text": "a", "sampling_params": {"n": 2}}', "n > 1"),
        ("/generate", b'{"text": ["a"], "sampling_params": [{"n": 2}]}', "n > 1"),
        ("/v1/completions", b'{"prompt": "a", "n": 3}', "n > 1"),
        ("/v1/chat/completions", b'{"messages": [], "n": 3}', "n > 1"),
        (
            "/generate",
            b'{"text": "a", "return_logprob": true, "logprob_start_len": 0}',
            "log-probabilities of the prompt",
        ),
        (
            "/generate",
            b'{"text": ["a"], "return_logprob": true, "logprob_start_len": [5]}',
            "log-probabilities of the prompt",
        ),
        (
            "/v1/completions",
            b'{"prompt": "a", "echo": true, "logprobs": 1}',
            "log-probabilities of the prompt",
        ),
    ],
)
def test_what_two_servers_cannot_answer_is_refused_with_the_reason(path, body, reason):
    with pytest.raises(RequestError, match=reason):
        read_request(path, body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", b'{"text": "a", "sampling_params": {"n": 1}}'),
        ("/generate", b'{"text": "a", "return_logprob": true, "logprob_start_len": -1}'),
        ("/generate", b'{"text": "a", "logprob_start_len": 0}'),
        ("/v1/completions", b'{"prompt": "a", "n": null, "logprobs": 5}'),
        ("/v1/completions", b'{"prompt": "a", "echo": true}'),
    ],
)
def test_everything_else_is_not(path, body):
    assert read_request(path, body) == json.loads(body)


def test_an_empty_batch_is_refused():
    with pytest.raises(RequestError, match="text must not be an empty list"):
        num_prompts("/generate", {"text": []})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", b'{"text": []}'),
        ("/generate", b'{"input_ids": []}'),
        ("/v1/completions", b'{"prompt": []}'),
    ],
)
def test_a_batch_without_prompts_is_refused_before_servers_are_asked(
    path: str, body: bytes
) -> None:
    with pytest.raises(RequestError, match="empty list"):
        read_request(path, body)
