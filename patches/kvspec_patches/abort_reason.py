"""disaggregation.utils.prepare_abort: a request that was wrong by itself is answered so.

SGLang 0.5.17 has such a request, one whose grammar cannot be compiled, say, computed as one of a
single token; prefill and decode servers then find that its transfer failed, and answer 500 where
one server answers 400.
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
