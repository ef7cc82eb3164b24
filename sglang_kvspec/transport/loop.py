"""A thread that steps one end of a link, so that callers never wait for a socket."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from sglang_kvspec.core.errors import TransportError
from sglang_kvspec.transport.counters import LinkCounters

Event = TypeVar("Event")

# Longest wait of a step. Calls, messages and the end's timers end it early.
IDLE_S = 10.0
CLOSE_S = 10.0
# pyzmq releases the GIL at every message. A thread that computes in Python would then keep it for
# 5 ms each time, Python's own interval. bench_transfer_loops.py measures what that costs.
SWITCH_INTERVAL_S = 0.0005


class End(Protocol[Event]):
    """End of a link: a Sender, a Receiver or a StoreClient."""

    counters: LinkCounters

    def step(self, timeout_s: float) -> list[Event]: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class Loop(Generic[Event]):
    """Owner of an end and of the thread that steps it. Calls may come from any thread, and never
    wait for the link. They raise TransportError after close(), or once the loop's thread has
    failed. A loop lowers the process's thread switch interval to SWITCH_INTERVAL_S."""

    def __init__(
        self, end: End[Event], name: str, on_news: Callable[[], None] | None = None
    ) -> None:
        """on_news: called on the loop's thread when take_events() has something or the loop has
        failed, for callers that wait for several loops at once. It must not call the loop."""
        self._end, self._name, self._on_news = end, name, on_news
        self._lock = threading.RLock()
        self._has_news = threading.Condition(self._lock)
        self._calls: list[Callable[[], None]] = []
        self._events: list[Event] = []
        self._error: BaseException | None = None
        self._is_closed = False
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        # A daemon, so that a process can exit although a loop was not closed.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def take_events(self, timeout_s: float = 0.0) -> list[Event]:
        """Return the events since the last call. timeout_s: longest wait for an event, for callers
        that have nothing else to do."""
        with self._lock:
            self._has_news.wait_for(lambda: self._events or self._is_over, timeout_s)
            self._check()
            events, self._events = self._events, []
        return events

    def counters(self) -> LinkCounters:
        """Return a copy of the counters. Related counters may be a frame apart."""
        self._check()
        return self._end.counters.snapshot()

    def close(self) -> None:
        """End the thread and its sockets. Queued calls that have not run are dropped. Raises
        TransportError if the loop has failed or its thread does not end."""
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
        """Queue `call` for the loop's thread, which runs calls soon and in order."""
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
            # Once this lock is held, no call wakes the end any more, so the end may be closed.
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
        # In a function of its own, so that its locals keep no call's memory while the end waits.
        with self._lock:
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def _guard(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            # This thread cannot report the error: the next call raises it.
            with self._lock:
                self._error = self._error or error
