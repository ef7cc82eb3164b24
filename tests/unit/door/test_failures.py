"""Requests that fail: the client receives the reason, and no server keeps working for the
request."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import ClientPayloadError, web

REQUEST = {"text": "a"}
either = pytest.mark.parametrize("failing", ["prefill", "decode"])


def refusing(status, message):
    async def behave(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": message}}, status=status)

    return behave


async def begin_stream(request: web.Request) -> web.StreamResponse:
    out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await out.prepare(request)
    await out.write(b"data: 1\n\n")
    return out


def sides(house, failing):
    """Return (the stub that fails, the other stub, which never answers)."""
    pair = (house.prefill[0], house.decode[0])
    bad, good = pair if failing == "prefill" else pair[::-1]
    good.behave = good.wait
    return bad, good


@either
def test_a_failure_of_one_side_ends_the_other(open_house, run, failing):
    async def scenario():
        async with open_house() as house:
            bad, good = sides(house, failing)
            bad.behave = refusing(503, "no memory")
            reply = await house.door.post("/generate", json=REQUEST)
            assert reply.status == 503
            error = (await reply.json())["error"]
            assert error["message"] == f"the {failing} server {bad.url} answered 503: no memory"
            if good.asked.is_set():
                await good.cancelled.wait()

    run(scenario())


@either
def test_a_servers_error_message_reaches_the_client(open_house, run, failing):
    async def scenario():
        async with open_house() as house:
            bad, _ = sides(house, failing)
            bad.behave = refusing(400, "the prompt is too long")
            reply = await house.door.post("/generate", json=REQUEST)
            assert reply.status == 400
            assert await reply.json() == {"error": {"message": "the prompt is too long"}}

    run(scenario())


@either
def test_a_server_that_dies_ends_the_request(open_house, run, failing):
    async def scenario():
        async with open_house() as house:
            bad, good = sides(house, failing)

            async def die(request: web.Request) -> web.StreamResponse:
                await good.asked.wait()
                return await bad.die(request)

            bad.behave = die
            reply = await house.door.post("/generate", json=REQUEST)
            assert reply.status == 502
            message = (await reply.json())["error"]["message"]
            assert message.startswith(f"the connection to the {failing} server {bad.url} failed")
            await good.cancelled.wait()

    run(scenario())


@either
def test_a_server_that_is_not_there_ends_the_request(open_house, run, failing):
    async def scenario():
        async with open_house() as house:
            bad, good = sides(house, failing)
            await bad.server.close()
            reply = await house.door.post("/generate", json=REQUEST)
            assert reply.status == 502
            assert f"the {failing} server" in (await reply.json())["error"]["message"]
            assert not good.asked.is_set()

    run(scenario())


@either
def test_a_server_that_closes_idle_connections_loses_no_request(open_house, run, failing):
    """Servers close idle connections after some seconds. A request that reuses a connection at that
    moment would fail."""

    async def scenario():
        async with open_house() as house:
            server = getattr(house, failing)[0]
            used = set()

            async def answer_once(request: web.Request) -> web.StreamResponse:
                if request.transport in used:
                    return await server.die(request)
                used.add(request.transport)
                return await server.answer(request)

            server.behave = answer_once
            for _ in range(3):
                reply = await house.door.post("/generate", json=REQUEST)
                assert reply.status == 200, await reply.text()
            assert len(used) == 3

    run(scenario())


@either
def test_a_stream_that_has_begun_ends_with_an_error_and_without_its_end(open_house, run, failing):
    async def scenario():
        async with open_house() as house:
            prefill, decode = house.prefill[0], house.decode[0]
            fail = asyncio.Event()

            async def stream(request: web.Request) -> web.StreamResponse:
                out = await begin_stream(request)
                await (fail.wait() if failing == "decode" else decode.wait(request))
                await decode.die(request)
                return out

            async def answer(request: web.Request) -> web.StreamResponse:
                await (fail.wait() if failing == "prefill" else prefill.wait(request))
                return await refusing(500, "out of pages")(request)

            decode.behave, prefill.behave = stream, answer
            reply = await house.door.post("/generate", json={**REQUEST, "stream": True})
            assert reply.status == 200
            assert await reply.content.readuntil(b"\n\n") == b"data: 1\n\n"
            fail.set()
            event = await reply.content.readuntil(b"\n\n")
            error = json.loads(event.removeprefix(b"data: "))["error"]
            assert f"the {failing} server" in error["message"]
            with pytest.raises(ClientPayloadError):
                await reply.content.read()
            await (prefill if failing == "decode" else decode).cancelled.wait()

    run(scenario())


def test_a_prefill_that_breaks_off_is_no_answer(open_house, run):
    async def scenario():
        async with open_house() as house:
            prefill, decode = house.prefill[0], house.decode[0]

            async def break_off(request: web.Request) -> web.StreamResponse:
                await begin_stream(request)
                await decode.asked.wait()
                return await prefill.die(request)

            prefill.behave, decode.behave = break_off, decode.wait
            reply = await house.door.post("/generate", json=REQUEST)
            assert reply.status == 502
            await decode.cancelled.wait()

    run(scenario())


@pytest.mark.parametrize("in_a_stream", [False, True])
def test_a_client_that_hangs_up_ends_both(open_house, run, in_a_stream):
    async def scenario():
        async with open_house() as house:
            prefill, decode = house.prefill[0], house.decode[0]

            async def stream(request: web.Request) -> web.StreamResponse:
                await begin_stream(request)
                return await decode.wait(request)

            prefill.behave, decode.behave = prefill.wait, stream if in_a_stream else decode.wait
            asking = asyncio.create_task(
                house.door.post("/generate", json={**REQUEST, "stream": in_a_stream})
            )
            await prefill.asked.wait()
            await decode.asked.wait()
            if in_a_stream:
                reply = await asking
                await reply.content.readuntil(b"\n\n")
                reply.close()
            else:
                asking.cancel()
            await prefill.cancelled.wait()
            await decode.cancelled.wait()

    run(scenario())


def test_a_server_that_takes_too_long_ends_the_request(open_house, run):
    async def scenario():
        async with open_house(request_s=0.05) as house:
            prefill, decode = house.prefill[0], house.decode[0]
            prefill.behave, decode.behave = prefill.wait, decode.wait
            reply = await house.door.post("/generate", json=REQUEST)
            assert reply.status == 504
            assert "did not answer in time" in (await reply.json())["error"]["message"]

    run(scenario())


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"prompt": "a" * 1000}, 413, ""),
        ({"prompt": "a", "n": 2}, 400, "n > 1"),
    ],
    ids=["too large", "refused"],
)
def test_what_the_door_does_not_take_reaches_no_server(open_house, run, body, status, words):
    async def scenario():
        async with open_house(request_bytes=1000) as house:
            reply = await house.door.post("/v1/completions", json=body)
            assert reply.status == status
            assert words in await reply.text()
            assert not house.prefill[0].asked.is_set()
            assert not house.decode[0].asked.is_set()

    run(scenario())


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        ({"disaggregation_mode": "null"}, "runs with --disaggregation-mode null"),
        ({"disaggregation_mode": "prefill"}, "has disaggregation_bootstrap_port None, expected"),
        (["?"], "is a list, expected an object"),
    ],
)
def test_a_server_that_is_not_what_the_door_was_told_is_not_used(open_house, run, info, reason):
    async def scenario():
        async with open_house() as house:
            house.prefill[0].info = info
            reply = await house.door.post("/generate", json=REQUEST)
            assert reply.status == 502
            assert reason in (await reply.json())["error"]["message"]
            assert not house.prefill[0].asked.is_set()

    run(scenario())


@either
def test_a_restarted_prefill_server_is_used_at_its_new_port(open_house, run, failing):
    """The decode server, which cannot reach the old port, is the first to notice."""

    async def scenario():
        async with open_house() as house:
            prefill, decode = house.prefill[0], house.decode[0]
            bad, good = sides(house, failing)
            bad.behave = refusing(500, "no server there")
            assert (await house.door.post("/generate", json=REQUEST)).status == 500
            bad.behave, good.behave = bad.answer, good.answer
            prefill.info["disaggregation_bootstrap_port"] = 9000
            assert (await house.door.post("/generate", json=REQUEST)).status == 200
            assert decode.requests[-1]["bootstrap_port"] == 9000

    run(scenario())


def test_a_refusal_takes_precedence_over_a_failed_decode_server(open_house, run):
    async def scenario():
        async with open_house(verdict_s=20.0) as house:
            prefill, decode = house.prefill[0], house.decode[0]
            decode_failed = asyncio.Event()

            async def fail(request: web.Request) -> web.StreamResponse:
                decode_failed.set()
                return web.json_response({"error": {"message": "its KV is lost"}}, status=500)

            async def refuse_later(request: web.Request) -> web.StreamResponse:
                await decode_failed.wait()
                return web.json_response({"error": {"message": "no such grammar"}}, status=400)

            decode.behave, prefill.behave = fail, refuse_later
            reply = await house.door.post("/generate", json=REQUEST)
            assert reply.status == 400
            assert "no such grammar" in await reply.text()

    run(scenario())
