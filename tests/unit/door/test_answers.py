"""Requests that succeed."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

CHUNKS = [b'data: {"text": "a"}\n\n', b'data: {"text": "ab"}\n\n', b"data: [DONE]\n\n"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": ["a", "b"]}),
        ("/v1/completions", {"model": "m", "prompt": "a"}),
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_both_are_asked_and_decode_answers(open_house, run, path, body):
    async def scenario():
        async with open_house() as house:
            prefill, decode = house.prefill[0], house.decode[0]
            prefill.key = decode.key = "k"
            reply = await house.door.post(path, json=body, headers={"Authorization": "Bearer k"})
            assert reply.status == 200
            assert await reply.json() == {"text": "decode"}
            assert prefill.requests[0].pop("stream") is False
            assert prefill.requests == decode.requests
            assert decode.requests[0]["bootstrap_host"] == "127.0.0.1"
            assert decode.requests[0]["bootstrap_port"] == 8998
            for stub in (prefill, decode):
                assert stub.headers[0]["Authorization"] == "Bearer k"
                assert body.items() <= stub.requests[0].items()

    run(scenario())


def test_a_stream_passes_piece_by_piece_while_the_prefill_server_still_sends(open_house, run):
    """Residuals arrive long after the first token."""

    async def scenario():
        async with open_house() as house:
            steps = [asyncio.Event() for _ in CHUNKS]

            async def stream(request: web.Request) -> web.StreamResponse:
                out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await out.prepare(request)
                for step, chunk in zip(steps, CHUNKS, strict=True):
                    await step.wait()
                    await out.write(chunk)
                return out

            house.prefill[0].behave = house.prefill[0].wait
            house.decode[0].behave = stream
            reply = await house.door.post("/generate", json={"text": "a", "stream": True})
            assert reply.headers["Content-Type"] == "text/event-stream"
            for step, chunk in zip(steps, CHUNKS, strict=True):
                step.set()
                assert await reply.content.readexactly(len(chunk)) == chunk
            assert await reply.content.read() == b""
            # The rest of that prefill is not needed.
            await house.prefill[0].cancelled.wait()

    run(scenario())


def test_requests_take_turns_at_the_servers(open_house, run):
    async def scenario():
        async with open_house(num_each=2) as house:
            for _ in range(4):
                await (await house.door.post("/generate", json={"text": "a"})).read()
            for stub in (*house.prefill, *house.decode):
                assert len(stub.requests) == 2
            rooms = {request["bootstrap_room"] for request in house.decode[0].requests}
            assert rooms == {request["bootstrap_room"] for request in house.prefill[0].requests}

    run(scenario())


def test_questions_about_the_model_go_to_a_decode_server(open_house, run):
    async def scenario():
        async with open_house() as house:
            reply = await house.door.get("/v1/models")
            assert await reply.json() == {"text": "decode"}

    run(scenario())


def test_server_info_is_of_all_servers(open_house, run):
    async def scenario():
        async with open_house() as house:
            await house.prefill[0].server.close()
            info = await (await house.door.get("/server_info")).json()
            assert info["decode"] == [{"url": house.decode[0].url, **house.decode[0].info}]
            assert "the connection to the prefill server" in info["prefill"][0]["error"]

    run(scenario())


def test_health_needs_a_server_of_either_role(open_house, run):
    async def scenario():
        async with open_house(num_each=2) as house:
            assert (await house.door.get("/health")).status == 200
            house.decode[0].healthy = False
            assert (await house.door.get("/health")).status == 200
            house.decode[1].healthy = False
            reply = await house.door.get("/health")
            assert reply.status == 503
            said = await reply.json()
            assert [state["healthy"] for state in said["prefill"]] == [True, True]
            assert "answered 503" in said["decode"][1]["error"]

    run(scenario())
