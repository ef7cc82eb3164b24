"""Early ends of a request, and what its client is told then."""

from __future__ import annotations

import json


class RequestError(ValueError):
    """Request that the door itself refuses; the message says why."""


class ClientGone(Exception):
    """Client that hung up before its answer was complete."""


class SideFailed(Exception):
    """Failure of one server's part of a request, which ends the request.

    `body` is the answer that the client gets: JSON of the form {"error": {...}}, or the server's
    own words. `message` is the sentence for the log and for a stream that has begun.
    """

    def __init__(self, status: int, message: str, body: bytes | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.body = error_body(status, message) if body is None else body


class WrongServer(SideFailed):
    """Server that has another role than the door was told, or lacks what that role needs."""


def error_body(status: int, message: str) -> bytes:
    """Return an error as JSON, in the form that SGLang's clients know."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return json.dumps({"error": {"message": message, "type": kind, "code": status}}).encode()
