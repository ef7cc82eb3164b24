"""The door's HTTP endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import ClientSession, TCPConnector, web

from sglang_kvspec.door.answers import (
    credentials,
    log_failure,
    relay,
    report,
    request_headers,
)
from sglang_kvspec.door.errors import (
    ClientGone,
    RequestError,
    SideFailed,
    WrongServer,
    error_body,
)
from sglang_kvspec.door.exchange import Exchange, Limits
from sglang_kvspec.door.roles import check_roles
from sglang_kvspec.door.rooms import PROMPT_FIELDS, read_request
from sglang_kvspec.door.servers import Server, Servers

# Questions about the model, which any decode server answers.
MODEL_PATHS = ("/v1/models", "/model_info", "/get_model_info")

Said = dict[str, Any]
_EXCHANGE = web.AppKey("exchange", Exchange)


def make_app(servers: Servers, limits: Limits) -> web.Application:
    """Build the application of the door.

    Run it with handler_cancellation=True: otherwise requests go on after their client hung up.
    """
    door = Door(servers)
    app = web.Application(client_max_size=limits.request_bytes)

    async def sessions(app: web.Application) -> AsyncIterator[None]:
        async with _open_session() as session:
            exchange = app[_EXCHANGE] = Exchange(session, limits)
            checking = asyncio.create_task(check_roles(exchange, servers.all()))
            yield
            checking.cancel()
            await asyncio.gather(checking, return_exceptions=True)

    app.cleanup_ctx.append(sessions)
    app.add_routes([web.post(path, door.generate) for path in PROMPT_FIELDS])
    app.add_routes([web.get(path, door.ask_decode) for path in MODEL_PATHS])
    app.add_routes(
        [web.get(path, door.server_info) for path in ("/server_info", "/get_server_info")]
    )
    app.add_routes([web.get("/health", door.health)])
    return app


class Door:
    """Handlers of the HTTP endpoints."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    async def generate(self, incoming: web.Request) -> web.StreamResponse:
        try:
            request = read_request(incoming.path, await incoming.read())
            prefill, decode = self._servers.next("prefill"), self._servers.next("decode")
            return await incoming.app[_EXCHANGE].run(incoming, request, prefill, decode)
        except web.HTTPRequestEntityTooLarge as error:
            log_failure(incoming, error.status, str(error.text))
            raise
        except RequestError as error:
            log_failure(incoming, 400, str(error))
            return web.json_response(body=error_body(400, str(error)), status=400)

    async def ask_decode(self, incoming: web.Request) -> web.StreamResponse:
        exchange, server = incoming.app[_EXCHANGE], self._servers.next("decode")
        outgoing = web.StreamResponse()
        headers = request_headers(incoming.headers)
        try:
            async with exchange.ask(server, incoming.path, headers) as answer:
                await relay(incoming, outgoing, answer)
        except SideFailed as failed:
            return await report(incoming, outgoing, failed)
        except ClientGone:
            return outgoing
        return outgoing

    async def server_info(self, incoming: web.Request) -> web.Response:
        """Answer with the /server_info of every server, by role, as SGLang's benchmarks read it."""
        exchange = incoming.app[_EXCHANGE]

        async def ask(server: Server) -> Said:
            info: Said = {}
            try:
                info = await exchange.server_info(server, incoming.headers)
                server.check(info)
            except SideFailed as failed:
                info = {**info, "error": failed.message}
            return {"url": server.url, **info}

        return web.json_response(await self._of_all(ask))

    async def health(self, incoming: web.Request) -> web.Response:
        """Answer 200 if at least one server of each role is healthy. Name the servers that do not
        answer or have another role."""
        exchange = incoming.app[_EXCHANGE]

        async def ask(server: Server) -> Said:
            try:
                async with exchange.ask(server, "/health", credentials(incoming.headers)):
                    pass
                if not server.fits:
                    await self._check(exchange, server, incoming)
            except SideFailed as failed:
                return {"url": server.url, "healthy": False, "error": failed.message}
            return {"url": server.url, "healthy": True}

        states = await self._of_all(ask)
        fit = all(any(state["healthy"] for state in role) for role in states.values())
        return web.json_response(states, status=200 if fit else 503)

    @staticmethod
    async def _check(exchange: Exchange, server: Server, incoming: web.Request) -> None:
        """Raise WrongServer if a server has another role.

        A server that refuses to tell this client its role still counts as healthy.
        """
        try:
            server.check(await exchange.server_info(server, incoming.headers))
        except WrongServer:
            raise
        except SideFailed:
            pass

    async def _of_all(self, ask: Callable[[Server], Awaitable[Said]]) -> dict[str, list[Said]]:
        return {
            role: list(await asyncio.gather(*map(ask, servers)))
            for role, servers in self._servers.by_role.items()
        }


def _open_session() -> ClientSession:
    return ClientSession(
        # No limit: each request needs two connections at a time, and under a limit two requests
        # could wait for each other forever. No reuse: a server may close an idle connection just
        # when the next request is sent on it, and that request cannot be sent again.
        connector=TCPConnector(limit=0, force_close=True),
        # Bytes and headers pass unchanged.
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
    )
