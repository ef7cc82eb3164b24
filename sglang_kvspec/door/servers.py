"""The servers behind the door: whose turn it is, and what each says about itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, Literal
from urllib.parse import urlsplit

from sglang_kvspec.door.errors import SideFailed
from sglang_kvspec.door.rooms import Meeting

Role = Literal["prefill", "decode"]


class Server:
    """One SGLang server. `meeting` is unknown until it introduced itself, and after it failed:
    who comes back at the same URL may listen at another port, or be in another role."""

    def __init__(self, role: Role, url: str) -> None:
        self.role = role
        self.url = url
        self._meeting: Meeting | None = None

    def __str__(self) -> str:
        return f"the {self.role} server {self.url}"

    @property
    def is_known(self) -> bool:
        return self._meeting is not None

    @property
    def meeting(self) -> Meeting:
        assert self._meeting is not None, f"{self} has not introduced itself"
        return self._meeting

    def introduce(self, info: Mapping[str, Any]) -> None:
        """Take in its /server_info. Raises SideFailed where it is not what the door was told."""
        mode, port = info.get("disaggregation_mode"), info.get("disaggregation_bootstrap_port")
        if mode != self.role:
            raise SideFailed(502, f"{self} runs with --disaggregation-mode {mode}")
        if not isinstance(port, int):
            raise SideFailed(502, f"{self} names no bootstrap port, but {port!r}")
        host = urlsplit(self.url).hostname
        assert host is not None, "server_url() let it in"
        self._meeting = Meeting(host, port)

    def forget(self) -> None:
        self._meeting = None


class Servers:
    """All servers of both roles; requests take turns at them."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self.by_role: Mapping[Role, tuple[Server, ...]] = {
            "prefill": tuple(Server("prefill", url) for url in prefill),
            "decode": tuple(Server("decode", url) for url in decode),
        }
        self._turns = {role: cycle(servers) for role, servers in self.by_role.items()}

    def next(self, role: Role) -> Server:
        return next(self._turns[role])


def server_url(text: str) -> str:
    """A base URL without a slash at its end. Raises ValueError for anything else."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{text!r} is no URL of the form http://HOST:PORT")
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username:
        raise ValueError(f"{text!r} has more than scheme, host and port")
    return f"{parts.scheme}://{parts.netloc}"
