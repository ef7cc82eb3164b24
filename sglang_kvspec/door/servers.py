"""Servers behind the door: which is next, and what each reports about itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, Literal
from urllib.parse import urlsplit

from sglang_kvspec.door.errors import WrongServer
from sglang_kvspec.door.rooms import RankExchange

Role = Literal["prefill", "decode"]


class Server:
    """One SGLang server. `meeting` is unknown before introduce() and after forget(): a server that
    returns at the same URL may listen at another port, or have another role."""

    def __init__(self, role: Role, url: str) -> None:
        self.role = role
        self.url = url
        self._meeting: RankExchange | None = None
        self._fits = False

    def __str__(self) -> str:
        return f"the {self.role} server {self.url}"

    @property
    def is_known(self) -> bool:
        return self._meeting is not None

    @property
    def meeting(self) -> RankExchange:
        assert self._meeting is not None, f"the /server_info of {self} is not known yet"
        return self._meeting

    @property
    def fits(self) -> bool:
        """Return True if the server has confirmed its role since its last failure."""
        return self._fits

    def introduce(self, info: Mapping[str, Any]) -> None:
        """Store where requests meet the server, from its /server_info. Raises WrongServer."""
        self._meeting = self.check(info)

    def check(self, info: Mapping[str, Any]) -> RankExchange:
        """Return where requests meet the server, from its /server_info.

        Raises WrongServer if the server has another role, or names no bootstrap port.
        """
        self._fits = False
        mode, port = info.get("disaggregation_mode"), info.get("disaggregation_bootstrap_port")
        if mode != self.role:
            raise WrongServer(
                502,
                f"{self} runs with --disaggregation-mode {mode}, not {self.role}: give the door "
                f"another URL, or start that server with --disaggregation-mode {self.role}",
            )
        if not isinstance(port, int):
            raise WrongServer(
                502, f"{self} has disaggregation_bootstrap_port {port!r}, expected an integer"
            )
        host = urlsplit(self.url).hostname
        assert host is not None, "server_url() must refuse a URL without a host"
        self._fits = True
        return RankExchange(host, port)

    def forget(self) -> None:
        self._meeting, self._fits = None, False


class Servers:
    """All servers of both roles. Servers of a role take turns at requests."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self.by_role: Mapping[Role, tuple[Server, ...]] = {
            "prefill": tuple(Server("prefill", url) for url in prefill),
            "decode": tuple(Server("decode", url) for url in decode),
        }
        self._turns = {role: cycle(servers) for role, servers in self.by_role.items()}

    def all(self) -> list[Server]:
        return [server for servers in self.by_role.values() for server in servers]

    def next(self, role: Role) -> Server:
        return next(self._turns[role])


def server_url(text: str) -> str:
    """Return a base URL without a slash at its end. Raises ValueError for any other URL."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{text!r} is not a URL of the form http://HOST:PORT")
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username:
        raise ValueError(f"{text!r} must have only a scheme, a host and a port")
    return f"{parts.scheme}://{parts.netloc}"
