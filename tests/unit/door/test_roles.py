"""Servers of a wrong role: the log names them when the door opens, and /health reports them as
unhealthy."""

from __future__ import annotations

import asyncio
import logging

import pytest

from sglang_kvspec.door import app, roles


def lines_of(caplog):
    return [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if record.name.startswith("sglang_kvspec.door")
    ]


@pytest.fixture(autouse=True)
def checked(monkeypatch, caplog):
    """Event that is set once the roles of all servers have been checked. The check retries after 10
    ms."""
    over = asyncio.Event()

    async def check(exchange, servers):
        await roles.check_roles(exchange, servers, retry_s=0.01)
        over.set()

    monkeypatch.setattr(app, "check_roles", check)
    caplog.set_level(logging.INFO)
    return over


@pytest.mark.parametrize("mode", ["null", "decode"])
def test_a_wrong_role_is_logged_at_the_start_in_one_line(open_house, run, caplog, checked, mode):
    async def scenario():
        async with open_house(wrong={"disaggregation_mode": mode}) as house:
            await checked.wait()
            assert lines_of(caplog) == [
                (
                    "ERROR",
                    f"the prefill server {house.prefill[0].url} runs with --disaggregation-mode "
                    f"{mode}, not prefill: give the door another URL, or start that server with "
                    "--disaggregation-mode prefill",
                )
            ]

    run(scenario())


def test_a_server_that_is_not_up_yet_is_asked_again(open_house, run, caplog, checked):
    async def scenario():
        async with open_house(late=True) as house:
            # The third request follows two failures, of which only one is logged.
            for _ in range(3):
                await house.prefill[0].asked_role.acquire()
            ((level, text),) = lines_of(caplog)
            assert level == "INFO"
            assert "waiting for a server: the connection to the prefill server" in text
            house.prefill[0].info["disaggregation_mode"] = "decode"
            house.prefill[0].is_up = True
            await checked.wait()
            assert lines_of(caplog)[1][0] == "ERROR"

    run(scenario())


def test_servers_of_their_role_are_not_mentioned(open_house, run, caplog, checked):
    async def scenario():
        async with open_house() as house:
            assert (await house.door.get("/health")).status == 200
            await checked.wait()
            assert not lines_of(caplog)

    run(scenario())


def test_a_server_of_another_role_is_not_healthy(open_house, run):
    async def scenario():
        async with open_house(wrong={"disaggregation_mode": "decode"}) as house:
            reply = await house.door.get("/health")
            assert reply.status == 503
            said = await reply.json()
            assert "not prefill" in said["prefill"][0]["error"]
            assert said["decode"][0]["healthy"]
            info = await (await house.door.get("/server_info")).json()
            assert "not prefill" in info["prefill"][0]["error"]
            assert info["prefill"][0]["disaggregation_mode"] == "decode"
            # A server of the right role takes its place.
            house.prefill[0].info["disaggregation_mode"] = "prefill"
            assert (await house.door.get("/health")).status == 200

    run(scenario())


def test_a_server_that_tells_its_role_to_clients_with_a_key_only_is_healthy(
    open_house, run, caplog, checked
):
    async def scenario():
        async with open_house() as house:
            house.prefill[0].key = "secret"
            assert (await house.door.get("/health")).status == 200
            await checked.wait()
            assert not [line for line in lines_of(caplog) if line[0] == "ERROR"]

    run(scenario())


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (b"{not json", "400 /generate: the body is not JSON"),
        (b"[1]", "400 /generate: the body is a list, expected an object"),
        (b'{"text": "a", "sampling_params": {"n": 2}}', "400 /generate: n > 1"),
        (b"x" * 2000, "413 /generate: Maximum request body size 1000 exceeded"),
    ],
)
def test_a_request_that_is_refused_logs_one_line(open_house, run, caplog, body, line):
    async def scenario():
        async with open_house(request_bytes=1000) as house:
            await house.door.post("/generate", data=body)
            ((level, text),) = lines_of(caplog)
            assert level == "WARNING"
            assert text.startswith(line)
            assert "\n" not in text

    run(scenario())
