"""A thread that steps one end of a link, so that whoever uses it never waits for a socket."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.transport.counters import LinkCounters

Event = TypeVar("Event")

# An end wakes up for calls and messages, and by itself for what is due.
IDLE_S = 10.0
CLOSE_S = 10.0
# pyzmq lets go of the GIL at every message; a thread that computes in Python would then keep it for
# 5 ms each time, which is Python's own interval. What that is worth: bench_transfer_loops.py.
SWITCH_INTERVAL_S = 0.0005


class End(Protocol[Event]):
    """A Sender or a Receiver."""

    counters: LinkCounters

    def step(self, timeout_s: float) -> list[Event]: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class Loop(Generic[Event]):
    """Owns an end and the thread that steps it. Calls may come from any thread and never wait for
    the link. Once a step or a call has raised, or after close(), each of them raises
    TransportError. Lowers the process's thread switch interval to SWITCH_INTERVAL_S."""

    def __init__(
        self, end: End[Event], name: str, on_news: Callable[[], None] | None = None
    ) -> None:
        """on_news: called, on the loop's thread, when there is something for take_events(), or the
        loop has failed, for whoever waits for several loops at once. It must not call the loop."""
        self._end, self._name, self._on_news = end, name, on_news
        self._lock = threading.RLock()
        self._has_news = threading.Condition(self._lock)
        self._calls: list[Callable[[], None]] = []
        self._events: list[Event] = []
        self._error: BaseException | None = None
        self._is_closed = False
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        # Whoever forgets to close a loop shall still be able to exit.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def take_events(self, timeout_s: float = 0.0) -> list[Event]:
        """What has happened since the last call. timeout_s: to wait for something to happen, for
        those who have nothing else to do."""
        with self._lock:
            self._has_news.wait_for(lambda: self._events or self._is_over, timeout_s)
            self._check()
            events, self._events = self._events, []
        return events

    def counters(self) -> LinkCounters:
        """A copy, of about now."""
        self._check()
        return self._end.counters.snapshot()

    def close(self) -> None:
        """End the thread and its sockets; what was asked for and not done yet is not done. Raises
        TransportError if the loop had failed."""
        with self._lock:
            was_over, self._is_closed = self._is_over, True
            if not was_over:
                self._end.wake()
            self._has_news.notify_all()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise TransportError(f"the {self._name} has not ended within {CLOSE_S} s")
        if self._error is not None:
            self._check()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._error is not None

    def _check(self) -> None:
        if self._error is not None:
            raise TransportError(f"the {self._name} has failed: {self._error!r}") from self._error
        if self._is_closed:
            raise TransportError(f"the {self._name} is closed")

    def _post(self, call: Callable[[], None]) -> None:
        """Have the loop's thread call something, soon and in order."""
        with self._lock:
            self._check()
            self._calls.append(call)
            if len(self._calls) == 1:
                self._end.wake()

    def _tell(self, events: list[Event]) -> None:
        with self._lock:
            self._events += events
            self._has_news.notify_all()
        if self._on_news is not None:
            self._on_news()

    def _run(self) -> None:
        self._guard(self._go_round)
        with self._lock:
            # Whoever wakes the end up has done so, and nobody will any more: it may be closed.
            self._has_news.notify_all()
        self._guard(self._end.close)
        if self._error is not None and self._on_news is not None:
            self._guard(self._on_news)

    def _go_round(self) -> None:
        while not self._is_closed:
            self._do_calls()
            if events := self._end.step(IDLE_S):
                self._tell(events)

    def _do_calls(self) -> None:
        # Apart from the round, so that memory in a call is not kept while an end waits.
        with self._lock:
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def _guard(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            # Nobody sees it on this thread: the next call raises it.
            with self._lock:
                self._error = self._error or error
