"""disaggregation.utils.get_kv_class: adds `--disaggregation-transfer-backend kvspec`.

SGLang 0.5.17 knows a closed list of backends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hook(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    from sglang_kvspec.adapters.transfer.backend import kv_class

    return kv_class(original, transfer_backend, class_type)
