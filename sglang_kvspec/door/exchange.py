"""One request at two servers: the client gets the decode server's answer, unless one fails."""

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
    """Limits of a request. request_s: from a request to the end of its answer. question_s: the
    same for the door's own questions to a server. connect_s: time to connect to a server.
    verdict_s: time that a prefill server has, after the decode server's failure, to name an error
    in the request."""

    request_bytes: int = 64 << 20
    request_s: float = 3600.0
    question_s: float = 30.0
    connect_s: float = 10.0
    verdict_s: float = 1.0


class Exchange:
    """Requests at servers. session: must not decompress, so that bytes pass unchanged."""

    def __init__(self, session: ClientSession, limits: Limits) -> None:
        self._session = session
        self._verdict_s = limits.verdict_s
        self._question = ClientTimeout(total=limits.question_s, sock_connect=limits.connect_s)
        self._request = ClientTimeout(total=limits.request_s, sock_connect=limits.connect_s)

    async def run(
        self, incoming: web.Request, request: Request, prefill: Server, decode: Server
    ) -> web.StreamResponse:
        """Pass the decode server's answer to the client of `incoming` as it comes.

        The end of this call cancels what is under way: the other server's part after a failure,
        both parts if the client hangs up, and a prefill that runs on when the answer is complete.
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
                        # The cause may be a refusal that the prefill server is about to send.
                        await asyncio.wait({other}, timeout=self._verdict_s)
                    raise
                other.cancel()
        except* SideFailed as failures:
            failed = _first(failures)
            if failed.status >= 500:
                # A server that returns at the same URL may listen at another port.
                prefill.forget()
                decode.forget()
        except* ClientGone:
            logger.info("a client disconnected: its request is cancelled")
        if failed is None or answered:
            return outgoing
        return await report(incoming, outgoing, failed)

    async def server_info(self, server: Server, headers: Mapping[str, str]) -> dict[str, Any]:
        """Ask a server for its /server_info. Raises SideFailed."""
        async with self.ask(server, "/server_info", credentials(headers)) as answer:
            said = await read_bounded(answer)
        try:
            info = json.loads(said)
        except (ValueError, RecursionError) as error:
            raise SideFailed(
                502, f"the /server_info of {server} cannot be read: {error}"
            ) from error
        if not isinstance(info, dict):
            raise SideFailed(
                502,
                f"the /server_info of {server} is a {type(info).__name__}, expected an object",
            )
        return info

    @asynccontextmanager
    async def ask(
        self, server: Server, path: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> AsyncIterator[ClientResponse]:
        """Send a GET, or a POST of `body`, and yield the answer if its status is below 300. Leaving
        the context early cancels the request at the server.

        Raises SideFailed for any other status or failure, also while the answer is read.
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
            # The answer is not used. Reading it shows whether it breaks off.
            async for _ in answer.content.iter_any():
                pass


def _reason(error: ClientError) -> str:
    return str(error) or type(error).__name__


def _first(failures: BaseExceptionGroup[SideFailed]) -> SideFailed:
    """Return the failure to report: the first with a status below 500, else the first."""
    leaves = [
        inner if isinstance(inner, SideFailed) else _first(inner) for inner in failures.exceptions
    ]
    return min(leaves, key=lambda failure: failure.status >= 500)
