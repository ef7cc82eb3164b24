"""Bytes that are not HTTP: the door logs one line, without a traceback."""

from __future__ import annotations

import asyncio
import logging

import pytest

from sglang_kvspec.door.malformed import SERVER_LOGGER, OneLine, log_in_one_line


@pytest.fixture(autouse=True)
def one_line(caplog):
    logger = logging.getLogger(SERVER_LOGGER)
    level = logger.level
    log_in_one_line()
    yield
    logger.setLevel(level)
    for each in [each for each in logger.filters if isinstance(each, OneLine)]:
        logger.removeFilter(each)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
        b"GET / HTTP/9.7.1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nContent-Length: many\r\n\r\n",
    ],
    ids=["TLS", "header", "version", "length"],
)
def test_what_is_not_http_logs_one_line(open_house, run, caplog, sent):
    async def scenario():
        async with open_house() as house:
            server = house.door.server
            reader, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(sent)
            assert b" 400 " in await reader.readline()
            writer.close()
            assert (await house.door.get("/health")).status == 200

    run(scenario())
    (record,) = [record for record in caplog.records if record.name == SERVER_LOGGER]
    text = logging.Formatter("%(levelname)s %(message)s").format(record)
    assert text.startswith("WARNING 400 Error handling request from 127.0.0.1: ")
    assert "\n" not in text
