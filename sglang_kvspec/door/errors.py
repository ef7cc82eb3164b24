"""How a request can end early, and what its client is told then."""

from __future__ import annotations

import json


class RequestError(ValueError):
    """A request that no server need see; the message says why."""


class ClientGone(Exception):
    """The client hung up while it was being answered."""


class SideFailed(Exception):
    """One server's part failed and with it the request.

    `body` is the answer that the client gets, JSON of the form {"error": {...}} or what the server
    said; `message` is the sentence for the log and for a stream that has begun.
    """

    def __init__(self, status: int, message: str, body: bytes | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.body = error_body(status, message) if body is None else body


class WrongServer(SideFailed):
    """A server has another role than the door was told, or lacks what that role needs."""


def error_body(status: int, message: str) -> bytes:
    """An error as SGLang's clients know it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return json.dumps({"error": {"message": message, "type": kind, "code": status}}).encode()
