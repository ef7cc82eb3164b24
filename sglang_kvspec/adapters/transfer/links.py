"""A decode server's links to prefill servers, by the addresses of their bootstrap servers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_kvspec.adapters.transfer.directory import QUERY_PERIOD_S, Answer, Directory
from sglang_kvspec.core.errors import HandshakeRefused, TransportError
from sglang_kvspec.transport import LinkState

logger = logging.getLogger(__name__)

# Seconds after which an unused link is closed: servers come and go.
IDLE_S = 120.0
_NO_ANSWER = "its bootstrap server has not answered yet"


@dataclass(slots=True)
class _Link:
    """Link to one prefill server. answer: addresses of all its ranks that are dialled. loop: None
    while there is no link. trouble: why there is none."""

    used_s: float
    answer: Answer | None = None
    loop: Any = None
    dialled_s: float = 0.0
    trouble: str = _NO_ANSWER


class PrefillLinks:
    """Links to prefill servers. Owned by the scheduler's thread; no call waits for a server."""

    def __init__(
        self,
        directory: Directory,
        dial: Callable[[Answer], Any],
        *,
        is_used: Callable[[Any], bool],
        on_gone: Callable[[Any, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """dial: makes a JoinedLink. is_used: True for a loop with transfers under way. on_gone:
        called with a loop from which nothing more will come, and why."""
        self._directory, self._dial, self._clock = directory, dial, clock
        self._is_used, self._on_gone = is_used, on_gone
        self._links: dict[str, _Link] = {}

    def loops(self) -> list[Any]:
        return [link.loop for link in self._links.values() if link.loop is not None]

    def by_address(self) -> dict[str, Any]:
        """Return the loops by the address of their bootstrap server."""
        return {addr: link.loop for addr, link in self._links.items() if link.loop is not None}

    def live(self, bootstrap_addr: str) -> Any | None:
        """Return a link that works; None while there is none, and asking again may help. Raises
        TransportError if it will not: the server refuses this one, or must not be dialled."""
        now_s = self._clock()
        link = self._links.get(bootstrap_addr)
        if link is None:
            self._close_unused(now_s)
            link = self._links[bootstrap_addr] = _Link(now_s)
        link.used_s = now_s
        state = self._state(link)
        if state is LinkState.LIVE:
            return link.loop
        if state is LinkState.REFUSED and now_s - link.dialled_s < QUERY_PERIOD_S:
            raise HandshakeRefused(link.loop.refusal)
        self._follow(bootstrap_addr, link, is_refused=state is LinkState.REFUSED)
        return None

    def trouble(self, bootstrap_addr: str) -> str:
        """Return why live() returns None."""
        link = self._links.get(bootstrap_addr)
        return _NO_ANSWER if link is None else link.trouble

    def drop(self, loop: Any, reason: str) -> None:
        """Forget and close a loop, which may have ended already."""
        for link in self._links.values():
            if link.loop is loop:
                link.loop, link.answer, link.trouble = None, None, reason
        self._on_gone(loop, reason)
        try:
            loop.close()
        except TransportError as error:
            logger.error("KVSpec: cannot close a link to a prefill server: %s", error)

    def _state(self, link: _Link) -> LinkState | None:
        """Return the state of a link; None if it has no loop, or its loop has ended."""
        if link.loop is None:
            return None
        try:
            state: LinkState = link.loop.state
        except TransportError as error:
            self.drop(link.loop, str(error))
            return None
        return state

    def _follow(self, bootstrap_addr: str, link: _Link, *, is_refused: bool) -> None:
        """Dial the server's address once the directory knows it: the server may have restarted and
        listen elsewhere."""
        answer = self._directory.take(bootstrap_addr)
        if answer is None:
            self._directory.ask(bootstrap_addr)
            return
        if not answer.addresses:
            link.trouble = answer.trouble
            return
        if answer == link.answer and not is_refused:
            return
        if link.loop is not None:
            assert link.answer is not None
            self.drop(link.loop, f"the prefill server no longer listens at {_told(link.answer)}")
        try:
            loop = self._dial(answer)
        except ValueError as error:
            raise TransportError(
                f"bootstrap server {bootstrap_addr} named {_told(answer)}: {error}"
            ) from None
        link.answer, link.loop, link.dialled_s = answer, loop, self._clock()
        link.trouble = (
            f"no prefill server answers at {_told(answer)}; if --kvspec-transfer-keys is set, "
            "check the keys of both servers"
        )

    def _close_unused(self, now_s: float) -> None:
        for addr, link in list(self._links.items()):
            if now_s - link.used_s < IDLE_S or (link.loop and self._is_used(link.loop)):
                continue
            if link.loop is not None:
                self.drop(link.loop, "the link was idle")
            self._directory.take(addr)
            del self._links[addr]


def _told(answer: Answer) -> str:
    return " and ".join(answer.addresses)
