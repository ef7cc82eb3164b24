"""A door with two stub servers behind it, all in one event loop on loopback."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from sglang_kvspec.door.app import make_app
from sglang_kvspec.door.exchange import Limits
from sglang_kvspec.door.rooms import PROMPT_FIELDS
from sglang_kvspec.door.servers import Servers

# No scenario takes a hundredth of this time. One that waits in vain fails after it.
PATIENCE_S = 20.0

Behaviour = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Stub:
    """Stand-in for a server, which records every request's JSON, and answers as `behave` does.

    Stubs of both roles share `rooms`: a decode server answers only after the prefill server has
    received the request of its room.
    """

    def __init__(self, role: str, rooms: defaultdict[str, asyncio.Event]) -> None:
        self.role = role
        self._rooms = rooms
        self.info: dict[str, Any] = {
            "disaggregation_mode": role,
            "disaggregation_bootstrap_port": 8998,
        }
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.asked = asyncio.Event()
        # Released for each request for the role, answered or not.
        self.asked_role = asyncio.Semaphore(0)
        self.cancelled = asyncio.Event()
        self.healthy = self.is_up = True
        self.key: str | None = None
        self.behave: Behaviour = self.answer
        app = web.Application()
        app.add_routes([web.post(path, self._generate) for path in PROMPT_FIELDS])
        app.add_routes([web.get("/server_info", self._info), web.get("/health", self._health)])
        app.add_routes([web.get("/v1/models", self.answer)])
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return str(self.server.make_url("/")).rstrip("/")

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.role == "decode" and request.method == "POST":
            await self._rooms[_room(await request.json())].wait()
        return web.json_response({"text": self.role})

    async def wait(self, request: web.Request) -> web.StreamResponse:
        """Never answer."""
        await asyncio.Event().wait()
        raise AssertionError("nothing sets that event")

    async def die(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        self.headers.append(dict(request.headers))
        self.asked.set()
        if self.role == "prefill":
            self._rooms[_room(self.requests[-1])].set()
        try:
            return await self.behave(request)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def _info(self, request: web.Request) -> web.StreamResponse:
        self.asked_role.release()
        if not self.is_up:
            return await self.die(request)
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            raise web.HTTPUnauthorized
        return web.json_response(self.info)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)


def _room(request: dict[str, Any]) -> str:
    return str(request["bootstrap_room"])


@dataclass
class House:
    """A door and its stub servers. door: client of the door. prefill, decode: the stubs behind
    it."""

    door: TestClient[Any, Any]
    prefill: list[Stub]
    decode: list[Stub]


@asynccontextmanager
async def _open_house(
    num_each: int = 1, wrong: dict[str, Any] | None = None, late: bool = False, **limits: Any
) -> AsyncIterator[House]:
    """Start a door and its stubs. wrong: wrong entries in the first prefill server's information.
    late: the first prefill server is not up yet."""
    async with AsyncExitStack() as stack:
        rooms: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        stubs = {
            role: [Stub(role, rooms) for _ in range(num_each)] for role in ("prefill", "decode")
        }
        stubs["prefill"][0].info |= wrong or {}
        stubs["prefill"][0].is_up = not late
        for stub in (*stubs["prefill"], *stubs["decode"]):
            await stub.server.start_server()
            stack.push_async_callback(stub.server.close)
        urls = {role: [stub.url for stub in some] for role, some in stubs.items()}
        app = make_app(Servers(urls["prefill"], urls["decode"]), Limits(**limits))
        client = await stack.enter_async_context(TestClient(TestServer(app)))
        yield House(client, stubs["prefill"], stubs["decode"])


@pytest.fixture
def open_house() -> Callable[..., Any]:
    """Context manager of a House: `async with open_house(num_each=1, **limits) as house`."""
    return _open_house


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, None]], None]:
    """Return a function that runs a scenario to its end, within PATIENCE_S."""

    def run_scenario(scenario: Coroutine[Any, Any, None]) -> None:
        asyncio.run(asyncio.wait_for(scenario, PATIENCE_S))

    return run_scenario
