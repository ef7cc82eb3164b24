"""One request at two servers: the decode server's answer, unless either of them fails."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, web

from sglang_kvspec.door.answers import (
    credentials,
    read_bounded,
    refusal,
    relay,
    report,
    request_headers,
)
from sglang_kvspec.door.errors import ClientGone, SideFailed
from sglang_kvspec.door.rooms import Request, pair
from sglang_kvspec.door.servers import Server

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """request_s: from a request to the end of its answer; question_s: the same for what the door
    asks of a server; connect_s: to reach one; verdict_s: from a decode server's failure until the
    prefill server must have said what was wrong with the request."""

    request_bytes: int = 64 << 20
    request_s: float = 3600.0
    question_s: float = 30.0
    connect_s: float = 10.0
    verdict_s: float = 1.0


class Exchange:
    """Requests at servers. `session` passes bytes on as they are: it does not decompress."""

    def __init__(self, session: ClientSession, limits: Limits) -> None:
        self._session = session
        self._verdict_s = limits.verdict_s
        self._question = ClientTimeout(total=limits.question_s, sock_connect=limits.connect_s)
        self._request = ClientTimeout(total=limits.request_s, sock_connect=limits.connect_s)

    async def run(
        self, incoming: web.Request, request: Request, prefill: Server, decode: Server
    ) -> web.StreamResponse:
        """Answer `incoming` with what the decode server says, as it says it.

        Leaving cancels what is still under way at either server: the one that did not fail, both
        when the client hangs up, and a prefill of which the decode server needs no more.
        """
        headers = request_headers(incoming.headers)
        outgoing = web.StreamResponse()
        failed: SideFailed | None = None
        answered = False
        try:
            async with asyncio.TaskGroup() as group:
                for server in (prefill, decode):
                    if not server.is_known:
                        server.introduce(await self.server_info(server, headers))
                bodies = pair(incoming.path, request, prefill.meeting)
                other = group.create_task(
                    self._prefill(prefill, incoming.path, bodies.prefill, headers)
                )
                try:
                    async with self.ask(decode, incoming.path, headers, bodies.decode) as answer:
                        await relay(incoming, outgoing, answer)
                        answered = True
                except SideFailed as failure:
                    if failure.status >= 500:
                        # The reason may be a refusal that the prefill server is about to send.
                        await asyncio.wait({other}, timeout=self._verdict_s)
                    raise
                other.cancel()
        except* SideFailed as failures:
            failed = _first(failures)
            if failed.status >= 500:
                # Whoever comes back at the same URL may listen at another port.
                prefill.forget()
                decode.forget()
        except* ClientGone:
            logger.info("a client hung up: its request is cancelled")
        if failed is None or answered:
            return outgoing
        return await report(incoming, outgoing, failed)

    async def server_info(self, server: Server, headers: Mapping[str, str]) -> dict[str, Any]:
        """What a server says of itself. Raises SideFailed."""
        async with self.ask(server, "/server_info", credentials(headers)) as answer:
            said = await read_bounded(answer)
        try:
            info = json.loads(said)
        except (ValueError, RecursionError) as error:
            raise SideFailed(502, f"{server} says nothing readable of itself: {error}") from error
        if not isinstance(info, dict):
            raise SideFailed(502, f"{server} says a {type(info).__name__} of itself")
        return info

    @asynccontextmanager
    async def ask(
        self, server: Server, path: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> AsyncIterator[ClientResponse]:
        """A server's answer, with a status of success, to a GET, or to a POST of `body`; leaving
        early cancels the request there.

        Raises SideFailed for anything else, also for what goes wrong while the answer is read.
        """
        try:
            async with self._session.request(
                "GET" if body is None else "POST",
                server.url + path,
                data=body,
                headers=headers,
                timeout=self._question if body is None else self._request,
                allow_redirects=False,
            ) as answer:
                if answer.status >= 300:
                    raise await refusal(server, answer)
                yield answer
        except TimeoutError as error:
            raise SideFailed(504, f"{server} did not answer in time") from error
        except ClientError as error:
            raise SideFailed(502, f"the connection to {server} failed: {_reason(error)}") from error

    async def _prefill(
        self, server: Server, path: str, body: bytes, headers: Mapping[str, str]
    ) -> None:
        async with self.ask(server, path, headers, body) as answer:
            # Read, so that an answer that breaks off is seen, and dropped.
            async for _ in answer.content.iter_any():
                pass


def _reason(error: ClientError) -> str:
    return str(error) or type(error).__name__


def _first(failures: BaseExceptionGroup[SideFailed]) -> SideFailed:
    """Return the failure that ended the others: a refusal where there is one, else the first."""
    leaves = [
        inner if isinstance(inner, SideFailed) else _first(inner) for inner in failures.exceptions
    ]
    return min(leaves, key=lambda failure: failure.status >= 500)
