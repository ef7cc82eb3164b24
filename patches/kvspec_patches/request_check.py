"""TokenizerManager._validate_one_request: refuses a request KVSpec would answer wrongly.

SGLang 0.5.17. Remove when speculative algorithms can validate requests.
"""

from __future__ import annotations

from typing import Any

TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
KIND = "after"
SCOPE = "kvspec"


def hook(result: None, self: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
    from sglang_kvspec.adapters.activation import config_of
    from sglang_kvspec.adapters.requests import check_request
    from sglang_kvspec.adapters.transfer.refusals import check_transferred

    if config_of(self.server_args) is None:
        return
    check_request(obj)
    if self.server_args.disaggregation_mode != "null":
        check_transferred(obj)
