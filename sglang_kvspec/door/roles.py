"""Check at the start that each server has the role that the door was told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from sglang_kvspec.door.errors import SideFailed, WrongServer
from sglang_kvspec.door.exchange import Exchange
from sglang_kvspec.door.servers import Server

logger = logging.getLogger(__name__)

# Seconds between questions to a server that is not up yet.
RETRY_S = 5.0


async def check_roles(
    exchange: Exchange, servers: Iterable[Server], retry_s: float = RETRY_S
) -> None:
    """Ask every server for its role until it answers; log an error for each wrong one."""
    await asyncio.gather(*(_check_role(exchange, server, retry_s) for server in servers))


async def _check_role(exchange: Exchange, server: Server, retry_s: float) -> None:
    is_awaited = False
    while True:
        try:
            server.check(await exchange.server_info(server, {}))
        except WrongServer as wrong:
            logger.error(wrong.message)
        except SideFailed as failed:
            # The door has no API key. If the server wants one, the first request that brings a key
            # asks again.
            if failed.status >= 500:
                if not is_awaited:
                    logger.info("waiting for a server: %s", failed.message)
                is_awaited = True
                await asyncio.sleep(retry_s)
                continue
        return
