"""Health of a store's disk: one line in the log when writing fails, and when it works again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from time import monotonic

logger = logging.getLogger(__name__)

# Seconds without a failure after which a disk counts as mended: a full disk may still take small
# writes between failures.
MENDED_S = 60.0


class WriteHealth:
    """Health of a store's disk, used only by the thread that writes."""

    def __init__(self, directory: Path, clock: Callable[[], float] = monotonic) -> None:
        self._directory, self._clock = directory, clock
        self._failed_s: float | None = None

    def note_failure(self, error: OSError) -> None:
        if self._failed_s is None:
            logger.warning(
                "KVSpec: cannot write to the prefix store %s: %s. New prefixes are not kept: their "
                "prompts are computed again, which costs speed and changes no output",
                self._directory,
                error.strerror or error,
            )
        self._failed_s = self._clock()

    def note_success(self) -> None:
        if self._failed_s is None or self._clock() - self._failed_s < MENDED_S:
            return
        self._failed_s = None
        logger.info("KVSpec: the prefix store %s keeps new prefixes again", self._directory)
