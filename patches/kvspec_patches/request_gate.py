"""TokenizerManager.generate_request: refuses a request that would end a scheduler.

SGLang 0.5.17 normalises a request before it checks types and counts. The hook runs before that.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any


def hook(
    original: Callable[..., AsyncIterator[Any]], self: Any, obj: Any, *args: Any, **kwargs: Any
) -> AsyncIterator[Any]:
    from sglang_kvspec.adapters.activation import config_of
    from sglang_kvspec.adapters.request_gate import check_raw, pool_pages_of

    if config_of(self.server_args) is not None:
        try:
            check_raw(obj, pool_pages_of(self))
        except ValueError:
            # SGLang's abort at the end of a stream reads these fields, which normalising sets.
            obj.is_single, obj.rid = True, ""
            raise
    return original(self, obj, *args, **kwargs)
