"""PrefillAdder.add_one_req: a request that would soon cause retractions waits in the queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hook(original: Callable[..., Any], self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_kvspec.adapters.scheduling import add_if_it_fits

    return add_if_it_fits(original, self, req, args, kwargs)
