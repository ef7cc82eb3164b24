"""The door's command line, and how the door closes."""

from __future__ import annotations

import asyncio
import socket

import pytest
from aiohttp import ClientSession, web

from sglang_kvspec.door.__main__ import main
from sglang_kvspec.door.app import make_app
from sglang_kvspec.door.exchange import Limits
from sglang_kvspec.door.servers import Servers, server_url


@pytest.mark.parametrize("text", ["http://h:1", "http://h:1/", "https://[::1]:1"])
def test_a_base_url_is_accepted(text):
    assert server_url(text) == text.rstrip("/")


@pytest.mark.parametrize("text", ["h:1", "tcp://h:1", "http://", "http://h/v1", "http://u@h", ""])
def test_anything_else_stops_the_start_with_a_sentence(text, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--prefill", text, "--decode", "http://h:1"])
    assert stopped.value.code == 2
    assert "--prefill" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--max-request-mb", "--request-timeout-s", "--drain-s"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e300", "x"])
def test_no_limit_can_be_switched_off(flag, value, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--prefill", "http://h:1", "--decode", "http://h:1", flag, value])
    assert stopped.value.code == 2
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--port", "70000"), ("--port", "-1"), ("--host", "")])
def test_an_impossible_address_is_refused_by_its_flag(flags, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--prefill", "http://h:1", "--decode", "http://h:1", *flags])
    assert stopped.value.code == 2
    assert f"argument {flags[0]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("127.0.0.1", "address already in use"),
        ("192.0.2.1", "cannot assign requested address"),
        ("nowhere.invalid", ""),
        ("a..b", "label"),
    ],
)
def test_a_door_that_cannot_listen_says_so_in_a_sentence(host, reason, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(SystemExit) as stopped:
            main(
                [
                    *("--prefill", "http://h:1", "--decode", "http://h:1"),
                    *("--host", host, "--port", port),
                ]
            )
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    sentence = f"sglang-kvspec: error: --host {host} --port {port}: "
    (line,) = [line for line in error.splitlines() if line.startswith(sentence)]
    assert reason in line
    assert "allowed: an address of this machine and a free port" in line
    assert "Traceback" not in error


def test_closing_lets_a_running_request_finish(open_house, run):
    async def scenario():
        async with open_house() as house, ClientSession() as client:
            decode = house.decode[0]
            release = asyncio.Event()

            async def answer(request: web.Request) -> web.StreamResponse:
                await release.wait()
                return await decode.answer(request)

            decode.behave = answer
            runner = web.AppRunner(
                make_app(Servers([house.prefill[0].url], [decode.url]), Limits()),
                handler_cancellation=True,
            )
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            port = runner.addresses[0][1]
            asking = asyncio.create_task(
                client.post(f"http://127.0.0.1:{port}/generate", json={"text": "a"})
            )
            await decode.asked.wait()
            closing = asyncio.create_task(runner.cleanup())
            while runner.sites:
                await asyncio.sleep(0)
            release.set()
            assert (await asking).status == 200
            await closing

    run(scenario())


def test_the_command_runs_the_door_with_what_it_was_told(monkeypatch):
    ran = []
    monkeypatch.setattr(web, "run_app", lambda app, **options: ran.append((app, options)))
    main(
        [
            *("--prefill", "http://h:1", "--prefill", "http://h:2", "--decode", "http://h:3"),
            *("--port", "9", "--drain-s", "4", "--max-request-mb", "3"),
        ]
    )
    ((app, options),) = ran
    assert options["host"] == "127.0.0.1"
    assert options["port"] == 9
    assert options["shutdown_timeout"] == 4
    # Without this option requests of clients that hung up would keep running.
    assert options["handler_cancellation"] is True
    assert app._client_max_size == 3 << 20
