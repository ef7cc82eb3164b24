"""Headers and answers that pass through the door, and how a failed answer ends."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from aiohttp import ClientResponse, web

from sglang_kvspec.door.errors import ClientGone, SideFailed, error_body
from sglang_kvspec.door.servers import Server

logger = logging.getLogger(__name__)

EVENT_STREAM = "text/event-stream"
# Longest part of an answer that the door reads for itself.
ANSWER_BYTES = 1 << 22
# Headers of one connection, which do not pass; RFC 9110 section 7.6.1.
_CONNECTION_HEADERS = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
# Headers that fit only the client's own request: each server has another host and body.
_REQUEST_BODY_HEADERS = {"host", "content-length", "content-encoding", "expect"}


async def relay(
    incoming: web.Request, outgoing: web.StreamResponse, answer: ClientResponse
) -> None:
    """Pass an answer on piece by piece. Raises ClientGone if the client hangs up."""
    outgoing.set_status(answer.status, answer.reason)
    for name, value in answer.headers.items():
        if name.lower() not in _CONNECTION_HEADERS:
            outgoing.headers.add(name, value)
    try:
        await outgoing.prepare(incoming)
    except ConnectionError as error:
        raise ClientGone from error
    async for piece in answer.content.iter_any():
        try:
            await outgoing.write(piece)
        except ConnectionError as error:
            raise ClientGone from error
    try:
        await outgoing.write_eof()
    except ConnectionError as error:
        raise ClientGone from error


async def report(
    incoming: web.Request, outgoing: web.StreamResponse, failed: SideFailed
) -> web.StreamResponse:
    """Tell the client of a failure: by an answer or, if one has begun, by an event and a closed
    connection."""
    log_failure(incoming, failed.status, failed.message)
    if not outgoing.prepared:
        return web.Response(status=failed.status, body=failed.body, content_type="application/json")
    if outgoing.content_type == EVENT_STREAM:
        event = error_body(failed.status, failed.message)
        try:
            await outgoing.write(b"data: " + event + b"\n\n")
        except ConnectionError:
            logger.info("a client disconnected: the failure could not be sent")
    # Without the end of its message, no client takes the answer for complete.
    if incoming.transport is not None:
        incoming.transport.close()
    return outgoing


def log_failure(incoming: web.Request, status: int, message: str) -> None:
    """Log a failure on one line: `message` may have line breaks of a server or a client."""
    logger.warning("%s %s: %s", status, incoming.path, " ".join(message.split()))


def request_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the client's headers that a server gets."""
    dropped = _CONNECTION_HEADERS | _REQUEST_BODY_HEADERS
    return {name: value for name, value in headers.items() if name.lower() not in dropped}


async def read_bounded(answer: ClientResponse) -> bytes:
    """Read an answer, or its first ANSWER_BYTES."""
    pieces, left = [], ANSWER_BYTES
    while left and (piece := await answer.content.read(left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def credentials(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the client's headers that a server needs when the door itself asks."""
    return {name: value for name, value in headers.items() if name.lower() == "authorization"}


async def refusal(server: Server, answer: ClientResponse) -> SideFailed:
    """Return the failure for an answer without success. An error of SGLang with status 4xx passes
    unchanged; any other failure names the server."""
    said = await read_bounded(answer)
    message = _message(said)
    sentence = (
        f"{server} answered {answer.status}: {message or said[:200].decode(errors='replace')}"
    )
    if 400 <= answer.status < 500 and message is not None:
        return SideFailed(answer.status, sentence, said)
    return SideFailed(answer.status if answer.status >= 400 else 502, sentence)


def _message(said: bytes) -> str | None:
    """Return the sentence in an error of SGLang, of either form; None if there is none."""
    try:
        body = json.loads(said)
    except (ValueError, RecursionError):
        return None
    error = body.get("error", body) if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else None
