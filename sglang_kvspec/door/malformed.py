"""One line in the log for each malformed request, where aiohttp logs a traceback or nothing."""

from __future__ import annotations

import logging

from aiohttp.http_exceptions import HttpProcessingError

SERVER_LOGGER = "aiohttp.server"


class OneLine(logging.Filter):
    """Turn aiohttp's records of malformed requests into one line; drop its other DEBUG records."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            reason = " ".join(str(error.message).split())
            record.msg = f"{error.code} {record.getMessage()}: {reason}"
            record.args, record.exc_info = (), None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        return record.levelno > logging.DEBUG


def log_in_one_line() -> None:
    """Make aiohttp's server log one line for each malformed request, also if it logs at DEBUG."""
    logger = logging.getLogger(SERVER_LOGGER)
    logger.setLevel(logging.DEBUG)
    if not any(isinstance(each, OneLine) for each in logger.filters):
        logger.addFilter(OneLine())
