"""disaggregation.utils.prepare_abort: keeps the first abort reason of an invalid request.

SGLang 0.5.17 computes an invalid request, such as one whose grammar cannot be compiled, as a
request of a single token. Prefill and decode servers then find that its transfer failed, and answer
500. A single server answers 400.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hook(
    original: Callable[..., None], req: Any, error_message: str, status_code: Any = None
) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    original(req, error_message, status_code)
    own = req.to_finish
    if isinstance(own, FINISH_ABORT) and own.status_code is not None:
        req.finished_reason = own
