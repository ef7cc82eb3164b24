"""A server's reports about its link while most requests ran."""

from __future__ import annotations

import threading

import requests
from serving.link_watch import LinkWatch


class Server:
    """Server that answers with these numbers of requests, 0 for a link without work, None for a
    failed answer. After the last one it answers no more."""

    def __init__(self, *answers):
        self._answers, self.is_done = list(answers), threading.Event()

    def ask(self):
        if not self._answers:
            self.is_done.set()
            raise requests.ConnectionError
        count = self._answers.pop(0)
        if count is None:
            raise requests.Timeout
        return {"link": {"num_requests": count} if count else None, "left": len(self._answers)}


def watched(*answers):
    server = Server(*answers)
    with LinkWatch(server.ask, interval_s=0.001) as watch:
        assert server.is_done.wait(10)
    return watch


def test_the_last_of_the_most_requests():
    assert watched(0, 3, 5, 5, 2, 0).busiest["left"] == 2


def test_a_link_that_moves_nothing():
    assert watched(0, 0).busiest is None
    assert watched().busiest is None


def test_an_answer_that_does_not_come_is_counted_and_others_are_asked_for():
    watch = watched(3, None, 5, 4)
    assert watch.busiest["left"] == 1
    # Failed answers after the last one count, too.
    assert watch.num_missed >= 2
