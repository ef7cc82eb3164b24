"""A decode server finds its prefill servers without blocking, whatever they answer."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from sglang_kvspec.adapters.transfer.directory import (
    QUERY_PERIOD_S,
    Answer,
    Directory,
    address_in,
    size_in,
)
from sglang_kvspec.adapters.transfer.links import IDLE_S, PrefillLinks
from sglang_kvspec.core.errors import HandshakeRefused, TransportError
from sglang_kvspec.transport import LinkState

ADDR, SERVER, OTHER = "10.0.0.1:8998", "tcp://10.0.0.1:1", "tcp://10.0.0.1:2"


class Loop:
    """Stand-in for ReceiverLoop, with the parts that links use."""

    def __init__(self, address: str) -> None:
        self.address, self.refusal = address, None
        self.is_closed = self.has_failed = False
        self._state = LinkState.GREETING

    @property
    def state(self) -> LinkState:
        if self.has_failed:
            raise TransportError("the receiver's loop has failed: ZMQError")
        return self._state

    @state.setter
    def state(self, state: LinkState) -> None:
        self._state = state

    def close(self) -> None:
        self.is_closed = True
        if self.has_failed:
            raise TransportError("the receiver's loop has failed: ZMQError")


class Town:
    """A directory that answers at once, a clock, and a record of all links that were dialled."""

    def __init__(self) -> None:
        self.now_s, self.where = 100.0, Answer((SERVER,))
        self.dialled: list[Loop] = []
        self.gone: list[tuple[str, str]] = []
        self.used: set[str] = set()
        self._asked: set[str] = set()
        self.links = PrefillLinks(
            SimpleNamespace(ask=self._asked.add, take=self._take),
            self._dial,
            is_used=lambda loop: loop.address in self.used,
            on_gone=lambda loop, reason: self.gone.append((loop.address, reason)),
            clock=lambda: self.now_s,
        )

    def _take(self, addr: str) -> Answer | None:
        if addr not in self._asked:
            return None
        self._asked.discard(addr)
        return self.where

    def _dial(self, answer: Answer) -> Loop:
        if answer.addresses == ("tcp://[",):
            raise ValueError("Invalid IPv6 URL")
        self.dialled.append(Loop(answer.addresses[0]))
        return self.dialled[-1]

    def live(self, times: int = 4) -> object:
        for _ in range(times):
            found = self.links.live(ADDR)
        return found


@pytest.fixture
def town() -> Town:
    town = Town()
    town.live()
    return town


def test_a_link_is_used_once_it_is_live(town) -> None:
    (loop,) = town.dialled
    assert town.live() is None
    loop.state = LinkState.LIVE
    assert town.live() is loop
    assert len(town.dialled) == 1


def test_a_server_that_listens_elsewhere_now_is_dialled_there(town) -> None:
    town.where = Answer((OTHER,))
    town.live()
    old, new = town.dialled
    assert old.is_closed
    assert new.address == OTHER
    assert town.gone == [(SERVER, f"the prefill server no longer listens at {SERVER}")]


def test_a_server_with_another_number_of_ranks_is_dialled_anew(town) -> None:
    town.where = Answer((SERVER, OTHER))
    town.live()
    old, new = town.dialled
    assert (old.is_closed, new.is_closed) == (True, False)
    town.live()
    assert len(town.dialled) == 2


def test_a_server_that_stalls_keeps_its_link(town) -> None:
    (loop,) = town.dialled
    town.where = Answer((), trouble="ReadTimeout")
    town.live()
    assert not loop.is_closed
    assert town.links.trouble(ADDR) == "ReadTimeout"
    loop.state = LinkState.LIVE
    assert town.live() is loop


def test_a_link_whose_thread_ended_is_dialled_anew(town) -> None:
    """Its transfers are reported as gone, although closing the link raises."""
    (loop,) = town.dialled
    loop.has_failed = True
    assert town.live() is None
    assert len(town.dialled) == 2
    assert town.gone == [(SERVER, "the receiver's loop has failed: ZMQError")]


def test_a_refusal_is_told_at_once_and_tried_again_later(town) -> None:
    (loop,) = town.dialled
    loop.state, loop.refusal = LinkState.REFUSED, "model must be the same"
    with pytest.raises(HandshakeRefused, match="model must"):
        town.live(1)
    assert len(town.dialled) == 1
    town.now_s += QUERY_PERIOD_S
    assert town.live() is None
    assert len(town.dialled) == 2


def test_an_address_that_cannot_be_dialled_fails_its_requests(town) -> None:
    town.where = Answer(("tcp://[",))
    with pytest.raises(TransportError, match="Invalid IPv6"):
        town.live()


def test_unused_links_are_closed(town) -> None:
    (loop,) = town.dialled
    town.used = {SERVER}
    town.now_s += IDLE_S
    town.links.live("10.0.0.2:8998")
    assert not loop.is_closed
    town.used = set()
    town.links.live("10.0.0.3:8998")
    assert loop.is_closed
    assert ADDR not in town.links.by_address()


@pytest.mark.parametrize(
    "found",
    [
        *(None, [], "x", 7, {}, {"rank_ip": "127.0.0.1"}),
        *({"rank_ip": "127.0.0.1", "rank_port": port} for port in ("1", 0, 1 << 16, True)),
        {"rank_ip": 3, "rank_port": 1},
    ],
)
def test_garbage_is_no_address(found) -> None:
    with pytest.raises(ValueError, match="named no address"):
        address_in(found)


@pytest.mark.parametrize("found", [None, [2], {}, *({"attn_tp_size": n} for n in (0, -1, "2"))])
def test_garbage_is_no_number_of_ranks(found) -> None:
    with pytest.raises(ValueError, match="named no number of ranks"):
        size_in(found)


def test_whatever_goes_wrong_is_an_answer() -> None:
    """An answer of a stranger must neither end a scheduler nor make it ask for ever."""
    told = threading.Semaphore(0)

    def query(addr: str) -> Answer:
        raise UnicodeError("label empty or too long")

    directory = Directory(told.release, query)
    directory.ask(ADDR)
    assert told.acquire(timeout=5)
    answer = directory.take(ADDR)
    assert answer == Answer((), trouble="UnicodeError: label empty or too long")
    assert directory.take(ADDR) is None


def test_a_silent_server_is_asked_once_at_a_time_and_blocks_no_caller() -> None:
    now_s, asked, told, goes_on = [0.0], [], threading.Semaphore(0), threading.Event()

    def query(addr: str) -> Answer:
        asked.append(addr)
        goes_on.wait(5)
        return Answer((SERVER,))

    directory = Directory(told.release, query, clock=lambda: now_s[0])
    for _ in range(3):
        directory.ask(ADDR)
        now_s[0] += QUERY_PERIOD_S
        assert directory.take(ADDR) is None
    goes_on.set()
    assert told.acquire(timeout=5)
    assert asked == [ADDR]
    assert directory.take(ADDR) == Answer((SERVER,))
