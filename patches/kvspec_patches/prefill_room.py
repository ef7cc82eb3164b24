"""PrefillAdder.add_one_req: a request that would soon have others retracted waits in the queue.

SGLang 0.5.17. Remove when SGLang counts what speculative decoding reserves, in pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TARGET = "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req"
KIND = "around"
SCOPE = "kvspec"


def hook(original: Callable[..., Any], self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_kvspec.adapters.scheduling import add_if_it_fits

    return add_if_it_fits(original, self, req, args, kwargs)
