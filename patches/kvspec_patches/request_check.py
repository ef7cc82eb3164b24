"""TokenizerManager._validate_one_request: refuses a request that KVSpec would answer wrongly."""

from __future__ import annotations

from typing import Any


def hook(result: None, self: Any, obj: Any, input_ids: Any, *args: Any, **kwargs: Any) -> None:
    from sglang_kvspec.adapters.activation import config_of
    from sglang_kvspec.adapters.request_gate import check_tokens
    from sglang_kvspec.adapters.requests import check_request
    from sglang_kvspec.adapters.transfer.refusals import check_transferred

    if config_of(self.server_args) is None:
        return
    check_request(obj)
    check_tokens(obj, input_ids, self.model_config.vocab_size)
    if self.server_args.disaggregation_mode != "null":
        check_transferred(obj)
